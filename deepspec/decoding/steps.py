"""Single steps of target and draft outside the engine, and what they take."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from deepspec.decoding.control import RoundControl
from deepspec.decoding.request import Request
from deepspec.decoding.trees import longest_path, size_of
from deepspec.drafts.contract import Beginning, Committed, DraftContext, Drafter, DynamicTree, StaticTree
from deepspec.target import Target, chain

Step = Callable[[], None]


def verify_steps(target: Target, text: Sequence[int], longest: int, rows: int = 1) -> Callable[[int], Step]:
    """n → a step in which the target reads n tokens on top of `text` in its state, and forgets them.

    rows: as many copies of the text, read side by side.
    """
    tokens = torch.tensor([text], device=target.device).repeat(rows, 1)
    context = tokens.shape[1]
    state = target.new_state(rows, context + longest, rows)
    target.forward(tokens, state, chain([0] * rows, context, target.device), 1)
    state.keep([context] * rows)

    def of(n: int) -> Step:
        new = tokens[:, -1:].repeat(1, n)
        layout = chain([context] * rows, n, target.device)

        def step() -> None:
            target.forward(new, state, layout)
            _synchronise(target.device)

        return step

    return of


def draft_steps(
    target: Target,
    draft: Drafter,
    text: Sequence[int],
    request: Request,
    committed: int,
    rows: int = 1,
    tree: StaticTree | DynamicTree | None = None,
) -> Callable[[int], Step]:
    """j → a step in which the draft proposes j tokens after `text` and takes in `committed` ones; with `tree` it
    proposes that, whatever j.

    Its state grows by them at every step, as in decoding. rows: as many copies of the text, side by side.
    """
    tokens = torch.tensor([text], device=target.device)
    context = tokens.shape[1] - 1
    layers: list[int] = list(getattr(draft, "capture_layers", []))
    output = target.forward(
        tokens[:, :-1], target.new_state(1, context), chain([0], context, target.device), 1, layers
    )
    features = output.features if output.features is not None else tokens.new_empty(1, context, 0)

    @torch.inference_mode()
    def of(j: int) -> Step:
        most = j if tree is None else longest_path(tree)
        room = context + 1 + (j if tree is None else size_of(tree)) + 64 * committed
        state = None
        for _ in range(rows):
            begun = draft.begin(Beginning(DraftContext(target), tokens, features, room, rows))
            state = draft.join(state, begun)
        control = RoundControl([request] * rows, [1] * rows, most, tree)
        count = min(committed, most + 1)
        new = features[:, -1:].repeat(rows, count, 1)

        @torch.inference_mode()
        def step() -> None:
            proposal = draft.propose(state, control)
            kept = torch.cat([proposal.tokens, proposal.tokens[:, -1:]], 1)[:, :count]
            draft.update(state, Committed(kept, new, kept.tolist()))
            _synchronise(target.device)

        return step

    return of


def time_steps(
    steps: Mapping[int, Step], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[int, float]:
    """Median seconds of each step.

    Every step runs once uncounted; then all run in turn, `repeats` times, forwards and backwards, so that a
    drift of the machine meets them alike. A step returns when its work is done (it synchronises its device).
    """
    for step in steps.values():
        step()
    taken: dict[int, list[float]] = {n: [] for n in steps}
    for turn in range(repeats):
        for n in sorted(steps, reverse=turn % 2 == 1):
            start = clock()
            steps[n]()
            taken[n].append(clock() - start)
    return {n: statistics.median(seconds) for n, seconds in taken.items()}


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
