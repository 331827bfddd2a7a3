"""One optimiser step against autograd on the whole batch's Σ sum / Σ weight."""

import math
from collections.abc import Iterator

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from deepspec.config.schema import TrainConfig
from deepspec.drafts.contract import DraftBatch, DraftLoss
from deepspec.errors import UserError
from deepspec.training.batches import Plan, windows
from deepspec.training.optimiser import (
    Micro,
    Stepper,
    learning_rate,
    loss_coefficients,
    new_optimiser,
)
from deepspec.training.sources import Online, draft_batch
from tests.training.fakes import FakeConfig, FakeDraft, FakeTarget, rows
from tests.training.worker import accelerator_for_tests

COEFFICIENTS = {"ce": 1.0, "hidden": 0.5}


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    yield accelerator_for_tests()


def micros(batch_size: int, accumulation: int, count: int) -> list[Micro]:
    target = FakeTarget(torch.float64)
    (window,) = windows(rows(count), Plan(count, batch_size, accumulation), 0, seed=0)
    return [Micro(draft_batch(one, Online(target, [0, 2])), one.token_count, one.counted) for one in window]


def fresh_draft(dropout: float = 0.0) -> FakeDraft:
    torch.manual_seed(2)
    return FakeDraft(FakeConfig(dropout=dropout)).double()


def gradients_of_step(accelerator: Accelerator, window: list[Micro], draft: FakeDraft) -> dict[str, Tensor]:
    model, optimiser = accelerator.prepare(draft, torch.optim.SGD(draft.parameters(), lr=1.0))
    seen: dict[str, Tensor] = {}

    def keep() -> None:
        seen.update({name: one.grad.clone() for name, one in draft.named_parameters()})

    Stepper(model, optimiser, COEFFICIENTS, 0.0, accelerator).take(window, lambda loss, micro: None, keep)
    return seen


def reference(window: list[Micro], draft: FakeDraft) -> dict[str, Tensor]:
    """The gradient of Σ_part c · Σ sum / Σ weight, all graphs held at once."""
    losses = [draft(micro.batch) for micro in window if micro.counted]
    whole = sum(
        c * sum(loss.sums[part] for loss in losses) / sum(loss.weights[part] for loss in losses)
        for part, c in COEFFICIENTS.items()
    )
    found = torch.autograd.grad(whole, list(draft.parameters()))
    return dict(zip(dict(draft.named_parameters()), found, strict=True))


@pytest.mark.parametrize(
    ("batch_size", "accumulation", "count"), [(8, 1, 8), (2, 4, 8), (1, 8, 7), (3, 3, 5)]
)
def test_gradient_is_of_the_windows_sums_over_its_weights(
    accelerator: Accelerator, batch_size: int, accumulation: int, count: int
) -> None:
    window = micros(batch_size, accumulation, count)
    found = gradients_of_step(accelerator, window, fresh_draft())
    for name, expected in reference(window, fresh_draft()).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-10, atol=1e-12)


def test_accumulation_equals_the_larger_batch(accelerator: Accelerator) -> None:
    split = gradients_of_step(accelerator, micros(1, 7, 7), fresh_draft())
    whole = gradients_of_step(accelerator, micros(7, 1, 7), fresh_draft())
    for name in whole:
        torch.testing.assert_close(split[name], whole[name], rtol=1e-9, atol=1e-12)
    means = [draft_mean(micro) for micro in micros(1, 7, 7)]
    assert max(means) - min(means) > 0.1  # or a mean of means would pass too


def draft_mean(micro: Micro) -> float:
    with torch.no_grad():
        loss = fresh_draft()(micro.batch)
    return float(loss.sums["ce"] / loss.weights["ce"]) if loss.weights["ce"] else 0.0


