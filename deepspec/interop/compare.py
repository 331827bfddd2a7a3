"""Is a draft that went out and came back the same one? Its logits, along given texts, say so."""

from typing import Any

import torch
from torch import Tensor

from deepspec.drafts.contract import Beginning, DraftContext, TrainableDraft
from deepspec.errors import UserError
from deepspec.target import Target

LENGTHS = (3, 11, 24)  # of the prompts
STEPS = 4  # drafted tokens behind each
TOLERANCE = 1e-3  # of the largest logit; the tensors are the same, only their order of computing may differ


class Forced:
    """A `Control` that 'draws' given tokens and keeps the logits that it was shown."""

    tree = None

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.max_tokens = tokens, len(tokens)
        self.logits: list[Tensor] = []

    def draw(self, logits: Tensor, parent: int, vocab: Tensor | None = None) -> tuple[Tensor, None]:
        self.logits.append(logits[0])
        return torch.tensor([self.tokens[parent + 1]], device=logits.device), None

    def draw_children(
        self, logits: Tensor, parent: int, count: int, vocab: Tensor | None = None
    ) -> tuple[Tensor, None]:
        raise AssertionError("asked for a chain")

    def go_on(self, confidence: Tensor) -> Tensor:
        return torch.ones_like(confidence, dtype=torch.bool)


@torch.inference_mode()
def draft_logits(draft: TrainableDraft, target: Target) -> Tensor:
    """[n, Vd] logits of `STEPS` drafted tokens behind each of a few texts, the same on every call."""
    found: list[Tensor] = []
    generator = torch.Generator().manual_seed(0)
    for length in LENGTHS:
        text = torch.randint(0, target.vocab_size, (1, length + STEPS), generator=generator).to(target.device)
        tokens, forced = text[:, :length], Forced(text[0, length:].tolist())
        before = tokens[:, :-1]
        positions = torch.arange(before.shape[1], device=target.device)[None]
        layers = draft.capture_layers if draft.needs_features else []
        features = target.capture(before, positions, torch.zeros_like(before), layers).features
        drafter: Any = draft  # both a module and a Drafter, which the types cannot say together
        state = drafter.begin(Beginning(DraftContext(target), tokens, features, length + STEPS + 1))
        drafter.propose(state, forced)
        found += forced.logits
    return torch.stack(found)


def check_same(draft: TrainableDraft, again: TrainableDraft, target: Target, what: str) -> float:
    """The largest difference of the two drafts' logits; `UserError` (a defect of ours) if they are not the same."""
    for one in (draft, again):
        module: Any = one
        module.to(target.device, target.dtype)
    first, second = draft_logits(draft, target).float(), draft_logits(again, target).float()
    same_words = _same(draft, again)
    worst = (first - second).abs().max().item() if first.shape == second.shape else float("inf")
    if not same_words or not worst <= TOLERANCE * first.abs().max().item():
        raise UserError(
            f"{what}, read back, is another draft: its logits differ by up to {worst:.3g}. Nothing was kept. This is a "
            "defect of deepspec: please report it with the draft's config.json."
        )
    return worst


def _same(draft: Any, again: Any) -> bool:
    """Whether both mean the same tokens and read the same layers."""
    ids, other = getattr(draft, "target_ids", None), getattr(again, "target_ids", None)
    words = ids is other is None or (ids is not None and other is not None and torch.equal(ids, other))
    return words and list(draft.capture_layers) == list(again.capture_layers)
