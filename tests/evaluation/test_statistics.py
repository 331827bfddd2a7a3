"""Bootstrap ratios against closed forms and a loop; coverage of the intervals."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspec.evaluation.statistics import Bootstrap

amounts = st.lists(st.tuples(st.integers(1, 500), st.integers(1, 500)), min_size=2, max_size=12)


@settings(max_examples=40, deadline=None)
@given(amounts, st.integers(0, 5))
def test_ratio_and_interval_equal_a_plain_loop(pairs: list[tuple[int, int]], seed: int) -> None:
    over, under = (np.array(column, dtype=float) for column in zip(*pairs, strict=True))
    boot = Bootstrap(len(pairs), 60, seed)
    metric = boot.ratio(lambda a, b: a / b, over, under)
    samples = []
    for picks in boot.picks:
        top = sum(pairs[pick][0] for pick in picks)
        samples.append(top / sum(pairs[pick][1] for pick in picks))
    assert metric.value == pytest.approx(sum(over) / sum(under))
    assert (metric.low, metric.high) == pytest.approx(tuple(np.percentile(samples, [2.5, 97.5])))
    assert metric.prompts == len(pairs)


@given(st.lists(st.integers(1, 100), min_size=2, max_size=30), st.floats(0.1, 10))
def test_paired_resamples_make_a_constant_ratio_exact(values: list[int], factor: float) -> None:
    under = np.array(values, dtype=float)
    metric = Bootstrap(len(values), 100).ratio(lambda a, b: a / b, under * factor, under)
    assert metric.low == pytest.approx(factor)
    assert metric.high == pytest.approx(factor)


def test_95_percent_intervals_cover_the_truth_about_that_often() -> None:
    draw, prompts, covered, trials = np.random.default_rng(7), 40, 0, 400
    for trial in range(trials):
        tokens = draw.integers(20, 120, prompts).astype(float)
        pace = draw.lognormal(0.0, 0.3, prompts)
        metric = Bootstrap(prompts, 400, trial).ratio(lambda s, t: s / t, tokens * pace, tokens)
        assert metric.low is not None and metric.high is not None
        covered += metric.low <= math.exp(0.3**2 / 2) <= metric.high
    # 95% nominal; the percentile bootstrap of 40 skewed values falls a little short, and 400 trials scatter.
    assert 0.89 <= covered / trials <= 0.98


def test_the_interval_of_a_mean_is_the_normal_one() -> None:
    values = np.random.default_rng(0).normal(10.0, 2.0, 200)
    metric = Bootstrap(200, 4000).ratio(lambda a, n: a / n, values, np.ones(200))
    half = 1.96 * values.std() / math.sqrt(200)
    assert metric.low == pytest.approx(values.mean() - half, abs=0.03)
    assert metric.high == pytest.approx(values.mean() + half, abs=0.03)


def test_percentiles_ignore_prompts_without_a_value() -> None:
    values = np.array([3.0, np.nan, 1.0, 2.0, np.nan, 5.0, 4.0])
    metric = Bootstrap(len(values), 300).percentile(values, 50)
    assert metric.value == 3.0
    assert metric.prompts == 5
    assert metric.low is not None and 1.0 <= metric.low <= 3.0


def test_what_has_no_samples_is_null_with_a_reason() -> None:
    boot = Bootstrap(3, 100)
    nothing = boot.ratio(lambda a, b: a / b, np.zeros(3), np.zeros(3), reason="no rounds")
    assert (nothing.value, nothing.low, nothing.prompts, nothing.reason) == (None, None, 0, "no rounds")
    assert boot.percentile(np.full(3, np.nan), 50).value is None
    tail = boot.percentile(np.array([1.0, 2.0, 3.0]), 99, least=100)
    assert tail.value is None and tail.reason is not None and "100" in tail.reason
    assert Bootstrap(0, 100).ratio(lambda a, b: a / b, np.zeros(0), np.zeros(0)).value is None


def test_one_prompt_has_a_value_and_no_interval() -> None:
    metric = Bootstrap(1, 100).ratio(lambda a, b: a / b, np.array([6.0]), np.array([3.0]))
    assert (metric.value, metric.low, metric.high) == (2.0, None, None)
    assert metric.reason is not None


def test_a_metric_that_few_resamples_have_gets_no_interval() -> None:
    hits, tried = np.zeros(30), np.zeros(30)
    hits[:2], tried[:2] = 1, 2
    metric = Bootstrap(30, 500).ratio(lambda a, b: a / b, hits, tried)
    assert metric.value == 0.5
    assert metric.low is None and metric.reason is not None
