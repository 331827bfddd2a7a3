"""One self-contained HTML page from a result: no scripts, no network, every text from outside escaped."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from deepspec.evaluation.findings import Reliability
from deepspec.evaluation.result import (
    Decoding,
    Equality,
    EvaluationResult,
    Metric,
    PromptRecord,
    Speed,
)
from deepspec.evaluation.summary import seconds_a_token
from deepspec.reporting import detail_figures, figures, words
from deepspec.reporting.figures import Figure
from deepspec.reporting.markdown import to_markdown
from deepspec.reporting.tables import to_csv, write_text

MARKS = {  # CSS class, sign, meaning
    "same": ("same", "=", "equal to plain decoding, token for token"),
    "tie": ("tie", "≈", "differs at a proven tie"),
    "bad": ("bad", "≠", "differs, and rounding does not explain it"),
    "sampled": ("sampled", "~", "sampled, not compared"),
}


SpeedRow = tuple[str, list[Metric], float, int]  # name, one number a decoder, scale, digits
TAILS = (
    ("p50", "median"),
    ("p90", "90th percentile"),
    ("p95", "95th percentile"),
    ("p99", "99th percentile"),
)


@dataclass(frozen=True)
class Tile:
    """One of the big numbers at the top."""

    name: str
    value: str
    interval: str
    note: str
    css: str = ""


@dataclass(frozen=True)
class PromptRow:
    """One prompt of the list: its line, and both answers when opened."""

    number: int
    record: PromptRecord
    css: str
    mark: str
    meaning: str
    tau: str
    speedup: str
    plain: tuple[str, str]  # the part shared with the other answer, and the rest
    speculative: tuple[str, str]


def environment() -> Environment:
    """Templates beside this file, with everything from outside escaped."""
    environment = Environment(
        loader=PackageLoader("deepspec.reporting", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.lstrip_blocks = True
    environment.filters["drawing"] = lambda figure: Markup(
        figure.svg
    )  # its texts were escaped when it was drawn
    environment.globals.update(
        interval=words.interval,
        number=words.number,
        cell=_cell,
        share=words.share,
        parameters=words.parameters,
    )
    environment.globals.update(baseline_note=words.baseline_note, two_sample=words.two_sample)
    return environment


def render(result: EvaluationResult, file: str = "result.json", page: str = "report.html") -> str:
    """The page's HTML. file, page: names of the result file beside the page and of the page, for its links."""
    summary = result.summary
    speed_names, every_row = _speed_table(result)
    speed_rows = [row for row in every_row if any(metric.value is not None for metric in row[1])]
    return (
        environment()
        .get_template("report.html.j2")
        .render(
            result=result,
            summary=summary,
            conditions=result.conditions,
            alarm=words.alarm(result),
            verdict=words.verdict(result),
            headline=_unbroken(words.verdict(result)),
            direction="unclear" if words.alarm(result) else words.direction(summary.speedup),
            tiles=_tiles(result),
            speed_names=speed_names,
            speed_rows=speed_rows,
            missing=_missing(row for row in every_row if row not in speed_rows),
            files=[
                (quote(file), "every prompt's record, answers and rounds"),
                (quote(str(Path(page).with_suffix(".csv"))), "all numbers"),
                (quote(str(Path(page).with_suffix(".md"))), "this page in short"),
            ],
            prompts=[_prompt_row(number, record) for number, record in enumerate(result.records)],
            method=words.method(result),
            marks=[
                mark for mark in MARKS.values() if mark[0] != "sampled" or result.conditions.temperature > 0
            ],
            settings=json.dumps(result.settings, indent=2, ensure_ascii=False),
            draft_manifest=json.dumps(result.draft, indent=2, ensure_ascii=False),
            training=figures.training(result.training),
            detail=result.detail,
            groups=[g for g in result.detail.groups if g.kind != "task"] if result.detail else [],
            calibration=_calibration(result),
            resources=words.resources(result),
            quality_rows=result.quality.rows if result.quality else [],
            measures=words.measures(result.quality) if result.quality else [],
            **_figures(result),
        )
    )


