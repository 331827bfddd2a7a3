"""Figures of acceptance in detail and of the draft's confidence."""

from deepspec.evaluation.findings import Calibration, Detail, Reliability
from deepspec.reporting.figures import Figure, whiskered_dot
from deepspec.reporting.plots import Axis, Plot, percent

MOST_POSITIONS = 4  # reliability diagrams shown; the table has all positions


def by_frequency(detail: Detail | None) -> Figure | None:
    """Acceptance by how frequent the target's token is."""
    if detail is None or len(detail.frequency) < 2:
        return None
    plot = Plot(
        Axis(0.5, 10.5, "tenths of the answers' tokens, most frequent first", at=list(range(1, 11))),
        Axis(0.0, 1.0, format=percent, at=[0, 0.25, 0.5, 0.75, 1]),
    )
    points = [(int(group.name.rpartition(" ")[2]), group) for group in detail.frequency]
    plot.line([(x, g.acceptance.value) for x, g in points if g.acceptance.value is not None], "spec")
    for x, group in points:
        whiskered_dot(plot, x, group.acceptance, "spec", f"{group.name}, {group.tried:,} drafted tokens")
    note = "Given that the positions before were accepted. Frequencies are those of the plain answers."
    return Figure("Accepted, by token frequency", plot.svg("Acceptance by token frequency"), note)


def reliability(calibration: Calibration | None) -> list[Figure]:
    """Reliability diagrams of the first positions, before and after temperature scaling."""
    if calibration is None:
        return []
    after = {row.position: row for row in calibration.after}
    return [
        _diagram(row, after[row.position])
        for row in calibration.before[:MOST_POSITIONS]
        if row.position in after
    ]


def _diagram(before: Reliability, after: Reliability) -> Figure:
    marks = [0, 0.25, 0.5, 0.75, 1]
    plot = Plot(
        Axis(0.0, 1.0, "predicted: accepted at least so far", format=percent, at=marks),
        Axis(0.0, 1.0, format=percent, at=marks),
    )
    plot.line([(0, 0), (1, 1)], "rest thin")
    for css, row in (("plain", before), ("spec", after)):
        plot.line([(mean, share) for mean, share, _ in row.bins], css)
        for mean, share, n in row.bins:
            title = f"predicted {mean:.0%}, accepted {share:.0%}, {n:,.0f} rounds"
            plot.dot(mean, share, css, title, radius=3.5)
    title = f"Position {before.position}: predicted and accepted"
    note = f"Of {before.rounds:,} rounds of prompts that the temperatures were not fitted on."
    return Figure(title, plot.svg(title), note, (("plain", "as the draft says"), ("spec", "calibrated")))
