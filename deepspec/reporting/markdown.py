"""The report as Markdown, for a pull request or a wiki: the verdict, the main numbers, the conditions."""

from collections.abc import Sequence
from urllib.parse import quote

from deepspec.evaluation.metric import Metric
from deepspec.evaluation.result import EvaluationResult
from deepspec.reporting import words


def to_markdown(result: EvaluationResult, file: str = "result.json") -> str:
    """Headings, tables and sentences; every text from outside has its Markdown taken away. file: the result's name,
    for a link to the records."""
    alarm, noise = words.alarm(result), result.conditions.noise
    parts = [
        f"# {escape(result.name)}: {escape(words.verdict(result))}",
        *([f"**{escape(alarm)}**"] if alarm else []),
        *(f"> {escape(warning)}" for warning in result.warnings),
        *([f"> {escape(noise.words)}"] if noise.noisy else []),
        _main_table(result),
        *_categories(result),
        *_groups(result),
        *_batches(result),
        *_quality(result),
        "## Conditions",
        "\n".join(f"- {escape(line)}" for line in _conditions(result)),
        f"Every prompt's record: [{escape(file)}](<{quote(file)}>)",
        f"Command: `{' '.join(result.command.replace('`', '').split())}`",
    ]
    return "\n\n".join(parts) + "\n"


def _main_table(result: EvaluationResult) -> str:
    conditions, summary = result.conditions, result.summary
    return table(
        ["", "value", "95 %", "prompts"],
        [
            _row(f"Speedup over {conditions.fastest_plain}", summary.speedup, "×"),
            _row("Speedup, prefill included", summary.speedup_end_to_end, "×"),
            _row("Speedup over the same loop", summary.speedup_same_loop, "×"),
            _row("Ideal speedup", summary.ideal_speedup, "×"),
            _row("Engine efficiency", summary.efficiency, ""),
            _row(f"Tokens a round (τ), K = {conditions.k}", summary.tau, ""),
            *(
                _row(f"Acceptance at position {row.position}", row.conditional, "")
                for row in summary.acceptance
            ),
        ],
    )


def _categories(result: EvaluationResult) -> list[str]:
    if len(result.categories) < 2:
        return []
    lines = [
        [name, str(group.prompts), words.interval(group.tau), words.interval(group.speedup, unit="×")]
        for name, group in result.categories.items()
    ]
    return ["## By category", table(["category", "prompts", "τ", "speedup"], lines)]


def _groups(result: EvaluationResult) -> list[str]:
    groups = [g for g in result.detail.groups if g.kind != "task"] if result.detail else []
    if not groups:
        return []
    lines = [[f"{g.kind}: {g.name}", str(g.prompts), f"{g.rounds:,}", words.interval(g.tau)] for g in groups]
    return ["## By length and turn", table(["", "prompts", "rounds", "τ"], lines)]


def _batches(result: EvaluationResult) -> list[str]:
    if not result.batches:
        return []
    lines = [
        [
            str(row.size),
            words.number(row.plain.total, 1),
            words.number(row.speculative.total, 1),
            f"{row.speedup:.2f}×",
        ]
        for row in result.batches
    ]
    head = ["requests at once", "plain, tokens a second", "speculative, tokens a second", "speedup"]
    return ["## Several requests at once", table(head, lines)]


def _quality(result: EvaluationResult) -> list[str]:
    if result.quality is None or not result.quality.rows:
        return []
    lines = [
        [row.metric, row.task, *(words.interval(m, 3) for m in (row.plain, row.speculative, row.difference))]
        for row in result.quality.rows
    ]
    head = ["metric", "prompts", "plain", "speculative", "difference"]
    return ["## What the answers are worth", table(head, lines), *words.measures(result.quality)]


def _conditions(result: EvaluationResult) -> list[str]:
    return [
        *words.conditions_lines(result),
        *words.method(result),
        *words.resources(result),
        *(source.words() for source in result.sources),
    ]


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    made = ["| " + " | ".join(escape(cell) for cell in line) + " |" for line in (head, *lines)]
    made.insert(1, "|" + " --- |" * len(head))
    return "\n".join(made)


def escape(text: str) -> str:
    """The text without a meaning in Markdown or HTML, on one line."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{c}" if c in "\\`*_[]|" else c for c in text)


def _row(name: str, metric: Metric, unit: str) -> list[str]:
    if metric.value is None:
        return [name, "—", metric.reason or "", str(metric.prompts)]
    between = "—"
    if metric.low is not None and metric.high is not None:
        between = f"{words.number(metric.low)}–{words.number(metric.high)}"
    return [name, f"{words.number(metric.value)}{unit}", between, str(metric.prompts)]
