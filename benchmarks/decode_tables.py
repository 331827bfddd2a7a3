"""The decoding benchmark's record as Markdown."""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.decode_parts import PARTS


def markdown(record: dict[str, Any]) -> str:
    """Conditions, speeds, batches, and where the time goes."""
    parts = [_conditions(record), _speeds(record)]
    parts += [_batches(record)] if record["batches"] else []
    return "\n".join([*parts, _parts(record)] if record["parts"] else parts)


def _conditions(record: dict[str, Any]) -> str:
    machine, options = record["machine"], record["options"]
    prompts = ", ".join(f"{count} {name}" for name, count in sorted(record["prompts"].items()))
    noise = "; ".join(record["disturbances"]) or "nothing else took time"
    return (
        f"# Decoding\n\n{record['target']}; draft {options['draft']}; temperature {options['temperature']}, "
        f"K = {options['k']}, up to {options['new_tokens']} new tokens; prompts: {prompts}; "
        f"{options['repeats']} times.\n\n{machine['cpu']}, {machine['device']}, {machine['logical_cores']} logical "
        f"cores; load before {machine['load_before']}, after {machine['load_after']}; {noise}. "
        f"{machine['system']}; {', '.join(f'{k} {v}' for k, v in machine['versions'].items())}.\n"
    )


def _speeds(record: dict[str, Any]) -> str:
    """Median over prompts with the 10th and 90th percentile; speedups from totals."""
    head = (
        "way",
        "dtype",
        "threads",
        "tokens/s: median (p10–p90)",
        "ms/token",
        "against plain",
        "against the fastest plain",
        "τ",
        "verified",
        "ideal",
        "efficiency",
        "equal text",
    )
    rows = []
    for way in record["ways"]:
        equal = way["equal_to"]
        rows.append(
            [
                way["way"],
                way["dtype"],
                way["threads"],
                _spread(way["tokens_per_second"]),
                f"{1000 * way['seconds_per_token']:.1f}",
                f"{way['speedup_same']:.2f}",
                f"{way['speedup_fastest']:.2f}",
                *(_number(way[key]) for key in ("tau", "verified", "ideal", "efficiency")),
                "–" if equal is None else f"{equal['equal']} of {equal['of']} ({equal['way']})",
            ]
        )
    return "## One row\n\n" + _table(head, rows)


def _batches(record: dict[str, Any]) -> str:
    head = (
        "rows",
        "way",
        "dtype",
        "threads",
        "tokens/s: median (p10–p90)",
        "against plain",
        "τ",
        "ideal",
        "efficiency",
    )
    rows = [
        [
            *(line[key] for key in ("rows", "way", "dtype", "threads")),
            _spread(line["tokens_per_second"]),
            *(_number(line[key]) for key in ("speedup_same", "tau", "ideal", "efficiency")),
        ]
        for line in record["batches"]
    ]
    return "## Several rows, continuous batching\n\n" + _table(head, rows)


def _parts(record: dict[str, Any]) -> str:
    rows = [
        [
            *(line[key] for key in ("way", "dtype", "threads")),
            f"{line['ms_a_round']:.1f}",
            *(f"{line[part]:.1%}" for part in PARTS),
        ]
        for line in record["parts"]
    ]
    return "## Where a round's time goes\n\n" + _table(
        ("way", "dtype", "threads", "ms a round", *PARTS), rows
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _spread(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.1f}" if values else "–"
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return f"{statistics.median(values):.1f} ({tenths[0]:.1f}–{tenths[-1]:.1f})"
