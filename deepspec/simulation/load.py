"""Requests against a simulated engine: users who ask again at once, arrivals at a rate, or a list as it stands."""

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from deepspec.simulation.engine import SimulatedEngine, SimulatedRow, Tally
from deepspec.simulation.trace import RecordedRequest, Trace

TURNS = 3  # answers that a user waits for, on average, after the first ones, which are not counted
LEAST_REQUESTS = 64


@dataclass
class Point:
    """One policy at one load. per_user: tokens a second of a stream, median. ttft: seconds from arrival to the first
    token. scheduled: drafted tokens verified a row and round. speculated: part of the rounds that drafted."""

    policy: str
    load: float  # users, or requests a second
    rows: float  # mean rows of a round
    tokens_per_second: float
    per_user: float
    ttft_p50: float
    ttft_p95: float
    tau: float
    scheduled: float
    speculated: float
    requests: int


def all_at_once(engine: SimulatedEngine, requests: Sequence[RecordedRequest], max_rows: int) -> float:
    """Seconds to answer a list that is there from the start, `max_rows` at a time."""
    _run(engine, deque(SimulatedRow(one, 0.0) for one in requests), max_rows, lambda row: None)
    return engine.clock


def users(engine: SimulatedEngine, trace: Trace, count: int, policy: str, seed: int = 0) -> Point:
    """`count` users, each of whom asks the next question when the last is answered; the steady state."""
    source = _shuffled(trace, seed)
    waiting = deque(SimulatedRow(next(source), 0.0) for _ in range(count))
    left = max(LEAST_REQUESTS, TURNS * count)
    finished: list[SimulatedRow] = []
    begun: list[tuple[float, Tally]] = []

    def on_finish(row: SimulatedRow) -> None:
        finished.append(row)
        if len(finished) == count:  # from here on the rows are at different places of their answers
            begun.append((engine.clock, copy.copy(engine.tally)))
        if len(finished) < count + left:
            waiting.append(SimulatedRow(next(source), engine.clock))

    _run(engine, waiting, count, on_finish, lambda: len(finished) < count + left)
    return _point(engine, policy, count, finished[count : count + left], begun[0])


def arrivals(
    engine: SimulatedEngine,
    trace: Trace,
    rate: float,
    max_rows: int,
    policy: str,
    requests: int,
    seed: int = 0,
) -> Point:
    """Requests that arrive at random, `rate` a second on average, whatever is waiting already."""
    draw, source = random.Random(seed), _shuffled(trace, seed)
    at, coming = 0.0, []
    for _ in range(requests):
        at += draw.expovariate(rate)
        coming.append(SimulatedRow(next(source), at))
    finished: list[SimulatedRow] = []
    start = (0.0, copy.copy(engine.tally))
    _run(engine, deque(coming), max_rows, finished.append)
    return _point(engine, policy, rate, finished, start)


def _run(
    engine: SimulatedEngine,
    waiting: deque[SimulatedRow],
    max_rows: int,
    on_finish: Callable[[SimulatedRow], object],
    wanted: Callable[[], bool] = lambda: True,
) -> None:
    """As `decoding.Engine` does: all that have arrived enter while there is room, then one round."""
    while (waiting or engine.rows) and wanted():
        if not engine.rows and waiting and waiting[0].arrived > engine.clock:
            engine.clock = waiting[0].arrived
        while waiting and waiting[0].arrived <= engine.clock and len(engine.rows) < max_rows:
            row = waiting.popleft()
            engine.admit(row)
            if row.finished:
                on_finish(row)
        for row in engine.step() if engine.rows else []:
            on_finish(row)


def _shuffled(trace: Trace, seed: int) -> Iterator[RecordedRequest]:
    draw = random.Random(seed)
    while True:
        yield from draw.sample(trace.requests, len(trace.requests))


def _point(
    engine: SimulatedEngine,
    policy: str,
    load: float,
    rows: Sequence[SimulatedRow],
    begun: tuple[float, Tally],
) -> Point:
    since, before = begun
    tally = engine.tally.since(before)
    first_tokens = sum(1 for row in rows if row.first > since)
    seconds = engine.clock - since
    waits = [row.first - row.arrived for row in rows]
    speeds = [(row.tokens - 1) / (row.finished - row.first) for row in rows if row.tokens > 1]
    return Point(
        policy=policy,
        load=load,
        rows=tally.row_rounds / max(1, tally.rounds),
        tokens_per_second=(tally.committed + first_tokens) / seconds,
        per_user=float(np.median(speeds)),
        ttft_p50=float(np.percentile(waits, 50)),
        ttft_p95=float(np.percentile(waits, 95)),
        tau=tally.committed / max(1, tally.row_rounds),
        scheduled=tally.scheduled / max(1, tally.row_rounds),
        speculated=tally.speculated / max(1, tally.row_rounds),
        requests=len(rows),
    )
