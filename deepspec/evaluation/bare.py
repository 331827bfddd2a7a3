"""Target and draft outside the engine: single steps to be timed, and logits by forwards of two shapes."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from deepspec.decoding.control import RoundControl
from deepspec.decoding.request import Request, Sampling
from deepspec.decoding.sampling import penalise
from deepspec.drafts.contract import Beginning, Committed, DraftContext, Drafter
from deepspec.evaluation.ties import LogitsTwoWays
from deepspec.target import Target, chain

Step = Callable[[], None]


def verify_steps(target: Target, text: Sequence[int], longest: int) -> Callable[[int], Step]:
    """n → a step in which the target reads n tokens on top of `text` in its state, and forgets them."""
    tokens = torch.tensor([text], device=target.device)
    context = tokens.shape[1]
    state = target.new_state(1, context + longest)
    target.forward(tokens, state, chain([0], context, target.device), 1)
    state.keep([context])

    def of(n: int) -> Step:
        new = tokens[:, -1:].repeat(1, n)
        layout = chain([context], n, target.device)

        def step() -> None:
            target.forward(new, state, layout)
            _synchronise(target.device)

        return step

    return of


def draft_steps(
    target: Target, draft: Drafter, text: Sequence[int], request: Request, committed: int
) -> Callable[[int], Step]:
    """j → a step in which the draft proposes j tokens after `text` and takes in `committed` ones.

    Its state grows by them at every step, as in decoding.
    """
    tokens = torch.tensor([text], device=target.device)
    context = tokens.shape[1] - 1
    layers: list[int] = list(getattr(draft, "capture_layers", []))
    output = target.forward(
        tokens[:, :-1], target.new_state(1, context), chain([0], context, target.device), 1, layers
    )
    features = output.features if output.features is not None else tokens.new_empty(1, 0, 0)

    @torch.inference_mode()
    def of(j: int) -> Step:
        room = context + 1 + j + 64 * committed
        state = draft.join(None, draft.begin(Beginning(DraftContext(target), tokens, features, room)))
        control = RoundControl([request], [1], j)
        count = min(committed, j + 1)
        new = features[:, -1:].repeat(1, count, 1) if output.features is not None else features

        @torch.inference_mode()
        def step() -> None:
            proposal = draft.propose(state, control)
            kept = torch.cat([proposal.tokens, proposal.tokens[:, -1:]], 1)[:, :count]
            draft.update(state, Committed(kept, new, [count]))
            _synchronise(target.device)

        return step

    return of


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


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