def write_report(result: EvaluationResult, file: Path) -> Path:
    """Write the page beside its result file (`result.json` → `report.html`, `x.json` → `x.html`), and the same as
    Markdown and CSV; returns the page's path."""
    page = file.with_name("report.html") if file.name == "result.json" else file.with_suffix(".html")
    write_text(page.with_suffix(".md"), to_markdown(result, file.name))
    write_text(page.with_suffix(".csv"), to_csv(result))
    return write_text(page, render(result, file.name, page.name))


def _missing(rows: Iterable[SpeedRow]) -> dict[str, list[str]]:
    """Names of the rows without a number, by the reason."""
    found: dict[str, list[str]] = {}
    for name, metrics, _, _ in rows:
        found.setdefault(metrics[0].reason or "", []).append(name)
    return found


def _unbroken(sentence: str) -> str:
    """The sentence with its interval kept on one line (no-break space, word joiners)."""
    return sentence.replace("(95% ", "(95%\u00a0").replace("–", "\u2060–\u2060")


def _figures(result: EvaluationResult) -> dict[str, list[Figure]]:
    summary, categories = result.summary, result.categories
    groups: dict[str, Sequence[Figure | None]] = {
        "acceptance_figures": [figures.acceptance(summary), figures.tokens_per_round(summary)],
        "frequency_figures": [detail_figures.by_frequency(result.detail)],
        "reliability_figures": detail_figures.reliability(result.calibration),
        "category_figures": [
            figures.by_category(categories, summary, lambda s: s.speedup, "Speedup", "×"),
            figures.by_category(categories, summary, lambda s: s.tau, "Tokens a round (τ)", ""),
        ],
        "time_figures": [figures.time_split(result), figures.step_times(result.step_times)],
        "latency_figures": [
            figures.distribution(
                result,
                lambda decoding: decoding.prefill_seconds,
                "Time to first token (TTFT)",
                "Share of the prompts whose first token came by then.",
            ),
            figures.distribution(
                result,
                lambda decoding: seconds_a_token([decoding]),
                "Time per output token (TPOT)",
                "Share of the prompts that took at most so long a token.",
            ),
        ],
        "sweep_figures": [
            figures.sweep(result.sweep, lambda p: p.speedup, "Speedup by K", "×"),
            figures.sweep(result.sweep, lambda p: p.tau, "Tokens a round (τ) by K", ""),
        ],
        "prompt_figures": [figures.every_prompt(result.records)],
    }
    return {name: [figure for figure in group if figure] for name, group in groups.items()}


def _calibration(result: EvaluationResult) -> list[tuple[Reliability, Reliability, float]]:
    """(before, after, temperature) of every position."""
    found = result.calibration
    if found is None:
        return []
    after = {row.position: row for row in found.after}
    return [(row, after[row.position], found.temperatures[row.position - 1]) for row in found.before]


def _tiles(result: EvaluationResult) -> list[Tile]:
    summary, equality = result.summary, result.summary.equality
    tiles = [
        _tile("Speedup", summary.speedup, "×", f"decoding, against {result.conditions.fastest_plain}"),
        _tile(
            "Tokens a round (τ)",
            summary.tau,
            "",
            f"of at most {result.conditions.k + 1}, the target's own included",
        ),
        _tile("Engine efficiency", summary.efficiency, "%", _ideal_words(summary.ideal_speedup)),
    ]
    if not equality.compared:
        note = f"sampled at temperature {result.conditions.temperature:g}: outputs differ by chance"
        return [*tiles, Tile("Equal outputs", "—", "", note)]
    rest = "greedy outputs that are plain decoding's, token for token"
    return [*tiles, Tile("Equal outputs", f"{equality.equal} of {equality.compared}", _ties(equality), rest)]


def _tile(name: str, metric: Metric, unit: str, note: str) -> Tile:
    if metric.value is None:
        return Tile(name, "—", "", metric.reason or "")
    scale, digits = (100, 0) if unit == "%" else (1, 2)
    value = f"{metric.value * scale:.{digits}f}{unit}"
    if metric.low is None or metric.high is None:
        return Tile(name, value, "", f"{note}; {metric.reason}")
    return Tile(
        name, value, f"95%: {metric.low * scale:.{digits}f}–{metric.high * scale:.{digits}f}{unit}", note
    )


