"""A simulation's page and its lines for the terminal."""

import math
from collections.abc import Sequence
from pathlib import Path

from deepspec.reporting.figures import Figure
from deepspec.reporting.html import environment
from deepspec.reporting.plots import Axis, Plot, padded, plain_number
from deepspec.reporting.tables import write_text
from deepspec.simulation.findings import Checked, Findings
from deepspec.simulation.load import Point

LOOKS = {"plain": "plain", "fixed": "spec", "threshold": "draft", "hardware": "strong"}
NEAR = 0.15  # simulated within so much of the real engine counts as agreement


def write_page(findings: Findings, path: Path) -> Path:
    """Self-contained HTML; returns `path`."""
    template = environment().get_template("simulation.html.j2")
    figures = [
        one for one in (pareto(findings.points), budget(findings.points), gain(findings.points)) if one
    ]
    return write_text(path, template.render(f=findings, figures=figures, verdict=verdict(findings)))


def lines(findings: Findings) -> list[str]:
    """For the terminal."""
    return [*verdict(findings), *(checked_words(one) for one in findings.checked), *findings.notes]


def verdict(findings: Findings) -> list[str]:
    """What the loads say, in words."""
    found = []
    for policy in dict.fromkeys(one.policy for one in findings.points):
        if policy == "plain":
            continue
        gains = [(load, g) for load, g in _gains(findings.points, policy)]
        if not gains:
            continue
        losing = [load for load, g in gains if g < 1]
        (light, most), (heavy, least) = gains[0], gains[-1]
        words = (
            f"{policy}: {most:.2f}× plain decoding's tokens a second at {light:g}, {least:.2f}× at {heavy:g}"
        )
        words += f"; slower than plain from {losing[0]:g} on" if losing else "; slower than plain nowhere"
        found.append(words + ".")
    if findings.network_words:
        found.append(findings.network_words)
    return found


def checked_words(one: Checked) -> str:
    agrees = "agrees" if abs(one.error) <= NEAR else "DISAGREES"
    return (
        f"simulation {agrees} with the engine at {one.rows} rows, {one.policy}: {one.simulated_seconds:.1f} s "
        f"simulated, {one.real_seconds:.1f} s real ({one.error:+.0%}) for {one.prompts} prompts"
    )


def pareto(points: Sequence[Point]) -> Figure | None:
    """Throughput against one user's speed, a line for each policy, a dot for each load."""
    if len(points) < 2:
        return None
    plot = Plot(
        Axis(*padded([one.per_user for one in points], zero=True), "tokens a second of one user"),
        Axis(*padded([one.tokens_per_second for one in points], zero=True), format=_short),
    )
    for policy in dict.fromkeys(one.policy for one in points):
        chosen = [one for one in points if one.policy == policy]
        plot.line([(one.per_user, one.tokens_per_second) for one in chosen], LOOKS[policy])
        for one in chosen:
            title = f"{policy}, load {one.load:g}: {one.tokens_per_second:.4g} tokens/s, {one.per_user:.4g} a user"
            plot.dot(one.per_user, one.tokens_per_second, LOOKS[policy], title, radius=3)
    note = "Tokens a second of all users together, upwards; right and up is better. A dot is a load."
    return Figure(
        "Throughput against a user's speed", plot.svg("Pareto curves by policy"), note, _keys(points)
    )


def budget(points: Sequence[Point]) -> Figure | None:
    """Drafted tokens verified a row and round, by load."""
    drafted = [one for one in points if one.policy != "plain"]
    return _by_load(
        drafted,
        [(one, one.scheduled) for one in drafted],
        "Verification budget",
        "Drafted tokens verified a row and round, by load.",
    )


def gain(points: Sequence[Point]) -> Figure | None:
    """Tokens a second over plain decoding's at the same load."""
    by_place = {(one.policy, one.load): one for one in points}
    drafted = [one for one in points if one.policy != "plain" and ("plain", one.load) in by_place]
    values = [(one, one.tokens_per_second / by_place["plain", one.load].tokens_per_second) for one in drafted]
    return _by_load(
        drafted, values, "Gain over plain decoding", "Tokens a second, speculative ÷ plain, by load.", 1.0
    )


def _by_load(
    drafted: Sequence[Point],
    values: Sequence[tuple[Point, float]],
    title: str,
    note: str,
    rule: float | None = None,
) -> Figure | None:
    loads = sorted({one.load for one in drafted})
    if len(loads) < 2:
        return None
    places = {load: math.log2(load) for load in loads}
    ticks = [places[load] for load in loads]
    plot = Plot(
        Axis(ticks[0] - 0.3, ticks[-1] + 0.3, "users, or requests a second", lambda x: _short(2**x), ticks),
        Axis(*padded([value for _, value in values] + ([rule] if rule else []), zero=True)),
    )
    if rule is not None:
        plot.rule(y=rule)
    for policy in dict.fromkeys(one.policy for one in drafted):
        chosen = [(places[one.load], value) for one, value in values if one.policy == policy]
        plot.line(chosen, LOOKS[policy])
        for x, y in chosen:
            plot.dot(x, y, LOOKS[policy], f"{policy}, load {2**x:.4g}: {y:.3g}", radius=3)
    return Figure(title, plot.svg(title), note, _keys(drafted))


def _gains(points: Sequence[Point], policy: str) -> list[tuple[float, float]]:
    plain = {one.load: one.tokens_per_second for one in points if one.policy == "plain"}
    return [
        (one.load, one.tokens_per_second / plain[one.load])
        for one in points
        if one.policy == policy and one.load in plain
    ]


def _keys(points: Sequence[Point]) -> tuple[tuple[str, str], ...]:
    return tuple((LOOKS[name], name) for name in dict.fromkeys(one.policy for one in points))


def _short(value: float) -> str:
    """At most four figures: 0.5, 12, 1,500, 24k."""
    return f"{value / 1000:.3g}k" if value >= 10_000 else plain_number(float(f"{value:.4g}"))
