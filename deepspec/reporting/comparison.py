"""Several results on one page: those that can be compared side by side, the others apart and the reason said."""

from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import Environment

from deepspec.evaluation.compare import Difference, compare, incomparable, time_incomparable
from deepspec.evaluation.metric import Metric
from deepspec.evaluation.result import EvaluationResult
from deepspec.evaluation.seeds import over_seeds, seeds_of, without_seeds
from deepspec.reporting import words
from deepspec.reporting.figures import Figure
from deepspec.reporting.plots import Axis, Plot, padded, plain_number, times

HEAD = ("group", "result", "draft", "k", "temperature", "prompts", "tau", "tau_low", "tau_high", "speedup",
        "speedup_low", "speedup_high", "noisy")  # fmt: skip


@dataclass
class Against:
    """One result against the group's first. no_times: why only acceptance is compared."""

    name: str
    rows: list[Difference]
    no_times: list[str]


@dataclass
class Seeds:
    """Results that differ in their seeds alone."""

    names: list[str]
    tau: Metric
    speedup: Metric


@dataclass
class Group:
    """Results that can be compared with each other; the first is what the others are compared with.

    apart: why they cannot be compared with the first group's.
    """

    results: list[tuple[str, EvaluationResult]]
    apart: list[str]
    against: list[Against]
    seeds: list[Seeds]


def grouped(results: Sequence[tuple[str, EvaluationResult]]) -> list[Group]:
    """Put every result with the first group that it can be compared with. results: (name, result)."""
    groups: list[Group] = []
    for name, result in results:
        home = next((g for g in groups if not incomparable(g.results[0][1], result)), None)
        if home is None:
            apart = incomparable(groups[0].results[0][1], result) if groups else []
            groups.append(Group([(name, result)], apart, [], []))
        else:
            home.results.append((name, result))
    for group in groups:
        first = group.results[0][1]
        group.against = [
            Against(name, compare(first, other), time_incomparable(first, other))
            for name, other in group.results[1:]
        ]
        group.seeds = _seeds(group.results)
    return groups


def _seeds(results: Sequence[tuple[str, EvaluationResult]]) -> list[Seeds]:
    alike: list[list[tuple[str, EvaluationResult]]] = []
    for name, result in results:
        home = next((many for many in alike if without_seeds(many[0][1]) == without_seeds(result)), None)
        if home is None:
            alike.append([(name, result)])
        else:
            home.append((name, result))
    return [
        Seeds(
            [name for name, _ in many],
            over_seeds([r.summary.tau.value for _, r in many if r.summary.tau.value is not None]),
            over_seeds([r.summary.speedup.value for _, r in many if r.summary.speedup.value is not None]),
        )
        for many in alike
        if len(many) > 1 and len({seeds_of(r) for _, r in many}) == len(many)
    ]


def headline(groups: Sequence[Group]) -> str:
    """The first sentence."""
    if len(groups) == 1 and len(groups[0].against) == 1:
        first, against = groups[0].results[0][0], groups[0].against[0]
        names = {"A is higher": first, "B is higher": against.name}
        key = next((row for row in against.rows if row.name.startswith("speedup")), against.rows[0])
        better = names.get(key.verdict)
        ratio = words.interval(key.ratio, unit="×")
        if better is None:
            return f"No difference in {key.name} can be told between {first} and {against.name}: {ratio}."
        return f"{better} has the higher {key.name}: {against.name} has {ratio} that of {first}."
    count = sum(len(group.results) for group in groups)
    if len(groups) == count:
        return f"None of these {count} results can be compared with another."
    if len(groups) > 1:
        return f"{count} results in {len(groups)} groups; those of different groups cannot be compared."
    return f"{count} results on the same prompts of the same target."


def lines(groups: Sequence[Group]) -> list[str]:
    """What a terminal shows."""
    said = [headline(groups)]
    for number, group in enumerate(groups, start=1):
        if group.apart:
            said.append(f"group {number} is apart: {'; '.join(group.apart)}")
        for name, result in group.results:
            s = result.summary
            said.append(f"  {name}: τ {words.interval(s.tau)}, speedup {words.interval(s.speedup, unit='×')}")
        for against in group.against:
            said += [f"  {group.results[0][0]} (A) and {against.name} (B):"]
            said += [f"    {_difference(row)}" for row in against.rows]
            said += [f"    times are not compared: {reason}" for reason in against.no_times]
        for seeds in group.seeds:
            said.append(
                f"  over the seeds of {', '.join(seeds.names)}: τ {words.interval(seeds.tau)}, speedup "
                f"{words.interval(seeds.speedup, unit='×')}"
            )
    return said


def _difference(row: Difference) -> str:
    needed = row.prompts_for_1_percent
    more = f"; {needed:,} prompts would show 1%" if needed is not None else ""
    note = f" ({row.note})" if row.note else ""
    return f"{row.name}: B ÷ A {words.interval(row.ratio, 3)}, {row.verdict}{more}{note}"


def csv_rows(groups: Sequence[Group]) -> list[list[str | float | int | None]]:
    """One row a result, under `HEAD`."""
    return [
        [
            number, name, str(r.draft.get("algorithm", "")), r.conditions.k, r.conditions.temperature,
            r.summary.prompts, r.summary.tau.value, r.summary.tau.low, r.summary.tau.high,
            r.summary.speedup.value, r.summary.speedup.low, r.summary.speedup.high, str(r.conditions.noise.noisy),
        ]
        for number, group in enumerate(groups, start=1)
        for name, r in group.results
    ]  # fmt: skip


def figures(group: Group) -> list[Figure]:
    """Speedup and τ of a group's results, a row each."""
    found = [
        _rows([(name, r.summary.speedup) for name, r in group.results], "Speedup", "×"),
        _rows([(name, r.summary.tau) for name, r in group.results], "Tokens a round (τ)", ""),
    ]
    return [figure for figure in found if figure is not None]


def _rows(metrics: Sequence[tuple[str, Metric]], title: str, unit: str) -> Figure | None:
    shown = [(name, m, m.value) for name, m in metrics if m.value is not None]
    if len(shown) < 2:
        return None
    values = [v for _, m, _ in shown for v in (m.value, m.low, m.high) if v is not None]
    plot = Plot(
        Axis(*padded([*values, 1.0]), title, format=times if unit else plain_number),
        Axis(-0.6, len(shown) - 0.4, at=[]),
        height=76 + 27 * len(shown),
        left=170,
        vertical_grid=True,
    )
    plot.rule(x=1.0)
    for y, (name, metric, value) in enumerate(reversed(shown)):
        plot.label(y, name, "spec")
        if metric.low is not None and metric.high is not None:
            plot.span(y, metric.low, metric.high, "spec")
        plot.dot(value, y, "spec", f"{name}: {words.interval(metric, unit=unit)}")
    return Figure(title, plot.svg(f"{title} by result"), "Bars: 95% over prompts, from 8 up.")


def render(groups: Sequence[Group], environment: Environment) -> str:
    """The page's HTML. environment: the report's."""
    return environment.get_template("comparison.html.j2").render(
        headline=headline(groups), groups=[(group, figures(group)) for group in groups]
    )
