"""The acceptance benchmark's tables."""

from collections.abc import Mapping, Sequence
from typing import Any

WORDS = {"greedy": "Greedy", "sampled": "Temperature 1"}
COSTS = (
    *("family", "parameters trained", "steps", "tokens", "training s", "tokens/s", "peak GiB"),
    *("draft ms a round", "speedup (greedy)", "equal outputs"),
)


def markdown(families: Sequence[Mapping[str, Any]]) -> str:
    """One table of τ for each way of drawing, one of the positions, one of costs."""
    lines = [f"Target {families[0]['target']}."]
    for how, words in WORDS.items():
        first = families[0][how]
        sets = list(first["sets"])
        lines += [
            "",
            f"## {words}: tokens a round (τ), K = {first['k']}, at most {first['max_new_tokens']} new tokens",
            "",
            row(["family", *(f"{name} ({first['sets'][name]['prompts']})" for name in sets), "all"]),
            row(["---"] * (len(sets) + 2)),
        ]
        for one in families:
            cells = [
                metric(one[how]["sets"][name]["tau"]) if name in one[how]["sets"] else "" for name in sets
            ]
            lines.append(row([one["family"], *cells, metric(one[how]["all"]["tau"])]))
    longest = max(len(one["greedy"]["all"]["acceptance"]) for one in families)
    lines += [
        "",
        "## Greedy: accepted at a position, given that the one before was",
        "",
        row(["family", *map(str, range(1, longest + 1))]),
        row(["---"] * (longest + 1)),
    ]
    for one in families:
        lines.append(row([one["family"], *(_share(value) for value in one["greedy"]["all"]["acceptance"])]))
    lines += [
        "",
        "## What it costs",
        "",
        row(COSTS),
        row(["---"] * len(COSTS)),
    ]
    for one in families:
        greedy = one["greedy"]
        draft, peak = greedy["draft_seconds"], one.get("peak_gib")
        equal = greedy["all"]["equality"]
        lines.append(
            row(
                [
                    one["family"],
                    f"{one['parameters'] / 1e6:.1f} M",
                    str(one["steps"]),
                    f"{one['tokens']:,}",
                    f"{one['train_seconds']:.0f}",
                    f"{one['tokens'] / one['train_seconds']:.0f}",
                    "" if peak is None else f"{peak:.1f}",
                    "" if draft is None else f"{1000 * draft:.1f}",
                    metric(greedy["all"]["speedup"], "×"),
                    f"{equal['equal']} of {equal['compared']}",
                ]
            )
        )
    noisy = {
        f"{one['family']}, {how}: {one[how]['noise']}"
        for one in families
        for how in WORDS
        if one[how]["noise"]
    }
    return "\n".join([*lines, "", *(f"- {words}" for words in sorted(noisy)), ""])


def row(cells: Sequence[str]) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"


def metric(one: Mapping[str, Any], unit: str = "") -> str:
    """A value with its interval, or why there is none."""
    if one["value"] is None:
        return one["reason"] or ""
    ends = "" if one["low"] is None else f" ({one['low']:.2f}–{one['high']:.2f})"
    return f"{one['value']:.2f}{unit}{ends}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
