"""How much each draft step counts in the loss: a fixed decay, or what the step is worth at present.

With ĉ_i = (1 − α)·Σ_v min(p, q)_i + α, the smoothed chance that step i is accepted (no gradient flows through it):

    decay     w_k = decay^(k−1)
    survival  w_k = Π_{i<k} ĉ_i                   how often step k is reached at all
    dpace     w_k = Σ_{j≥k} Π_{i≤j} ĉ_i           ∂(expected accepted length) / ∂ log ĉ_k

D-PACE is of Wu et al. 2026 (arXiv 2605.18810), who take q of the text's token for the chance and α = 0.5. A step
that is not supervised ends the sum. A part's loss stays a weighted mean, whatever the weights.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspec.drafts.contract import DraftLoss
from deepspec.drafts.losses import SumAndWeight
from deepspec.drafts.statistics import LogitsOf, StepStatistics

SMOOTHING = 0.5

OtherParts = dict[str, Callable[[Tensor | float], SumAndWeight]]


def survival(overlap: Tensor) -> Tensor:
    """[..., K] Σ min(p, q) by step → [..., K] the chance that each step is reached."""
    reached = _smoothed(overlap).cumprod(-1)
    return torch.cat([torch.ones_like(reached[..., :1]), reached[..., :-1]], -1)


def dpace(overlap: Tensor, valid: Tensor) -> Tensor:
    """[..., K] Σ min(p, q) and which steps there are (no step behind a missing one) → [..., K]."""
    accepted = _smoothed(overlap).cumprod(-1) * valid
    return accepted.flip(-1).cumsum(-1).flip(-1)


def _smoothed(overlap: Tensor) -> Tensor:
    return (1 - SMOOTHING) * overlap.detach() + SMOOTHING


@dataclass
class _Step:
    step: int
    logits: LogitsOf
    confidence: Tensor | None
    others: OtherParts


class WeightedSteps:
    """Gives a draft's steps to its statistics, each with its weight.

    D-PACE needs all steps before it knows the weight of the first: their logits are held, or computed once more where
    they would be too many.
    """

    def __init__(self, statistics: StepStatistics, kind: str, decay: float) -> None:
        self.statistics, self.kind, self.decay = statistics, kind, decay
        self.held: list[_Step] = []

    def add(
        self,
        step: int,
        logits: LogitsOf,
        confidence: Tensor | None = None,
        others: OtherParts | None = None,
    ) -> None:
        """As `StepStatistics.add`. others: the family's own parts of the loss, given the weight."""
        taken = _Step(step, logits, confidence, others or {})
        if self.kind == "dpace":
            if not self.statistics.in_pieces:
                held = logits(slice(None))
                taken.logits = lambda rows: held[rows]
            self.held.append(taken)
        else:
            self._give(taken, self._weight(step))

    def loss(self) -> DraftLoss:
        if self.held:
            valid = self.statistics.valid
            overlap = torch.zeros(valid.shape, dtype=torch.float32, device=valid.device)
            for taken in self.held:
                rows = valid[..., taken.step]
                overlap[..., taken.step][rows] = self.statistics.overlap_of(taken.step, taken.logits).float()
            weights = dpace(overlap, valid)
            for taken in self.held:
                self._give(taken, weights[..., taken.step][valid[..., taken.step]])
        return self.statistics.loss()

    def _weight(self, step: int) -> Tensor | float:
        if self.kind == "decay":
            return self.decay**step
        rows = self.statistics.valid[..., step]
        return survival(self.statistics.overlap[..., : step + 1])[..., step][rows]

    def _give(self, taken: _Step, weight: Tensor | float) -> None:
        self.statistics.add(taken.step, taken.logits, weight, taken.confidence)
        for name, part in taken.others.items():
            self.statistics.add_part(name, part(weight))
