"""Bootstrap ratios against closed forms and a loop; coverage of the intervals."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspec.evaluation.statistics import Bootstrap

# Of Student's t, 97.5%, from a printed table.
T_QUANTILE = dict(zip(range(7, 14), (2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604), strict=True))
amounts = st.lists(st.tuples(st.integers(1, 500), st.integers(1, 500)), min_size=8, max_size=14)


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
    value, n = sum(over) / sum(under), len(pairs)
    factor = T_QUANTILE[n - 1] / 1.959964 * math.sqrt(n / (n - 1))
    ends = [value + (end - value) * factor for end in np.percentile(samples, [2.5, 97.5])]
    assert (metric.low, metric.high) == pytest.approx(
        (max(ends[0], 0.0), ends[1]), rel=2e-3, abs=2e-3 * value
    )
    assert metric.prompts == len(pairs)


@given(st.lists(st.integers(1, 100), min_size=8, max_size=30), st.floats(0.1, 10))
def test_paired_resamples_make_a_constant_ratio_exact(values: list[int], factor: float) -> None:
    under = np.array(values, dtype=float)
    metric = Bootstrap(len(values), 100).ratio(lambda a, b: a / b, under * factor, under)
    assert metric.low == pytest.approx(factor)
    assert metric.high == pytest.approx(factor)


@pytest.mark.parametrize("prompts", [8, 12, 16, 24])
def test_95_percent_intervals_cover_the_truth_about_that_often(prompts: int) -> None:
    draw, covered, trials = np.random.default_rng(7), 0, 2000
    for trial in range(trials):
        tokens = draw.integers(20, 120, prompts).astype(float)
        pace = draw.lognormal(0.0, 0.3, prompts)
        metric = Bootstrap(prompts, 400, trial).ratio(lambda s, t: s / t, tokens * pace, tokens)
        assert metric.low is not None and metric.high is not None
        covered += metric.low <= math.exp(0.3**2 / 2) <= metric.high
    assert 0.92 <= covered / trials <= 0.97


def test_below_8_prompts_there_is_no_interval_but_the_reason() -> None:
    ones = np.ones(7)
    metric = Bootstrap(7, 100).ratio(lambda a, n: a / n, 2 * ones, ones)
    assert (metric.value, metric.low, metric.high) == (2.0, None, None)
    assert metric.reason is not None and "8 prompts" in metric.reason


def test_a_share_has_no_interval_beyond_one() -> None:
    hits, tried = np.array([9.0, 10, 10, 10, 10, 10, 10, 4]), np.full(8, 10.0)
    assert Bootstrap(8, 500).ratio(lambda h, n: h / n, hits, tried, highest=1.0).high == 1.0


def test_the_interval_of_a_mean_is_the_normal_one() -> None:
    values = np.random.default_rng(0).normal(10.0, 2.0, 200)
    metric = Bootstrap(200, 4000).ratio(lambda a, n: a / n, values, np.ones(200))
    half = 1.96 * values.std() / math.sqrt(200)
    assert metric.low == pytest.approx(values.mean() - half, abs=0.03)
    assert metric.high == pytest.approx(values.mean() + half, abs=0.03)


def test_percentiles_ignore_prompts_without_a_value() -> None:
    values = np.array([3.0, np.nan, 1.0, 2.0, np.nan, 5.0, 4.0, 3.0, 3.0, 3.0])
    metric = Bootstrap(len(values), 300).percentile(values, 50)
    assert metric.value == 3.0
    assert metric.prompts == 8
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
