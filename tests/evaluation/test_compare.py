"""Comparing two results: paired, and only what can be compared."""

import copy
from statistics import NormalDist

import numpy as np
import pytest

from deepspec.evaluation.compare import compare, incomparable, prompts_needed, time_incomparable
from deepspec.evaluation.metric import Metric
from deepspec.evaluation.result import EvaluationResult
from tests.reporting.synthetic import make_records, make_result


@pytest.fixture(scope="module")
def results() -> tuple[EvaluationResult, EvaluationResult]:
    """The same prompts; the second draft accepts less."""
    a, b = make_records(24), make_records(24, skill=0.6)
    for one, other in zip(a, b, strict=True):
        other.prompt_tokens = one.prompt_tokens
    return make_result(a), make_result(b[::-1])


def test_a_worse_draft_is_found_worse(results: tuple[EvaluationResult, EvaluationResult]) -> None:
    found = {row.name: row for row in compare(*results)}
    tau = found["tokens a round (τ)"]
    a, b = (result.summary.tau.value for result in results)
    assert a is not None and b is not None
    assert (tau.a.value, tau.b.value) == (pytest.approx(a), pytest.approx(b))
    assert tau.ratio.value == pytest.approx(b / a) and tau.verdict == "A is higher"
    speed = found["speedup, same loop"]
    assert speed.a.value == pytest.approx(results[0].summary.speedup_same_loop.value)
    assert found["plain seconds a token"].note


def test_a_result_equals_itself_in_any_order(results: tuple[EvaluationResult, EvaluationResult]) -> None:
    other = copy.deepcopy(results[0])
    other.records = other.records[::-1]
    for row in compare(results[0], other):
        assert row.ratio.value == pytest.approx(1.0) and row.ratio.low == pytest.approx(1.0)
        assert row.verdict == "no difference can be told" and row.prompts_for_1_percent in (None, 2)


def test_what_cannot_be_compared_is_said(results: tuple[EvaluationResult, EvaluationResult]) -> None:
    other = copy.deepcopy(results[0])
    other.target["name"] = "Another"
    other.conditions.temperature = 1.0
    other.records.pop()
    reasons = " ".join(incomparable(results[0], other))
    assert "another target: Made-up-135M-Instruct and Another" in reasons
    assert "temperature: 0.0 and 1.0" in reasons and "23 are in both, 1 only in the first" in reasons
    with pytest.raises(ValueError, match="another target"):
        compare(results[0], other)
    moved = copy.deepcopy(results[0])
    moved.conditions.machine.cpu = "Another processor"
    assert incomparable(results[0], moved) == [] and time_incomparable(results[0], moved)
    assert [row.name for row in compare(results[0], moved)] == [
        "tokens a round (τ)",
        "acceptance at position 1",
    ]


def test_prompts_needed_is_the_textbooks_number() -> None:
    """Simulated: means of n pairs with that n must reject in 4 of 5 cases when the difference is 1%."""
    spread, n = 0.05, 40
    half = NormalDist().inv_cdf(0.975) * spread / n**0.5
    needed = prompts_needed(Metric(1.0, 1 - half, 1 + half, n))
    assert needed is not None
    draws = np.random.default_rng(0).normal(0.01, spread, (4000, needed)).mean(1)
    power = np.mean(np.abs(draws) > NormalDist().inv_cdf(0.975) * spread / needed**0.5)
    assert power == pytest.approx(0.8, abs=0.03)
    assert prompts_needed(Metric(1.0, None, None, 3)) is None
