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
            _row(["family", *(f"{name} ({first['sets'][name]['prompts']})" for name in sets), "all"]),
            _row(["---"] * (len(sets) + 2)),
        ]
        for one in families:
            cells = [
                _metric(one[how]["sets"][name]["tau"]) if name in one[how]["sets"] else "" for name in sets
            ]
            lines.append(_row([one["family"], *cells, _metric(one[how]["all"]["tau"])]))
    longest = max(len(one["greedy"]["all"]["acceptance"]) for one in families)
    lines += [
        "",
        "## Greedy: accepted at a position, given that the one before was",
        "",
        _row(["family", *map(str, range(1, longest + 1))]),
        _row(["---"] * (longest + 1)),
    ]
    for one in families:
        lines.append(_row([one["family"], *(_share(value) for value in one["greedy"]["all"]["acceptance"])]))
    lines += [
        "",
        "## What it costs",
        "",
        _row(COSTS),
        _row(["---"] * len(COSTS)),
    ]
    for one in families:
        greedy = one["greedy"]
        draft, peak = greedy["draft_seconds"], one.get("peak_gib")
        equal = greedy["all"]["equality"]
        lines.append(
            _row(
                [
                    one["family"],
                    f"{one['parameters'] / 1e6:.1f} M",
                    str(one["steps"]),
                    f"{one['tokens']:,}",
                    f"{one['train_seconds']:.0f}",
                    f"{one['tokens'] / one['train_seconds']:.0f}",
                    "" if peak is None else f"{peak:.1f}",
                    "" if draft is None else f"{1000 * draft:.1f}",
                    _metric(greedy["all"]["speedup"], "×"),
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


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _metric(one: Mapping[str, Any], unit: str = "") -> str:
    if one["value"] is None:
        return one["reason"] or ""
    ends = "" if one["low"] is None else f" ({one['low']:.2f}–{one['high']:.2f})"
    return f"{one['value']:.2f}{unit}{ends}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
