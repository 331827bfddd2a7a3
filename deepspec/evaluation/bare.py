"""The target's logits outside the engine, by forwards of two shapes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspec.decoding.request import Sampling
from deepspec.decoding.sampling import penalise
from deepspec.evaluation.ties import LogitsTwoWays
from deepspec.target import Target, chain


def logits_two_ways(target: Target, k: int, repetition_penalty: float = 1.0) -> LogitsTwoWays:
    """The next token's logits by the shapes of plain decoding (token by token) and of verification (K+1).

    repetition_penalty: the answer's, which decides what is the largest of them.
    """

    def both(prompt: Sequence[int], answer: Sequence[int]) -> tuple[Tensor, Tensor]:
        found = [_next_logits(target, prompt, answer, block) for block in (1, k + 1)]
        if repetition_penalty != 1:
            sampling = Sampling(repetition_penalty=repetition_penalty)
            seen = torch.zeros_like(found[0], dtype=torch.bool)
            seen[[*prompt, *answer]] = True
            found = [penalise(logits[None], seen, [sampling])[0] for logits in found]
        return found[0], found[1]

    return both


def _next_logits(target: Target, prompt: Sequence[int], answer: Sequence[int], block: int) -> Tensor:
    """Prefill the prompt, then read the answer in blocks → logits [V] after its last token.

    The last block is filled up to its width behind the token in question, which cannot see that.
    """
    device = target.device
    length, room = len(prompt), len(prompt) + len(answer) + block
    state = target.new_state(1, room)
    first = torch.tensor([list(prompt)], device=device)
    logits = target.forward(first, state, chain([0], length, device), 1).logits[0, -1]
    state.keep([length])
    for start in range(0, len(answer), block):
        kept = list(answer[start : start + block])
        width = min(block, target.max_positions - state.lengths[0])
        new = torch.tensor([kept + kept[-1:] * (width - len(kept))], device=device)
        output = target.forward(new, state, chain(state.lengths, new.shape[1], device))
        logits = output.logits[0, len(kept) - 1]
        state.keep([len(kept)])
    return logits
