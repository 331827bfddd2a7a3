"""Several results that differ in their seeds alone: one number, whose interval is over the seeds."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from deepspec.evaluation.metric import Metric
from deepspec.evaluation.result import EvaluationResult
from deepspec.evaluation.statistics import t_quantile

# The 97.5% quantile of Student's t for 1 to 6 degrees of freedom, where its expansion is not good enough.
SMALL_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447)
SEEDED = ("decode", "train", "data")  # sections of the settings that have a `seed`
NAMES = ("name", "out", "overwrite", "auto_prepare")  # settings that decide nothing


def over_seeds(values: Sequence[float]) -> Metric:
    """The mean over seeds with Student's interval of it.

    Prompts are the same for every seed, so their spread is in each value alike: the seeds are the sample.
    """
    n = len(values)
    if n < 2:
        return Metric(values[0] if values else None, None, None, n, "an interval over seeds needs at least 2")
    mean = float(np.mean(values))
    t = SMALL_T[n - 2] if n - 2 < len(SMALL_T) else t_quantile(n - 1)
    half = t * float(np.std(values, ddof=1)) / math.sqrt(n)
    return Metric(mean, mean - half, mean + half, n)


def without_seeds(result: EvaluationResult) -> dict[str, Any]:
    """The settings with the seeds and names taken out: equal for results that may be put together."""
    kept = {key: value for key, value in result.settings.items() if key not in NAMES}
    for section in SEEDED:
        if isinstance(kept.get(section), dict):
            kept[section] = {key: value for key, value in kept[section].items() if key != "seed"}
    return kept | {"k": result.conditions.k, "draft": result.draft.get("algorithm")}


def seeds_of(result: EvaluationResult) -> tuple[Any, ...]:
    """The seeds that the settings have."""
    sections = [result.settings.get(name) or {} for name in SEEDED]
    return tuple(section.get("seed") for section in sections)
