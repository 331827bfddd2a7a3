"""The augmentation benchmark's comparison, prompt by prompt, and its table."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from benchmarks.acceptance_tables import metric, row
from deepspec.evaluation.statistics import Bootstrap

RESAMPLES = 4000
HEAD = ("augmentation", "prompts added", "τ", "τ − τ without", "in words")


def compared(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each head's τ, and its difference from the first one's, with intervals over the prompts (paired).

    found: `prompts` maps a prompt to its committed tokens and its rounds. The first one is the head without an
    augmentation. SystemExit where the heads were not measured on the same prompts: no difference then means
    anything.
    """
    names = sorted(found[0]["prompts"])
    boot = Bootstrap(len(names), RESAMPLES)
    rows = []
    base = _columns(found[0], names)
    for one in found:
        if sorted(one["prompts"]) != names:
            raise SystemExit(
                f"error: {one['name']} was measured on other prompts than {found[0]['name']}: choose another --out."
            )
        tokens, rounds = _columns(one, names)
        entry = {key: value for key, value in one.items() if key != "prompts"}
        entry["measured_prompts"] = len(names)
        entry["tau"] = asdict(boot.ratio(lambda a, n: a / n, tokens, rounds))
        if one is not found[0]:
            difference = boot.ratio(lambda a, n, b, m: a / n - b / m, tokens, rounds, *base, lowest=-np.inf)
            entry["difference"] = asdict(difference)
        rows.append(entry)
    return rows


def _columns(one: Mapping[str, Any], names: Sequence[str]) -> tuple[Any, Any]:
    tokens, rounds = zip(*(one["prompts"][name] for name in names), strict=True)
    return np.asarray(tokens, dtype=np.float64), np.asarray(rounds, dtype=np.float64)


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """One table; an augmentation that is not seen to help is said not to be."""
    first = rows[0]
    trained = f"{first['seeds']} training" + ("s" if first["seeds"] > 1 else "")
    lines = [
        f"Target {first['target']}, recipe {first['recipe']}, {first['steps']} optimiser steps, {trained} a head; "
        f"greedy, K = {first['k']}, at most {first['max_new_tokens']} new tokens, {first['measured_prompts']} "
        "held-out prompts. 95% intervals over prompts; those of differences are paired.",
        "",
        row(HEAD),
        row(["---"] * len(HEAD)),
    ]
    for one in rows:
        difference = one.get("difference")
        lines.append(
            row(
                [
                    one["name"],
                    str(one["added"]),
                    metric(one["tau"]),
                    "" if difference is None else _signed(difference),
                    "" if difference is None else verdict(difference),
                ]
            )
        )
    return "\n".join([*lines, ""])


def _signed(one: Mapping[str, Any]) -> str:
    if one["value"] is None:
        return str(one["reason"] or "")
    ends = "" if one["low"] is None else f" ({one['low']:+.2f} to {one['high']:+.2f})"
    return f"{one['value']:+.2f}{ends}"


def verdict(difference: Mapping[str, Any]) -> str:
    """What an interval of a difference allows to say."""
    if difference["low"] is None:
        return "no verdict: too few prompts"
    if difference["low"] > 0:
        return "helps"
    return "harms" if difference["high"] < 0 else "not seen to help"
