"""The simulated engine: against hand computation, the real engine's rounds, and laws that any queue keeps."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspec.config.schema import HardwareConfig
from deepspec.decoding import Engine, Request
from deepspec.decoding.cost import CostTable, Curve
from deepspec.decoding.scheduler import Schedule, Scheduler
from deepspec.drafts.ngram import NgramDraft, NgramOptions
from deepspec.simulation.costs import Sizes, described, line, with_round_trip
from deepspec.simulation.engine import Costs, SimulatedEngine
from deepspec.simulation.load import all_at_once, arrivals, users
from deepspec.simulation.network import Way, network_is_larger_up_to, sooner_from
from deepspec.simulation.trace import RecordedRequest, RecordedRound, Trace
from tests.models import prompts, tiny_target


def costs(step: float = 0.1, row: float = 0.0, draft: float = 0.02, k: int = 4) -> Costs:
    """verify(R, n) = 1 + R·(row + step·(n−1)), draft(R, k) = draft·k, prefill = 0.01·tokens."""
    rows, widths = [1, 2, 64], list(range(1, k + 2))
    verify = [[1 + r * (row + step * (n - 1)) for n in widths] for r in rows]
    drafts = [[draft * n for n in widths[:-1]] for _ in rows]
    table = CostTable({}, Curve(rows, widths, verify), Curve(rows, widths[:-1], drafts))
    return Costs(table, lambda tokens: 0.01 * tokens)


def request(
    accepted: Sequence[int], answer: int = 20, prompt: int = 10, sure: float = 0.5
) -> RecordedRequest:
    return RecordedRequest(prompt, answer, tuple(RecordedRound(n, (sure,) * 4) for n in accepted))


def test_one_stream_by_hand() -> None:
    engine = SimulatedEngine(costs(), 4)
    seconds = all_at_once(engine, [request([2, 0, 4], answer=12)], 1)
    # the prefill gives 1 token, then 3, 1, 5, and of the last round 1 is needed: one token drafted for it
    assert engine.tally.committed == 11
    wide = 0.08 + 1.4  # four drafted, five read
    assert engine.tally.rounds == 4
    left = 12 - 1 - 3 - 1 - 5
    narrow = 0.02 * (left - 1) + 1 + 0.1 * (left - 1)
    assert seconds == pytest.approx(0.1 + 3 * wide + narrow)


def test_plain_decoding_by_hand() -> None:
    seconds = all_at_once(SimulatedEngine(costs(row=0.25), 0), [request([], 6), request([], 9)], 2)
    assert seconds == pytest.approx(2 * 0.1 + 5 * 1.5 + 3 * 1.25)
    point = users(SimulatedEngine(costs(row=0.25), 0), Trace([request([], 101, prompt=0)], 4), 8, "plain")
    assert (point.rows, point.tau, point.scheduled) == (8, 1, 0)
    assert point.per_user == pytest.approx(1 / 3)
    assert point.tokens_per_second == pytest.approx(8 / 3, rel=0.02)


@pytest.mark.parametrize("rows", [1, 3])
def test_as_many_rounds_as_the_real_engine(rows: int) -> None:
    """Recorded by the engine, replayed by the simulation: the same batches, step by step."""
    target, k = tiny_target("llama"), 3
    requests = [Request([*one, *one], 18, id=str(i)) for i, one in enumerate(prompts(7))]
    draft = NgramDraft(NgramOptions(min_n=1))
    real = Engine(target, draft, k=k, max_batch_size=1).generate(requests)
    steps: list[int] = []
    Engine(target, draft, k=k, max_batch_size=rows, observe=lambda r, t, p: steps.append(len(r))).generate(
        requests
    )
    replayed = [
        RecordedRequest(
            len(one.tokens),
            len(result.tokens),
            tuple(RecordedRound(r.accepted, ()) for r in result.rounds),
        )
        for one, result in zip(requests, real, strict=True)
    ]
    engine = SimulatedEngine(costs(k=k), k)
    all_at_once(engine, replayed, rows)
    assert engine.tally.rounds == len(steps)
    assert engine.tally.row_rounds == sum(steps)
    assert engine.tally.committed == sum(len(result.tokens) - 1 for result in real)


def test_the_hardware_schedule_verifies_less_under_load_and_never_loses() -> None:
    trace = Trace([request([3, 0, 2, 1, 4, 0], 60, sure=0.7), request([1, 1, 3, 0], 40, sure=0.6)], 4)
    table = costs(step=0.08, draft=0.01)
    budgets = []
    for count in (1, 4, 16, 64):
        plain = users(SimulatedEngine(table, 0), trace, count, "plain")
        scheduler = Scheduler(Schedule("hardware"), 4, table.table)
        point = users(SimulatedEngine(table, 4, scheduler, told=True), trace, count, "hardware")
        budgets.append(point.scheduled)
        assert point.tokens_per_second > 0.97 * plain.tokens_per_second
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[0] > 2.5
    assert budgets[-1] < 0.5


@settings(max_examples=20, deadline=None)
@given(st.floats(0.01, 0.2), st.integers(0, 99))
def test_arrivals_enter_in_order_and_wait_at_least_for_their_prefill(rate: float, seed: int) -> None:
    trace = Trace([request([2, 1, 0, 3], 30), request([0, 4], 15)], 4)
    engine = SimulatedEngine(costs(), 4)
    seen: list[tuple[float, float]] = []
    admit = engine.admit
    engine.admit = lambda row: (admit(row), seen.append((row.arrived, row.first)))[0]  # type: ignore[method-assign]
    point = arrivals(engine, trace, rate, 64, "fixed", 60, seed)
    assert point.requests == 60
    assert all(first >= arrived for arrived, first in seen)
    assert [arrived for arrived, _ in seen] == sorted(arrived for arrived, _ in seen)
    assert point.ttft_p95 >= point.ttft_p50 >= 0.1 - 1e-9  # a prefill at least


def test_a_described_machine_is_its_roofline() -> None:
    machine = HardwareConfig("x", flops=1e12, bandwidth=1e11, efficiency=0.5, launch_seconds=1e-3)
    sizes = Sizes(10**9, 10**8, cached=1000, passes=lambda k: k)
    found = described(machine, sizes, 4, context=100)
    memory = (2e9 + 100 * 1000) / 1e11 + 1e-3
    assert found.table.verify.at(1, 1) == pytest.approx(memory)
    assert found.table.verify.at(1, 5) == pytest.approx(max(memory, 2 * 1e9 * 5 / 0.5e12 + 1e-3))
    assert found.table.verify.at(64, 5) == pytest.approx(2 * 1e9 * 320 / 0.5e12 + 1e-3)
    assert found.table.draft.at(1, 3) == pytest.approx(3 * (2e8 / 1e11 + 1e-3))
    assert found.prefill(1000) == pytest.approx(2 * 1e9 * 1000 / 0.5e12 + 1e-3)
    slow = with_round_trip(found, 0.05)
    assert slow.table.draft.at(1, 3) == pytest.approx(found.table.draft.at(1, 3) + 0.05)
    assert slow.table.verify == found.table.verify


def test_prefills_lie_on_a_line() -> None:
    found = line([10, 20, 40], [1.1, 2.1, 4.1])
    assert found(100) == pytest.approx(10.1)
    assert line([10, 10], [1.0, 3.0])(99) == 2.0
    assert line([10, 20], [3.0, 1.0])(99) == 2.0  # noise: a longer prompt takes no less
    assert line([10, 20], [0.5, 2.0])(40) > 0


@settings(deadline=None)
@given(*[st.floats(0.001, 2.0)] * 5)
def test_the_network_against_counting(
    round_trip: float, start: float, each: float, own: float, fast: float
) -> None:
    api, here = Way("api", start, each, round_trip), Way("here", own, fast)
    up_to = network_is_larger_up_to(api)
    shares = [api.network_share(n) for n in range(1, 3000)]
    counted = sum(1 for share in shares if share >= 0.5 - 1e-12)
    if counted < len(shares):
        assert abs(up_to - counted) <= 1  # a tie may round either way
    first = next((n for n in range(1, 3000) if here.seconds(n) < api.seconds(n)), None)
    found = sooner_from(here, api)
    if first is not None:
        assert found is not None
        assert abs(found - first) <= 1
    elif found is not None:
        assert found > 2900
    assert math.isfinite(np.mean(shares))
