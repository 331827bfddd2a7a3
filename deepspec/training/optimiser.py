"""The optimiser, the learning rate of every step, and one optimiser step over a window of micro-batches."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType

from deepspec.config.schema import Optimiser, TrainConfig
from deepspec.drafts.contract import DraftBatch, DraftLoss, TrainableDraft
from deepspec.errors import UserError
from deepspec.training.meters import sums_and_weights, total
from deepspec.training.muon import MuonWithAdamW, inner_matrices


def new_optimiser(model: torch.nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW, SGD or Muon on what can learn; weights decay, vectors (norms, biases) do not."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = inner_matrices(model) if config.optimizer is Optimiser.muon else []
    if config.optimizer is Optimiser.muon and not matrices:
        raise UserError("train.optimizer=muon: this draft has no matrix for it; choose adamw.")
    by_muon = {id(one) for one in matrices}
    learning = [one for one in learning if id(one) not in by_muon]
    groups = [
        {"params": [one for one in learning if one.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [one for one in learning if one.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimizer is Optimiser.sgd:
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.betas[0])
    rate, betas, eps = config.learning_rate, (config.betas[0], config.betas[1]), config.eps
    if matrices:
        return MuonWithAdamW(matrices, groups, rate, config.weight_decay, betas, eps)
    return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=eps)


def learning_rate(step: int, steps: int, config: TrainConfig) -> float:
    """Of step 0 … steps−1: linear warm-up to the configured rate, then half a cosine towards 0."""
    warm = round(config.warmup * steps)
    if step < warm:
        return config.learning_rate * (step + 1) / warm
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def loss_coefficients(draft: TrainableDraft, chosen: dict[str, float]) -> dict[str, float]:
    """The draft's weights of its loss parts, with `train.loss` over them; a part of weight 0 is left out."""
    unknown = sorted(set(chosen) - set(draft.loss_parts))
    if unknown:
        raise UserError(
            f"train.loss.{unknown[0]}: the draft's loss has only the parts {', '.join(draft.loss_parts)}."
        )
    wanted = {name: weight for name, weight in {**draft.default_loss, **chosen}.items() if weight != 0}
    if not wanted:
        raise UserError(
            "train.loss gives every part of the loss the weight 0: there is nothing to learn from."
        )
    return wanted


@dataclass
class Micro:
    """One micro-batch, captured. tokens: without padding. counted: False for a stand-in (`RowBatch`). rows: their
    numbers in the data."""

    batch: DraftBatch
    tokens: int
    counted: bool
    rows: list[int] = field(default_factory=list)


@dataclass
class StepResult:
    """finite: whether the step was taken. loss: of all processes' batches together, None where no token was
    supervised. gradient_norm: before clipping; None where none was computed."""

    finite: bool
    loss: float | None
    gradient_norm: float | None
    stop: bool


@dataclass
class Stepper:
    """Takes optimiser steps. coefficients: weight of each loss part. clip: gradient norm, 0 = off.

    DeepSpeed's engine is driven directly: accelerate's `backward` would also take the step, before the
    gradients could be looked at.
    """

    model: torch.nn.Module
    optimiser: AcceleratedOptimizer
    coefficients: dict[str, float]
    clip: float
    accelerator: Accelerator

    def take(
        self,
        window: Sequence[Micro],
        on_loss: Callable[[DraftLoss, Micro], None],
        on_gradients: Callable[[], None] | None = None,
        stop: bool = False,
    ) -> StepResult:
        """One step on Σ_part c_part · Σ sum / Σ weight, both sums over all micro-batches of all processes.

        With one micro-batch the weights are those of its own forward. With more, the first backward needs
        the weights of the last forward: a pass without gradients finds them, at the price of one forward
        more. `stop` of any process is known to all afterwards. A loss or gradient that is not finite changes
        nothing.
        """
        names = sorted(self.coefficients)
        alone = len(window) == 1
        losses = [self.model(window[0].batch)] if alone else _without_gradients(self.model, window)
        totals = total(self.accelerator, [*_totals(names, losses, window), float(stop)])
        stopped = totals[-1] > 0
        if not all(math.isfinite(value) for value in totals):
            return StepResult(False, None, None, stopped)
        weights = totals[len(names) : -1]
        scales = self._scales(names, weights)
        for index, micro in enumerate(window):
            last = index == len(window) - 1
            with nullcontext() if last or self._engine else self.accelerator.no_sync(self.model):
                loss = losses[0] if alone else self.model(micro.batch)
                parts = sums_and_weights(loss)[0]
                share = 1.0 if micro.counted else 0.0
                self._backward(sum(scales[name] * share * parts[name] for name in names), last)
            on_loss(loss, micro)
        if on_gradients is not None:
            on_gradients()
        means = [
            self.coefficients[name] * part / weight
            for name, part, weight in zip(names, totals, weights, strict=False)
            if weight
        ]
        finite, norm = self._update()
        return StepResult(finite, sum(means) if means else None, norm, stopped)

    @property
    def _engine(self) -> Any:
        """DeepSpeed's engine, or None."""
        return self.model if self.accelerator.distributed_type is DistributedType.DEEPSPEED else None

    def _scales(self, names: list[str], weights: list[float]) -> dict[str, float]:
        """What each part's sum is multiplied by: DDP, DeepSpeed and FSDP average gradients over the processes."""
        return {
            name: self.coefficients[name] * self.accelerator.num_processes / weight if weight else 0.0
            for name, weight in zip(names, weights, strict=True)
        }

    def _backward(self, loss: Any, last: bool) -> None:
        if self._engine is None:
            self.accelerator.backward(loss)
        else:
            self._engine.set_gradient_accumulation_boundary(last)
            self._engine.backward(loss, scale_wrt_gas=False)

    def _update(self) -> tuple[bool, float | None]:
        """Clip, step, clear; whether the step was taken, and the norm before clipping."""
        if self._engine is not None:
            self._engine.step()  # clips, and leaves out a step whose gradients are not finite
            norm = float(self._engine.get_global_grad_norm())
            return self._engine.was_step_applied(), norm if math.isfinite(norm) else None
        norm = float(self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip or math.inf))
        # a scaler (fp16) skips and adapts by itself
        finite = math.isfinite(norm) or self.accelerator.scaler is not None
        if finite:
            self.optimiser.step()
        self.optimiser.zero_grad()
        return finite, norm if math.isfinite(norm) else None


@torch.no_grad()
def _without_gradients(model: torch.nn.Module, window: Sequence[Micro]) -> list[DraftLoss]:
    found = []
    for micro in window:
        sums, weights = sums_and_weights(model(micro.batch))
        found.append(DraftLoss(sums=sums, weights=weights))
    return found


def _totals(names: list[str], losses: list[DraftLoss], window: Sequence[Micro]) -> list[float]:
    """This process's sums, then weights, by part; a stand-in counts only if it is not finite."""
    parts = [sums_and_weights(loss) for loss in losses]
    if sorted(parts[0][0]) != names:
        raise ValueError(f"The draft's loss has the parts {sorted(parts[0][0])}, its `default_loss` {names}.")
    shares = [1.0 if micro.counted else 0.0 for micro in window]
    return [
        sum(share * float(part[which][name].detach()) for share, part in zip(shares, parts, strict=True))
        for which in (0, 1)
        for name in names
    ]