class Broken(FakeDraft):
    """Not finite where asked: in the loss, or in the gradient only."""

    where = "loss"

    def forward(self, batch: DraftBatch) -> DraftLoss:
        loss = super().forward(batch)
        if self.where == "loss":
            loss.sums["ce"] = loss.sums["ce"] + math.nan
        else:
            loss.sums["ce"] = loss.sums["ce"] + (self.fc.bias[0].detach() - self.fc.bias[0]).abs().sqrt()
        return loss


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_changes_nothing(accelerator: Accelerator, where: str) -> None:
    draft = Broken(FakeConfig()).double()
    draft.where = where
    before = {name: one.clone() for name, one in draft.state_dict().items()}
    optimiser = torch.optim.AdamW(draft.parameters())
    model, prepared = accelerator.prepare(draft, optimiser)
    stepper = Stepper(model, prepared, COEFFICIENTS, 1.0, accelerator)
    result = stepper.take(micros(2, 1, 2), lambda loss, micro: None)
    assert not result.finite
    assert result.gradient_norm is None
    assert all(torch.equal(one, before[name]) for name, one in draft.state_dict().items())
    assert not optimiser.state_dict()["state"]
    assert all(one.grad is None for one in draft.parameters())


def test_clipping_keeps_the_direction_and_reports_the_norm_before(accelerator: Accelerator) -> None:
    window, draft = micros(4, 1, 4), fresh_draft()
    plain = reference(window, fresh_draft())
    norm = math.sqrt(sum(one.square().sum().item() for one in plain.values()))
    before = {name: one.detach().clone() for name, one in draft.named_parameters()}
    model, optimiser = accelerator.prepare(draft, torch.optim.SGD(draft.parameters(), lr=1.0))
    result = Stepper(model, optimiser, COEFFICIENTS, norm / 4, accelerator).take(window, lambda *_: None)
    assert result.gradient_norm == pytest.approx(norm)
    for name, one in draft.named_parameters():
        torch.testing.assert_close(before[name] - one.detach(), plain[name] / 4, rtol=1e-4, atol=1e-9)


def test_a_window_without_supervision_has_no_gradient(accelerator: Accelerator) -> None:
    window = micros(2, 1, 2)
    window[0].batch.loss_mask[:] = False
    found = gradients_of_step(accelerator, window, fresh_draft())
    assert found
    assert all(one.abs().max() == 0 for one in found.values())


def test_learning_rate_warms_up_then_follows_half_a_cosine() -> None:
    config = TrainConfig(learning_rate=2.0, warmup=0.1)
    rates = [learning_rate(step, 100, config) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert rates[10] == 2.0
    assert rates[55] == pytest.approx(1.0)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 0.01
    assert learning_rate(0, 1, TrainConfig(learning_rate=2.0)) == 2.0
    assert learning_rate(0, 1, TrainConfig(learning_rate=2.0, warmup=1.0)) == 2.0


def test_weights_decay_and_vectors_do_not() -> None:
    draft = fresh_draft()
    draft.token.weight.requires_grad_(False)
    optimiser = new_optimiser(draft, TrainConfig(weight_decay=0.1, betas=(0.8, 0.9)))
    decay = {id(one): group["weight_decay"] for group in optimiser.param_groups for one in group["params"]}
    assert decay == {
        id(draft.fc.weight): 0.1,
        id(draft.lm_head.weight): 0.1,
        id(draft.fc.bias): 0.0,
    }
    assert optimiser.param_groups[0]["betas"] == (0.8, 0.9)


def test_loss_parts_are_chosen_by_name() -> None:
    draft = fresh_draft()
    assert loss_coefficients(draft, {}) == COEFFICIENTS
    assert loss_coefficients(draft, {"hidden": 2.0}) == {"ce": 1.0, "hidden": 2.0}
    assert loss_coefficients(draft, {"hidden": 0.0}) == {"ce": 1.0}
    with pytest.raises(UserError, match=r"train\.loss\.hiden.*ce, hidden"):
        loss_coefficients(draft, {"hiden": 1.0})
    with pytest.raises(UserError, match=r"weight 0"):
        loss_coefficients(draft, {"ce": 0.0, "hidden": 0.0})
