"""The report's figures, each from a part of a result; a figure with nothing to show is None."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepspec.evaluation.result import (
    Decoding,
    EvaluationResult,
    Metric,
    PromptRecord,
    Speed,
    StepTimes,
    Summary,
    SweepPoint,
)
from deepspec.evaluation.summary import seconds_a_token
from deepspec.reporting.plots import Axis, Plot, padded, percent, plain_number, times
from deepspec.reporting.words import interval


@dataclass(frozen=True)
class Figure:
    """A drawing with its words. `keys`: (CSS class, name) of what is drawn."""

    title: str
    svg: str
    note: str = ""
    keys: tuple[tuple[str, str], ...] = ()


def acceptance(summary: Summary) -> Figure | None:
    """Conditional and unconditional acceptance by position, with intervals."""
    rows = summary.acceptance
    if not rows:
        return None
    plot = Plot(
        Axis(0.6, len(rows) + 0.4, "position in the draft", at=[row.position for row in rows]),
        Axis(0.0, 1.0, format=percent, at=[0, 0.25, 0.5, 0.75, 1]),
    )
    for css, shift, of in (
        ("unconditional", 0.07, lambda row: row.unconditional),
        ("conditional", -0.07, lambda row: row.conditional),
    ):
        metrics = [(row.position + shift, of(row)) for row in rows]
        plot.line([(x, m.value) for x, m in metrics if m.value is not None], css)
        for x, metric in metrics:
            whiskered_dot(plot, x, metric, css, f"position {round(x)}, {css}")
    note = "Whiskers: 95% over prompts, from 8 up."
    return Figure(
        "Accepted, by position",
        plot.svg("Acceptance by position"),
        note,
        (
            ("conditional", "given the position before was accepted"),
            ("unconditional", "of all rounds that verified it"),
        ),
    )


def tokens_per_round(summary: Summary) -> Figure | None:
    """How many tokens a round committed."""
    counts, total = summary.committed_histogram, sum(summary.committed_histogram)
    if not total:
        return None
    shares = [count / total for count in counts]
    top = max(shares) * 1.15
    numbers = range(1, len(counts) + 1)
    plot = Plot(
        Axis(0.4, len(counts) + 0.6, "tokens committed in a round", at=list(numbers)),
        Axis(0, top, format=percent),
    )
    for number, count, share in zip(numbers, counts, shares, strict=True):
        plot.bar((number - 0.36, number + 0.36), (0, share), "spec", f"{number} tokens: {count:,} rounds")
        plot.text(number, share, f"{share:.0%}", "value middle", dy=-5)
    kept = f"; {summary.cut_rounds:,} of them, cut by an end token, count with what was kept"
    note = f"{total:,} rounds{kept if summary.cut_rounds else ''}."
    return Figure("Tokens per round", plot.svg("Histogram of tokens per round"), note)


def by_category(
    categories: Mapping[str, Summary],
    overall: Summary,
    of: Callable[[Summary], Metric],
    title: str,
    unit: str,
) -> Figure | None:
    """A metric with its interval, a row for each category and one for all."""
    rows = [(name, of(summary), "spec") for name, summary in categories.items()]
    rows.append(("all prompts", of(overall), "strong"))
    shown = [(name, metric, metric.value, css) for name, metric, css in rows if metric.value is not None]
    if len(categories) < 2 or len(shown) < 2:
        return None
    values = [v for _, m, _, _ in shown for v in (m.value, m.low, m.high) if v is not None]
    plot = Plot(
        Axis(*padded([*values, 1.0]), title[0].lower() + title[1:], format=times if unit else plain_number),
        Axis(-0.6, len(shown) - 0.4, at=[]),
        height=76 + 27 * len(shown),
        left=170,
        vertical_grid=True,
    )
    plot.rule(x=1.0)
    for y, (name, metric, value, css) in enumerate(reversed(shown)):
        plot.label(y, name, css)
        if metric.low is not None and metric.high is not None:
            plot.span(y, metric.low, metric.high, css)
        plot.dot(value, y, css, f"{name}: {interval(metric, unit=unit)}, {metric.prompts} prompts")
    return Figure(
        f"{title}, by category", plot.svg(f"{title} by category"), "Bars: 95% over prompts, from 8 up."
    )


def time_split(result: EvaluationResult) -> Figure | None:
    """Milliseconds a token by every decoder: draft, verify, rest where it tells, else the whole."""
    summary = result.summary
    rows = [("speculative", _split(summary.speculative)), ("plain, same loop", _split(summary.plain))]
    if any(record.fastest for record in result.records):
        rows.append(("fastest plain", _split(summary.fastest)))
    if not all(parts for _, parts in rows):
        return None
    longest = max(sum(milliseconds for _, milliseconds in parts) for _, parts in rows)
    plot = Plot(
        Axis(0, longest * 1.16, "milliseconds a token"),
        Axis(-0.7, len(rows) - 0.3, at=[]),
        height=84 + 48 * len(rows),
        left=124,
        vertical_grid=True,
    )
    for y, (name, parts) in enumerate(rows):
        plot.label(y, name)
        start = 0.0
        for css, milliseconds in parts:
            title = f"{name}, {css}: {milliseconds:.2f} ms a token"
            plot.bar((start, start + milliseconds), (y - 0.34, y + 0.34), css, title)
            start += milliseconds
        plot.text(start, y, f"{start:.1f}", "value", dx=6)
    return Figure(
        "Where the time goes",
        plot.svg("Time a token, split into draft, verify and rest"),
        "Per decoded token, prefill apart.",
        (("draft", "draft"), ("verify", "target's forward"), ("rest", "everything else")),
    )


def step_times(steps: StepTimes | None) -> Figure | None:
    """What reading n tokens at once costs the target, and what drafting n costs the draft."""
    if steps is None:
        return None
    verify = [(n, seconds * 1e3) for n, seconds in enumerate(steps.verify, start=1)]
    draft = [(k, seconds * 1e3) for k, seconds in enumerate(steps.draft, start=1)]
    top = max(ms for _, ms in verify + draft) * 1.1
    plot = Plot(
        Axis(0.7, len(verify) + 0.3, "tokens", at=[n for n, _ in verify]),
        Axis(0, top, format=lambda ms: f"{ms:g} ms"),
    )
    for css, points in (("verify", verify), ("draft", draft)):
        plot.line(points, css)
        for n, ms in points:
            plot.dot(n, ms, css, f"{css} {n}: {ms:.2f} ms", radius=3.5)
    return Figure(
        "A step of the bare modules",
        plot.svg("Step times by number of tokens"),
        f"Medians of {steps.repeats}, outside the engine, {steps.context} tokens of context on average.",
        (("verify", "target reads n tokens"), ("draft", "draft proposes n tokens")),
    )


def distribution(
    result: EvaluationResult, of: Callable[[Decoding], float | None], title: str, note: str
) -> Figure | None:
    """Share of the prompts that took at most so long (mean of a prompt's repeats), plain and speculative."""
    curves = {
        "plain": _means(result.records, lambda record: record.plain, of),
        "spec": _means(result.records, lambda record: record.speculative, of),
    }
    if not all(curves.values()):
        return None
    low, high = padded([value for values in curves.values() for value in values], margin=0.1)
    plot = Plot(
        Axis(max(low, 0.0), high, "milliseconds"),
        Axis(0, 1, format=percent, at=[0, 0.25, 0.5, 0.75, 1]),
        height=236,
    )
    for css, values in curves.items():
        ordered = sorted(values)
        points = [(ordered[0], 0.0)] + [(ms, (i + 1) / len(ordered)) for i, ms in enumerate(ordered)]
        plot.line([*points, (high, 1.0)], css, step=True)
    return Figure(title, plot.svg(title), note, (("spec", "speculative"), ("plain", "plain, same loop")))


def sweep(
    points: Sequence[SweepPoint], of: Callable[[SweepPoint], Metric], title: str, unit: str
) -> Figure | None:
    """A metric by K; the K that was taken is filled."""
    rows = [(point, of(point)) for point in points if of(point).value is not None]
    if len(rows) < 2:
        return None
    values = [v for _, m in rows for v in (m.value, m.low, m.high) if v is not None]
    low, high = padded([*values, 1.0])
    ks = [point.k for point, _ in rows]
    plot = Plot(
        Axis(min(ks) - 0.6, max(ks) + 0.6, "K, drafted tokens a round", at=ks),
        Axis(low, high, format=times if unit else plain_number),
        height=236,
    )
    plot.rule(y=1.0)
    plot.line([(point.k, metric.value) for point, metric in rows if metric.value is not None], "spec thin")
    for point, metric in rows:
        whiskered_dot(plot, point.k, metric, "spec" if point.chosen else "spec hollow", f"K = {point.k}")
    return Figure(
        title, plot.svg(title), "Filled: the K of the main run. Whiskers: 95% over prompts, from 8 up."
    )


def every_prompt(records: Sequence[PromptRecord]) -> Figure | None:
    """One point a prompt: tokens a round against speedup."""
    points = [
        (tau, speed, record, index)
        for index, record in enumerate(records)
        if (tau := prompt_tau(record)) is not None and (speed := prompt_speedup(record)) is not None
    ]
    if len(points) < 3:
        return None
    plot = Plot(
        Axis(*padded([p[0] for p in points]), "tokens a round (τ)"),
        Axis(*padded([*(p[1] for p in points), 1.0]), format=times),
    )
    plot.rule(y=1.0)
    for tau, speed, record, index in points:
        title = f"{record.id} ({record.category}): τ {tau:.2f}, {speed:.2f}×"
        plot.dot(tau, speed, "spec faint", title, link=f"prompt-{index}")
    note = "Against the fastest plain decoding tried. A point leads to its prompt."
    return Figure("Tokens a round and speedup", plot.svg("Tokens a round and speedup of every prompt"), note)


def training(rows: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """The training's history: loss, accuracy by draft step; offline τ and acceptance on held-out rows."""
    found = [_loss(rows)]
    accuracy = _lists(rows, "accuracy")
    if len(accuracy) > 1:
        note = "How often the draft's first choice is the target's; the number at a line is the draft step."
        found.append(_by_step(accuracy, "Accuracy in training", note))
    tau = _numbers(rows, "tau")
    if tau:
        plot = _over_steps(tau)
        plot.line(tau, "spec")
        for step, value in tau:
            plot.dot(step, value, "spec", f"step {step}: τ {value:.2f}", radius=3.5)
        k = next((row["k"] for row in rows if "k" in row), None)
        note = "On held-out rows, by walking through their text" + (f", K = {k}." if k else ".")
        found.append(Figure("Offline τ", plot.svg("Offline acceptance length by training step"), note))
    acceptance = _lists(rows, "acceptance")
    if len(acceptance) > 1:
        note = "On held-out rows, given that the position before was accepted; the number is the position."
        found.append(_by_step(acceptance, "Offline acceptance", note))
    return [figure for figure in found if figure]


def _loss(rows: Sequence[Mapping[str, Any]]) -> Figure | None:
    train, held_out = _numbers(rows, "loss"), _numbers(rows, "held_out_loss")
    if len(train) < 2:
        return None
    plot = _over_steps(train + held_out)
    plot.line(train, "spec")
    plot.line(held_out, "draft")
    for step, value in held_out:
        plot.dot(step, value, "draft", f"step {step}: {value:.3f} on held-out rows", radius=3.5)
    keys = (("spec", "training"), ("draft", "held-out rows")) if held_out else ()
    return Figure("Loss", plot.svg("Loss by training step"), keys=keys)


def _numbers(rows: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    return [(row["step"], row[key]) for row in rows if _is_number(row.get(key))]


def _lists(rows: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, list[float | None]]]:
    found = [(row["step"], row[key]) for row in rows if isinstance(row.get(key), list)]
    return [(step, many) for step, many in found if any(_is_number(value) for value in many)]


def _by_step(rows: list[tuple[float, list[float | None]]], title: str, note: str) -> Figure:
    """One line for each draft step; lines are numbered at their ends, as far apart as the numbers need."""
    values = [value for _, many in rows for value in many if value is not None]
    plot = Plot(
        _steps_axis([step for step, _ in rows]), Axis(0, min(1.0, max(values) * 1.1) or 1.0, format=percent)
    )
    last: float | None = None
    for k in range(max(len(many) for _, many in rows)):
        line = [(step, value) for step, many in rows for value in many[k : k + 1] if value is not None]
        plot.line(line, f"fade-{min(k, 6)}")
        if line and (last is None or abs(plot.py(line[-1][1]) - last) >= 11):
            last = plot.py(line[-1][1])
            plot.text(*line[-1], str(k + 1), "value", dx=5)
    return Figure(title, plot.svg(f"{title} by training step"), note)


def prompt_tau(record: PromptRecord) -> float | None:
    """Tokens a round of one prompt."""
    rounds = [r for decoding in record.speculative for r in decoding.rounds]
    return sum(r.committed for r in rounds) / len(rounds) if rounds else None


def prompt_speedup(record: PromptRecord) -> float | None:
    """Decode-only speedup of one prompt, against the fastest plain decoding."""
    plain, speculative = (
        seconds_a_token(record.fastest or record.plain),
        seconds_a_token(record.speculative),
    )
    return plain / speculative if plain is not None and speculative else None


def _over_steps(points: Sequence[tuple[float, float]]) -> Plot:
    low, high = padded([value for _, value in points])
    return Plot(_steps_axis([step for step, _ in points]), Axis(low, high))


def _steps_axis(steps: Sequence[float]) -> Axis:
    return Axis(0, max(steps) * 1.05 or 1.0, "training step")


def _split(speed: Speed) -> list[tuple[str, float]]:
    """(CSS class, milliseconds a token) by part; the whole where the decoder does not tell its parts."""
    parts = {"draft": speed.draft_seconds, "verify": speed.verify_seconds, "rest": speed.rest_seconds}
    told = [(css, 1e3 * metric.value) for css, metric in parts.items() if metric.value is not None]
    if len(told) == len(parts):
        return told
    whole = speed.tokens_per_second.value
    return [("plain", 1e3 / whole)] if whole else []


def _means(
    records: Sequence[PromptRecord],
    which: Callable[[PromptRecord], list[Decoding]],
    of: Callable[[Decoding], float | None],
) -> list[float]:
    means = []
    for record in records:
        values = [value for decoding in which(record) if (value := of(decoding)) is not None]
        if values:
            means.append(1e3 * sum(values) / len(values))
    return means


def whiskered_dot(plot: Plot, x: float, metric: Metric, css: str, name: str) -> None:
    """A dot with its interval; nothing where there is no value."""
    if metric.value is None:
        return
    if metric.low is not None and metric.high is not None:
        plot.whisker(x, metric.low, metric.high, css)
    plot.dot(x, metric.value, css, f"{name}: {interval(metric)}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
