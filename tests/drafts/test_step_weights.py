"""Acceptance-aware weights against loops over their definitions, alone and inside a draft's loss."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspec.drafts.eagle3 import Eagle3Options
from deepspec.drafts.registry import new_draft
from deepspec.drafts.step_weights import dpace, survival
from deepspec.errors import UserError
from tests.drafts.conformance import training_steps
from tests.drafts.packed import batch_of
from tests.models import tiny_target

overlaps = st.lists(st.floats(0, 1), min_size=1, max_size=6)


def smooth(c: float) -> float:
    return 0.5 * c + 0.5


def plain_survival(c: list[float]) -> list[float]:
    return [math.prod(smooth(x) for x in c[:k]) for k in range(len(c))]


def plain_dpace(c: list[float], there: int) -> list[float]:
    return [
        sum(math.prod(smooth(x) for x in c[: j + 1]) for j in range(k, there)) if k < there else 0.0
        for k in range(len(c))
    ]


@given(overlaps, st.integers(0, 6))
@settings(max_examples=60, deadline=None)
def test_weights_are_their_definitions(c: list[float], there: int) -> None:
    there = min(there, len(c))
    tensor = torch.tensor([c], dtype=torch.float64)
    valid = torch.arange(len(c))[None] < there
    assert survival(tensor)[0].tolist() == pytest.approx(plain_survival(c))
    assert dpace(tensor, valid)[0].tolist() == pytest.approx(plain_dpace(c, there))


def test_dpace_is_the_gradient_of_the_expected_length() -> None:
    log_c = torch.tensor([0.7, 0.6, 0.9], dtype=torch.float64).log().requires_grad_()
    log_c.exp().cumprod(0).sum().backward()
    found = dpace(2 * log_c.detach().exp() - 1, torch.ones(3, dtype=torch.bool))  # undoes the smoothing
    torch.testing.assert_close(found, log_c.grad)


@pytest.mark.parametrize("kind", ["survival", "dpace"])
def test_a_drafts_loss_is_weighted_by_its_own_acceptance(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, text = tiny_target("llama"), [5, 9, 30, 40, 7, 8, 11, 90, 14, 15]
    options = Eagle3Options(vocab_size=None, ttt_steps=3, step_weights=kind)
    torch.manual_seed(0)
    draft = new_draft(options, target, None).double()
    loss, seen = training_steps(draft, batch_of(target, draft, [text], [2]), monkeypatch)
    with torch.no_grad():
        p = target.model(torch.tensor([text]), use_cache=False).logits[0].softmax(-1)
    total = weight = 0.0
    anchors = [torch.nonzero(loss.valid[0, :, step])[:, 0].tolist() for step in range(3)]
    for anchor in anchors[0]:
        steps = sum(anchor in at for at in anchors)
        q = [seen[s][0][anchors[s].index(anchor)].softmax(-1) for s in range(steps)]
        c = [float(torch.minimum(q[s], p[anchor + s]).sum()) for s in range(steps)]
        weights = plain_survival(c) if kind == "survival" else plain_dpace(c, steps)
        for s in range(steps):
            total -= weights[s] * float((p[anchor + s] * q[s].log()).sum())
            weight += weights[s]
    assert loss.sums["soft_ce"].item() == pytest.approx(total, rel=1e-4)
    assert loss.weights["soft_ce"].item() == pytest.approx(weight, rel=1e-4)
    trained = draft(batch_of(target, draft, [text], [2]))
    assert not trained.weights["soft_ce"].requires_grad


def test_an_unknown_weighting_is_named() -> None:
    with pytest.raises(UserError, match=r"draft\.step_weights is 'best'"):
        new_draft(Eagle3Options(step_weights="best"), tiny_target("llama"), None)
