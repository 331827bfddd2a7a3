"""Results that differ in one number alone: what it does to speed and acceptance."""

from collections.abc import Sequence
from typing import Any

from deepspec.artifacts import flat
from deepspec.evaluation.metric import Metric
from deepspec.evaluation.result import EvaluationResult
from deepspec.evaluation.seeds import NAMES, SEEDED
from deepspec.reporting.figures import Figure, whiskered_dot
from deepspec.reporting.plots import Axis, Plot, padded, plain_number, times

FEWEST = 3  # results that make a curve
IGNORED = {*NAMES, *(f"{section}.seed" for section in SEEDED)}

Results = Sequence[tuple[str, EvaluationResult]]


def swept(results: Results) -> tuple[str, list[tuple[float, EvaluationResult]]] | None:
    """The one setting that differs, and the results in its order; None where it is another case.

    K counts as a setting only where the evaluation did not choose it.
    """
    settings = [_settings(result) for _, result in results]
    keys = sorted({key for one in settings for key in one})
    differing = [key for key in keys if any(one.get(key) != settings[0].get(key) for one in settings)]
    if len(results) < FEWEST or len(differing) != 1:
        return None
    values = [one.get(differing[0]) for one in settings]
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) < len(values) or len(set(numbers)) < len(numbers):
        return None
    pairs = zip(numbers, (result for _, result in results), strict=True)
    return differing[0], sorted(pairs, key=lambda pair: pair[0])


def figures(results: Results) -> list[Figure]:
    """Speedup and τ by the setting that was swept; none where there is no such setting."""
    found = swept(results)
    if found is None:
        return []
    key, ordered = found
    return [
        _curve([(v, r.summary.speedup) for v, r in ordered], f"Speedup by {key}", key, "×"),
        _curve([(v, r.summary.tau) for v, r in ordered], f"Tokens a round (τ) by {key}", key, ""),
    ]


def _curve(points: Sequence[tuple[float, Metric]], title: str, key: str, unit: str) -> Figure:
    """Values stand at equal distances: sweeps are often geometric."""
    values = [v for _, m in points for v in (m.value, m.low, m.high) if v is not None]
    plot = Plot(
        Axis(
            -0.5,
            len(points) - 0.5,
            key,
            format=lambda place: plain_number(points[round(place)][0]),
            at=range(len(points)),
        ),
        Axis(*padded([*values, 1.0]), format=times if unit else plain_number),
        height=236,
    )
    plot.rule(y=1.0)
    plot.line([(x, m.value) for x, (_, m) in enumerate(points) if m.value is not None], "spec thin")
    for x, (value, metric) in enumerate(points):
        whiskered_dot(plot, x, metric, "spec", f"{key} = {plain_number(value)}")
    return Figure(title, plot.svg(title), "Whiskers: 95% over prompts, from 8 up. Values at equal distances.")


def _settings(result: EvaluationResult) -> dict[str, Any]:
    settings = flat(result.settings)
    if settings.get("evaluate.sweep"):
        settings.pop("decode.k", None)
    return {key: value for key, value in settings.items() if key not in IGNORED}