def _ideal_words(ideal: Metric) -> str:
    if ideal.value is None:
        return ideal.reason or ""
    return f"of the {ideal.value:.2f}× that the bare modules would allow"


def _ties(equality: Equality) -> str:
    found = []
    if equality.proven_ties:
        found.append(f"{equality.proven_ties} proven tie{'s' if equality.proven_ties > 1 else ''}")
    if equality.unproven:
        found.append(f"{equality.unproven} unexplained")
    return ", ".join(found)


def _speed_table(result: EvaluationResult) -> tuple[list[str], list[SpeedRow]]:
    """Names of the decoders, and rows (name, one metric a decoder, scale, digits)."""
    summary = result.summary
    decoders = {"plain, same loop": summary.plain, "speculative": summary.speculative}
    if any(record.fastest for record in result.records):
        decoders = {"fastest plain": summary.fastest, **decoders}

    def row(name: str, of: str, scale: float = 1.0, digits: int = 1) -> SpeedRow:
        return name, [_metric(speed, of) for speed in decoders.values()], scale, digits

    rows = [
        row("Tokens a second, decoding", "tokens_per_second"),
        row("Tokens a second, prefill included", "tokens_per_second_end_to_end"),
    ]
    for name, of, unit, scale in (
        ("TTFT", "ttft", "ms", 1e3),
        ("TPOT", "tpot", "ms", 1e3),
        ("Whole answer", "end_to_end", "s", 1.0),
    ):
        rows += [row(f"{name} {long} ({unit})", f"{of}.{short}", scale) for short, long in TAILS]
    if result.conditions.price_per_hour is not None:
        rows.append(row("Cost of a million output tokens", "cost_per_million", 1.0, 2))
    return list(decoders), rows


def _metric(speed: Speed, path: str) -> Metric:
    value: object = speed
    for name in path.split("."):
        value = getattr(value, name)
    if not isinstance(value, Metric):
        raise TypeError(f"{path} is not a metric")
    return value


def _cell(metric: Metric, scale: float = 1.0, digits: int = 2, unit: str = "") -> Markup:
    """A table cell: value with its interval below, or why there is none."""
    if metric.value is None:
        return Markup('<span class="none">{}</span>').format(metric.reason)
    value = Markup("<b>{}{}</b>").format(words.number(metric.value * scale, digits), unit)
    if metric.low is None or metric.high is None:
        return value
    low, high = words.number(metric.low * scale, digits), words.number(metric.high * scale, digits)
    return value + Markup(" <small>{}–{}</small>").format(low, high)


def _prompt_row(number: int, record: PromptRecord) -> PromptRow:
    tau, speedup = figures.prompt_tau(record), figures.prompt_speedup(record)
    css, mark, meaning = _equal_mark(record)
    plain, speculative = _differing(record)
    return PromptRow(
        number=number,
        record=record,
        css=css,
        mark=mark,
        meaning=meaning,
        tau="—" if tau is None else f"{tau:.2f}",
        speedup="—" if speedup is None else f"{speedup:.2f}×",
        plain=_parted(plain.text, speculative.text),
        speculative=_parted(speculative.text, plain.text),
    )


def _equal_mark(record: PromptRecord) -> tuple[str, str, str]:
    if record.equal is None:
        return MARKS["sampled"]
    if record.equal:
        return MARKS["same"]
    return MARKS["tie" if record.tie is not None and record.tie.proven else "bad"]


def _differing(record: PromptRecord) -> tuple[Decoding, Decoding]:
    """The first pair of answers that differs, or the first pair."""
    pairs = list(zip(record.plain, record.speculative, strict=True))
    return next((pair for pair in pairs if pair[0].tokens != pair[1].tokens), pairs[0])


def _parted(text: str, other: str) -> tuple[str, str]:
    """The beginning that `text` shares with `other`, and the rest."""
    pairs = enumerate(zip(text, other, strict=False))
    shared = next((i for i, (one, two) in pairs if one != two), min(len(text), len(other)))
    return text[:shared], text[shared:]
