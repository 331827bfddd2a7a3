"""Greedy outputs that differ: is it rounding, or is the decoder wrong?"""

from collections.abc import Callable, Sequence

from torch import Tensor

from deepspec.evaluation.result import Tie

LogitsTwoWays = Callable[[Sequence[int], Sequence[int]], tuple[Tensor, Tensor]]


def prove_tie(
    logits_two_ways: LogitsTwoWays, prompt: Sequence[int], plain: Sequence[int], speculative: Sequence[int]
) -> Tie | None:
    """Examine the first difference of two greedy answers to one prompt; None where there is none.

    logits_two_ways: a prompt and the beginning of an answer → the next token's logits [V], twice: by forwards
    of the shapes of plain and of speculative decoding. The difference is a proven tie iff neither token lies
    further below the top, in either vector, than twice the largest difference of the two vectors. For the
    two top tokens that is top-1 − top-2 ≤ 2·max|Δlogit|; a token that
    is nowhere near the top is never excused.
    """
    shared = min(len(plain), len(speculative))
    position = next((i for i in range(shared) if plain[i] != speculative[i]), shared)
    if position == shared:
        if len(plain) == len(speculative):
            return None
        one = plain[position] if len(plain) > shared else None
        other = speculative[position] if len(speculative) > shared else None
        return Tie(position, one, other, None, None, False, "one answer ends where the other goes on")
    one, other = plain[position], speculative[position]
    first, second = (v.double() for v in logits_two_ways(prompt, plain[:position]))
    max_delta = float((first - second).abs().max())
    margin = max(float(v.max() - v[[one, other]].min()) for v in (first, second))
    proven = margin <= 2 * max_delta
    reason = None if proven else "the two tokens' logits are further apart than rounding explains"
    return Tie(position, one, other, margin, max_delta, proven, reason)
