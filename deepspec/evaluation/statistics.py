"""Ratios of totals and percentiles over prompts, with paired bootstrap intervals.

The unit is the prompt: rounds and tokens of one prompt are not independent. One set of resamples serves every
metric of a group, so that a ratio of two decoders sees the same prompts on both sides (paired).

The percentile bootstrap is too narrow for few prompts: it covers 86% at 8 lognormal ones (σ = 0.3). Intervals
are therefore stretched about the value by t(n−1)/z·√(n/(n−1)), and cover 93% at n = 8 to 24 (91% at σ = 0.5).
Below 8 prompts there is none.
"""

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from deepspec.evaluation.result import Latency, Metric

Column = NDArray[np.float64]
NOTHING = "no samples"
MIN_PROMPTS = 8  # fewest for an interval
FEW_PROMPTS = f"an interval needs at least {MIN_PROMPTS} prompts"
RARE = "too few prompts contribute for an interval"
MIN_FINITE = 0.95  # share of resamples that must have a value for the interval to stand


def null(reason: str) -> Metric:
    """A metric without a value."""
    return Metric(None, None, None, 0, reason)


class Bootstrap:
    """The R resamples of a group of n prompts: `picks` [R, n], and `counts` [R, n] of each prompt in each."""

    def __init__(self, prompts: int, resamples: int, seed: int = 0) -> None:
        self.prompts = prompts
        generator = np.random.default_rng(seed)
        self.picks = generator.integers(0, max(prompts, 1), size=(resamples, prompts))
        rows = np.arange(resamples)[:, None] * prompts
        counts = np.bincount((self.picks + rows).ravel(), minlength=resamples * prompts)
        self.counts = counts.reshape(resamples, prompts).astype(np.float64)

    def ratio(
        self,
        formula: Callable[..., Column],
        *columns: Column,
        where: Column | None = None,
        reason: str = NOTHING,
        highest: float = math.inf,
        lowest: float = 0.0,
    ) -> Metric:
        """A formula of totals over prompts, e.g. `lambda tokens, rounds: tokens / rounds`.

        columns: [n] a prompt's sums, each. where: [n], nonzero where a prompt contributes (default: the last
        column, which is usually the denominator). highest, lowest: the ends of what there can be.
        """
        used = int(np.count_nonzero(columns[-1] if where is None else where))
        with np.errstate(divide="ignore", invalid="ignore"):
            value = float(formula(*(np.asarray(column.sum()) for column in columns)))
            if used == 0 or not np.isfinite(value):
                return null(reason)
            samples = np.asarray(formula(*(self.counts @ column for column in columns)), dtype=np.float64)
        return self._metric(value, samples, used, highest, lowest)

    def percentile(self, values: Column, q: float, least: int = 1) -> Metric:
        """The q-th percentile (linear interpolation) of one value a prompt, NaN = that prompt has none.

        least: fewest prompts for which this percentile says anything.
        """
        present = ~np.isnan(values)
        used = int(present.sum())
        if used == 0:
            return null(NOTHING)
        if used < least:
            return Metric(None, None, None, used, f"needs at least {least} prompts, has {used}")
        kept = values[present]
        whole = self if used == self.prompts else Bootstrap(used, len(self.picks), seed=1)
        samples = np.percentile(kept[whole.picks], q, axis=1)
        return self._metric(float(np.percentile(kept, q)), samples, used)

    def latency(self, values: Column) -> Latency:
        """Median, 90th, 95th and 99th percentile; a tail is null where the prompts are too few to have one."""
        return Latency(
            self.percentile(values, 50),
            self.percentile(values, 90, 10),
            self.percentile(values, 95, 20),
            self.percentile(values, 99, 100),
        )

    def _metric(
        self, value: float, samples: Column, used: int, highest: float = math.inf, lowest: float = 0.0
    ) -> Metric:
        finite = samples[np.isfinite(samples)]
        if used < MIN_PROMPTS:
            return Metric(value, None, None, used, FEW_PROMPTS)
        if len(finite) < MIN_FINITE * len(samples) or len(finite) == 0:
            return Metric(value, None, None, used, RARE)
        low, high = (float(end) for end in np.percentile(finite, [2.5, 97.5]))
        factor = stretch(used)
        return Metric(
            value,
            max(value - (value - low) * factor, lowest),
            min(value + (high - value) * factor, highest),
            used,
        )


def stretch(prompts: int) -> float:
    """What a percentile interval over so few prompts must be stretched by; 1 for very many."""
    return t_quantile(prompts - 1) / NormalDist().inv_cdf(0.975) * math.sqrt(prompts / (prompts - 1))


def t_quantile(freedom: int) -> float:
    """The 97.5% quantile of Student's t by its expansion about the normal one; within 0.001 from 7 up."""
    z = NormalDist().inv_cdf(0.975)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
