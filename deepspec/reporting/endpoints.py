"""One self-contained page on one or two servers, and the lines for the terminal."""

import json
import os
from collections.abc import Callable
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from deepspec.endpoints.result import EndpointResult, LevelSummary
from deepspec.evaluation.metric import Metric
from deepspec.reporting.figures import Figure
from deepspec.reporting.plots import Axis, Plot, padded
from deepspec.reporting.words import number

COLOURS = ("spec", "draft")  # CSS classes of the first and the second server

CAVEAT = (
    "Percentiles are over answers, with 95% intervals by bootstrap; answers that ran at the same time are not "
    "independent, so that true intervals are wider. Tokens a second are of one run. A 95th percentile needs 20 answers, "
    "a 99th 100. TTFT is measured on a connection that is there; it contains one round trip."
)


def render(result: EndpointResult) -> str:
    """The page's HTML; every text from outside escaped."""
    environment = Environment(
        loader=PackageLoader("deepspec.reporting", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(ms=_ms, number=number, name_of=name_of)
    figures = [
        _curve(result, "Tokens a second, all answers together", lambda row: row.tokens_per_second, 1.0),
        _curve(result, "Time per output token, median, ms", lambda row: row.tpot.p50, 1e3),
        _curve(result, "Time to first token, median, ms", lambda row: row.ttft.p50, 1e3),
    ]
    return environment.get_template("endpoints.html.j2").render(
        result=result,
        figures=[figure for figure in figures if figure],
        drawing=lambda figure: Markup(figure.svg),
        settings=json.dumps(result.settings, indent=2, ensure_ascii=False),
        headline=headline(result),
        caveat=CAVEAT,
    )


def write_report(result: EndpointResult, path: Path) -> Path:
    """Write the page under a temporary name and rename it."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    partial.write_text(render(result), encoding="utf-8")
    os.replace(partial, path)
    return path


def name_of(result: EndpointResult, index: int) -> str:
    """A server in few words: its model and address."""
    endpoint = result.endpoints[index]
    return f"{endpoint.model} at {endpoint.url}"


def headline(result: EndpointResult) -> str:
    """The best throughput seen, or the two servers' at the highest level both have."""
    rows = [row for row in result.summary if row.tokens_per_second.value is not None]
    if not rows:
        return "Nothing was measured."
    top = max(row.concurrency for row in rows)
    rates = {row.endpoint: row.tokens_per_second.value or 0.0 for row in rows if row.concurrency == top}
    if len(rates) == 2 and rates[1] > 0:
        ratio = rates[0] / rates[1]
        return (
            f"At {top} at a time {name_of(result, 0)} gives {ratio:.2f}× the tokens a second of {name_of(result, 1)} "
            "(one run, no interval)."
        )
    index, rate = next(iter(rates.items()))
    return f"{number(rate, 1)} tokens a second from {name_of(result, index)}, {top} at a time."


def summary_lines(result: EndpointResult) -> list[str]:
    """For the terminal."""
    warnings = [f"warning   {one.url}: {words}" for one in result.endpoints for words in one.warnings]
    return [*warnings, headline(result)]


def _curve(
    result: EndpointResult, title: str, of: Callable[[LevelSummary], Metric], scale: float
) -> Figure | None:
    rows = [(row, metric) for row in result.summary if (metric := of(row)).value is not None]
    levels = sorted({row.concurrency for row, _ in rows})
    if len(levels) < 2:
        return None
    places = {level: place for place, level in enumerate(levels)}  # evenly apart, whatever lies between
    ends = [end * scale for _, m in rows for end in (m.value, m.low, m.high) if end is not None]
    plot = Plot(
        Axis(
            -0.4,
            len(levels) - 0.6,
            "requests at a time",
            lambda place: str(levels[int(place)]),
            range(len(levels)),
        ),
        Axis(*padded(ends, zero=True)),
        height=236,
    )
    for index, css in enumerate(COLOURS[: len(result.endpoints)]):
        mine = [(places[row.concurrency], metric) for row, metric in rows if row.endpoint == index]
        plot.line([(place, (metric.value or 0.0) * scale) for place, metric in mine], f"{css} thin")
        for place, metric in mine:
            if metric.low is not None and metric.high is not None:
                plot.whisker(place, metric.low * scale, metric.high * scale, css)
            value = (metric.value or 0.0) * scale
            plot.dot(place, value, css, f"{name_of(result, index)}: {value:.1f}")
    keys = tuple((css, name_of(result, index)) for index, css in enumerate(COLOURS[: len(result.endpoints)]))
    return Figure(title, plot.svg(title), "Whiskers: 95% over answers, from 8 up.", keys)


def _ms(metric: Metric, digits: int = 1) -> Markup:
    """A cell in milliseconds, with its interval or the reason for having none."""
    if metric.value is None:
        return Markup('<span class="none" title="{}">—</span>').format(metric.reason or "")
    value = Markup("<b>{}</b>").format(number(metric.value * 1e3, digits))
    if metric.low is None or metric.high is None:
        return value
    return value + Markup(" <small>{}–{}</small>").format(
        number(metric.low * 1e3, digits), number(metric.high * 1e3, digits)
    )
