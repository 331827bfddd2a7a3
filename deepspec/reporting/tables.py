"""A result's numbers as flat rows, for CSV and for people's own tables."""

import csv
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from deepspec.evaluation.metric import Metric
from deepspec.evaluation.result import EvaluationResult, Latency, Speed, Summary

Cell = str | float | int | None

HEAD = ("group", "metric", "unit", "value", "low", "high", "prompts", "reason")
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet takes for the beginning of one
SCALARS = (
    ("tau", "tokens per round"),
    ("speedup", "x"),
    ("speedup_end_to_end", "x"),
    ("speedup_same_loop", "x"),
    ("speedup_same_loop_end_to_end", "x"),
    ("ideal_speedup", "x"),
    ("efficiency", "1"),
)


@dataclass(frozen=True)
class Row:
    """One number of one group of prompts."""

    group: str
    metric: str
    unit: str
    number: Metric

    def cells(self) -> list[Cell]:
        n = self.number
        return [self.group, self.metric, self.unit, n.value, n.low, n.high, n.prompts, n.reason]


def rows(result: EvaluationResult) -> Iterator[Row]:
    """Every number that may have an interval, of all prompts and of every group."""
    groups = {"all prompts": result.summary} | {f"category: {k}": v for k, v in result.categories.items()}
    for group, summary in groups.items():
        yield from _summary(group, summary)
    if result.detail is not None:
        yield Row("all prompts", "draft hit rate", "1", result.detail.hit_rate)
        yield Row("all prompts", "target rejection rate", "1", result.detail.rejection_rate)
        for found in result.detail.groups:
            yield Row(f"{found.kind}: {found.name}", "tau", "tokens per round", found.tau)
        for tokens in (*result.detail.frequency, *result.detail.vocabulary):
            yield Row(f"tokens: {tokens.name}", "acceptance", "1", tokens.acceptance)
    for row in result.quality.rows if result.quality else []:
        for name in ("plain", "speculative", "difference"):
            yield Row(row.task, f"{row.metric} ({name})", "", getattr(row, name))


def _summary(group: str, summary: Summary) -> Iterator[Row]:
    for name, unit in SCALARS:
        yield Row(group, name, unit, getattr(summary, name))
    for accepted in summary.acceptance:
        yield Row(group, f"acceptance@{accepted.position} conditional", "1", accepted.conditional)
        yield Row(group, f"acceptance@{accepted.position} unconditional", "1", accepted.unconditional)
    for way in ("plain", "speculative", "fastest"):
        yield from _speed(group, way, getattr(summary, way))


def _speed(group: str, way: str, speed: Speed) -> Iterator[Row]:
    yield Row(group, f"{way} tokens per second", "1/s", speed.tokens_per_second)
    yield Row(group, f"{way} tokens per second, prefill included", "1/s", speed.tokens_per_second_end_to_end)
    for name in ("ttft", "tpot", "end_to_end"):
        latency: Latency = getattr(speed, name)
        for tail in ("p50", "p90", "p95", "p99"):
            yield Row(group, f"{way} {name} {tail}", "s", getattr(latency, tail))
    for part in ("draft_seconds", "verify_seconds", "rest_seconds"):
        yield Row(group, f"{way} {part.removesuffix('_seconds')} per token", "s", getattr(speed, part))
    yield Row(group, f"{way} cost per million output tokens", "currency", speed.cost_per_million)


def to_csv(result: EvaluationResult) -> str:
    """All rows with a head; empty cells where there is no number."""
    return csv_text(HEAD, (row.cells() for row in rows(result)))


def csv_text(head: Sequence[str], lines: Iterable[Sequence[Cell]]) -> str:
    """CSV. Texts that a spreadsheet would take for formulas begin with an apostrophe."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    for cells in lines:
        writer.writerow(
            f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA) else cell for cell in cells
        )
    return text.getvalue()


def write_text(path: Path, text: str) -> Path:
    """Write under a temporary name and rename; returns `path`."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
    return path
