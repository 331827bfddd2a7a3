"""Candidates against each other: taking turns on the same prompts, the slower half dropped after each heat."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np

from deepspec.decoding.request import Request, Result
from deepspec.evaluation.result import Metric
from deepspec.evaluation.statistics import Bootstrap

Decode = Callable[[Sequence[Request]], list[Result]]  # of several requests at once
Group = Sequence[Request]
FINALISTS = 2


@dataclass
class Timed:
    """What one way took: tokens behind the first of each answer and seconds without prefills, by group."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    results: list[list[Result]] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        total = sum(self.seconds)
        return sum(self.tokens) / total if total else 0.0


def take_turns(
    ways: Mapping[str, Decode],
    groups: Sequence[Group],
    into: dict[str, Timed] | None = None,
    *,
    meter: Callable[[], AbstractContextManager[None]] = nullcontext,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Timed]:
    """Every way decodes every group, another one first each time; added to `into`."""
    found = into if into is not None else {}
    names = list(ways)
    for number, group in enumerate(groups):
        begin = number % len(names)
        for name in names[begin:] + names[:begin]:
            with meter():
                start = clock()
                results = ways[name](group)
                seconds = clock() - start
            timed = found.setdefault(name, Timed())
            timed.tokens.append(sum(len(result.tokens) - 1 for result in results))
            timed.seconds.append(seconds - sum(result.prefill_seconds for result in results))
            timed.results.append(results)
            progress()
    return found


def heats(count: int) -> list[int]:
    """How many ways run in each heat, until `FINALISTS` are left: 9 → [9, 5, 3]."""
    found = []
    while count > FINALISTS:
        found.append(count)
        count = max(FINALISTS, -(-count // 2))
    return found


def best_of(
    ways: Mapping[str, Decode],
    groups: Sequence[Group],
    drop: Callable[[str, Timed], bool] = lambda name, timed: False,
    *,
    always: Sequence[str] = (),
    meter: Callable[[], AbstractContextManager[None]] = nullcontext,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[], None] = lambda: None,
) -> tuple[str, dict[str, Timed]]:
    """The fastest way by successive halving, and what all took: of few groups for those that fell out early.

    groups: dealt out over the heats evenly; at least one. drop: a way that turns out to be none. always: ways that
    run in every heat and can win, whatever they took.
    """
    left, found = dict(ways), dict[str, Timed]()
    rounds = heats(len(left)) or [len(left)]
    for number in range(len(rounds)):
        share = groups[number * len(groups) // len(rounds) : (number + 1) * len(groups) // len(rounds)]
        if not share:
            continue
        found = take_turns(left, share, found, meter=meter, clock=clock, progress=progress)
        left = {name: way for name, way in left.items() if not drop(name, found[name])}
        ranked = sorted(left, key=lambda name: -found[name].tokens_per_second)
        keep = max(FINALISTS, -(-rounds[number] // 2))
        left = {name: left[name] for name in left if name in ranked[:keep] or name in always}
    return max(left, key=lambda name: found[name].tokens_per_second), found


def gain(one: Timed, other: Timed, resamples: int, seed: int = 0) -> Metric:
    """Tokens a second of `one` over `other`'s on the same groups, with the interval over groups."""
    columns = (np.array(v, dtype=float) for v in (one.tokens, one.seconds, other.tokens, other.seconds))
    return Bootstrap(len(one.tokens), resamples, seed).ratio(
        lambda a, s, b, t: (a / s) / (b / t), *columns, reason="nothing was decoded"
    )
