"""Sums over micro-batches and processes, and the means shown of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from deepspec.drafts.contract import DraftLoss


def total(accelerator: Accelerator, values: Sequence[float]) -> list[float]:
    """Each value summed over all processes, in float64."""
    if accelerator.num_processes == 1:
        return list(values)
    mine = torch.tensor(values, dtype=torch.float64, device=accelerator.device)
    summed = accelerator.reduce(mine, reduction="sum")
    return summed.tolist()


def sums_and_weights(loss: DraftLoss) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The parts of a draft's loss, or an error for whoever writes the draft."""
    if not loss.sums or not loss.weights or loss.sums.keys() != loss.weights.keys():
        raise ValueError("A draft's forward gives `sums` and `weights` of the same, at least one, parts.")
    return loss.sums, loss.weights


@dataclass
class Meter:
    """What was seen since the last log. sums, weights by part; by draft step: how many positions were
    supervised, and at how many the draft's argmax was the teacher's; the overlap summed; tokens, no padding.
    """

    sums: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    valid: list[float] = field(default_factory=list)
    match: list[float] = field(default_factory=list)
    overlap: list[float] = field(default_factory=list)
    tokens: float = 0.0

    @torch.no_grad()
    def add(self, loss: DraftLoss, tokens: int, counted: bool = True) -> None:
        """Count one micro-batch of this process; one not `counted` adds zeros, for the layout's sake."""
        sums, weights = sums_and_weights(loss)
        scale = 1.0 if counted else 0.0
        for name in sums:
            self.sums[name] = self.sums.get(name, 0.0) + scale * float(sums[name])
            self.weights[name] = self.weights.get(name, 0.0) + scale * float(weights[name])
        if loss.valid is not None:
            self.valid = _grow(self.valid, loss.valid, scale)
            if loss.match is not None:
                self.match = _grow(self.match, loss.match & loss.valid, scale)
            if loss.overlap is not None:
                self.overlap = _grow(self.overlap, loss.overlap.where(loss.valid, 0.0), scale)
        self.tokens += scale * tokens

    def over_all(self, accelerator: Accelerator) -> "Meter":
        """The sum of all processes' meters, which have counted the same kinds of things."""
        names = sorted(self.sums)
        rows = [
            [self.sums[name] for name in names],
            [self.weights[name] for name in names],
            self.valid,
            self.match,
            self.overlap,
            [self.tokens],
        ]
        summed = iter(total(accelerator, [value for row in rows for value in row]))
        sums, weights, valid, match, overlap, tokens = [[next(summed) for _ in row] for row in rows]
        return Meter(
            sums=dict(zip(names, sums, strict=True)),
            weights=dict(zip(names, weights, strict=True)),
            valid=valid,
            match=match,
            overlap=overlap,
            tokens=tokens[0],
        )

    def cleared(self) -> "Meter":
        """Zeros of the same layout, so that it still adds up with other processes'."""
        return Meter(
            sums=dict.fromkeys(self.sums, 0.0),
            weights=dict.fromkeys(self.weights, 0.0),
            valid=[0.0] * len(self.valid),
            match=[0.0] * len(self.match),
            overlap=[0.0] * len(self.overlap),
        )

    def record(self, coefficients: dict[str, float]) -> dict[str, Any]:
        """loss (total and by part), accuracy and alpha by draft step; what had no sample is null."""
        parts = {name: _mean(self.sums[name], self.weights[name]) for name in self.sums}
        known = [coefficients[name] * value for name, value in parts.items() if value is not None]
        # a part with samples that is no number makes the whole none, not better
        broken = any(parts[name] is None and weight for name, weight in self.weights.items())
        return {
            "loss": sum(known) if known and not broken else None,
            "parts": parts,
            "accuracy": [_mean(a, b) for a, b in zip(self.match, self.valid, strict=False)],
            "alpha": [_mean(a, b) for a, b in zip(self.overlap, self.valid, strict=False)],
            "supervised": [int(count) for count in self.valid],
        }


def _grow(before: list[float], new: Tensor, scale: float) -> list[float]:
    """Steps may become more in the course of the training; those that were not there count nothing."""
    added = new.sum((0, 1)).tolist()
    return [a + scale * b for a, b in zip_longest(before, added, fillvalue=0.0)]


def _mean(part: float, whole: float) -> float | None:
    return part / whole if whole and math.isfinite(part) else None
