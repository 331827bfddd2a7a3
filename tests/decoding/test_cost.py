"""The cost table: monotone, interpolated, cached, and refused where it was not measured."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspec.decoding import cost
from deepspec.decoding.cost import (
    CostTable,
    Curve,
    context_bucket,
    cost_key,
    cost_table,
    load_table,
    monotone,
)
from deepspec.decoding.request import Request
from deepspec.decoding.steps import draft_steps, time_steps, verify_steps
from deepspec.drafts.eagle3 import Eagle3Options
from deepspec.drafts.registry import new_draft
from deepspec.errors import UserError
from tests.models import prompts, tiny_target

seconds = st.lists(st.floats(0.01, 10), min_size=1, max_size=8)


@given(seconds)
def test_monotone_is_the_isotonic_regression(values: list[float]) -> None:
    """Against the max–min formula: g_i = max_{s≤i} min_{t≥i} mean(v_s..v_t)."""
    n = len(values)
    expected = [
        max(min(np.mean(values[s : t + 1]) for t in range(i, n)) for s in range(i + 1)) for i in range(n)
    ]
    assert monotone(values) == pytest.approx(expected)


@given(st.lists(st.lists(st.floats(0.01, 10), min_size=4, max_size=4), min_size=3, max_size=3))
def test_a_curve_rises_along_both_its_sides(measured: list[list[float]]) -> None:
    curve = cost._curve([1, 2, 4], [dict(zip([1, 2, 4, 8], row, strict=True)) for row in measured])
    table = np.array(curve.seconds)
    assert (np.diff(table, axis=0) >= -1e-12).all() and (np.diff(table, axis=1) >= -1e-12).all()


def test_between_the_points_lie_straight_lines() -> None:
    curve = Curve([1, 2, 4], [1, 4], [[1.0, 4.0], [2.0, 5.0], [6.0, 9.0]])
    assert curve.at(1, 1) == 1.0 and curve.at(4, 4) == 9.0
    assert curve.at(1, 2) == pytest.approx(2.0)
    assert curve.at(3, 1) == pytest.approx(4.0)
    assert curve.at(3, 3) == pytest.approx(np.interp(3, [1, 4], [np.mean([2, 6]), np.mean([5, 9])]))
    assert curve.at(1, 6) == pytest.approx(6.0)  # beyond the largest the last line goes on
    assert Curve([1], [1], [[0.5]]).at(3, 7) == 0.5


def test_a_rounds_seconds_add_draft_and_verification() -> None:
    table = CostTable({}, Curve([1], [1, 2, 3], [[1.0, 1.5, 1.75]]), Curve([1], [1, 2], [[0.25, 0.5]]))
    assert table.round_seconds(1, 2) == [1.25, 1.75, 2.25]


def test_at_one_shape_verifying_less_saves_the_drafting_only() -> None:
    verify = Curve([1, 2], [1, 2, 3], [[1.0, 1.5, 1.75], [2.0, 2.5, 3.0]])
    table = CostTable({}, verify, Curve([1], [1, 2], [[0.25, 0.5]])).at_one_shape(2, 3)
    assert table.round_seconds(1, 2) == [0.25 + 3.0, 0.25 + 3.0, 0.5 + 3.0]


@pytest.mark.parametrize(("tokens", "bucket"), [(1, 64), (64, 64), (65, 128), (1000, 1024), (1024, 1024)])
def test_context_buckets(tokens: int, bucket: int) -> None:
    assert context_bucket(tokens) == bucket


@pytest.fixture(scope="module")
def pair():
    target = tiny_target("llama")
    torch.manual_seed(0)
    return target, new_draft(Eagle3Options(vocab_size=None, ttt_steps=3), target, None).double().eval()


def test_a_table_is_measured_once_and_read_again(pair, tmp_path: Path, monkeypatch) -> None:
    target, draft = pair
    monkeypatch.setattr(cost, "REPEATS", 1)
    request = Request(prompts(1)[0], 8)
    table = cost_table(target, draft, request, k=3, max_rows=3, folder=tmp_path)
    assert table.verify.rows == table.draft.rows == [1, 2, 3]
    assert table.verify.tokens == [1, 2, 3, 4] and table.draft.tokens == [1, 2, 3]
    assert all(value > 0 for row in table.verify.seconds + table.draft.seconds for value in row)
    monkeypatch.setattr(cost, "measure_table", None)
    assert cost_table(target, draft, request, k=3, max_rows=3, folder=tmp_path) == table


def test_a_table_of_another_machine_is_refused_by_name(pair, tmp_path: Path) -> None:
    key = cost_key(*pair, 64, 3, 1)
    other = {**key, "cpu": "Abacus 9", "threads": 99}
    path = tmp_path / "table.json"
    curve = {"rows": [1], "tokens": [1], "seconds": [[1.0]]}
    path.write_text(json.dumps({"key": other, "verify": curve, "draft": curve}))
    with pytest.raises(
        UserError, match=r"table\.json was measured with cpu Abacus 9, threads 99; here it is"
    ):
        load_table(path, key)
    path.write_text(json.dumps({"key": key, "verify": curve, "draft": curve}))
    assert load_table(path, key).verify.at(1, 1) == 1.0
    path.write_text('{"key": {}')
    with pytest.raises(UserError, match=r"table\.json is damaged"):
        load_table(path, key)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_bare_step_reads_what_it_says_and_forgets_it(pair, rows: int, monkeypatch) -> None:
    target, draft = pair
    seen: list[tuple[int, int]] = []
    forward = target.forward

    def spy(tokens, state, *args, **kwargs):
        seen.append((*tokens.shape, max(state.lengths)))
        return forward(tokens, state, *args, **kwargs)

    monkeypatch.setattr(target, "forward", spy)
    text = prompts(1, seed=3)[0]
    of = verify_steps(target, text, 4, rows)
    for n in (4, 2, 4):
        of(n)()
    assert seen == [(rows, len(text), 0), (rows, 4, len(text)), (rows, 2, len(text)), (rows, 4, len(text))]
    step = draft_steps(target, draft, text, Request(text, 8), 2, rows)(3)
    step()
    step()


def test_step_times_are_medians_in_alternating_order() -> None:
    order: list[int] = []
    now = 0.0

    def clock() -> float:
        return now

    def step(n: int) -> None:
        nonlocal now
        order.append(n)
        now += n * (100.0 if len(order) == 4 else 1.0)  # one slow outlier

    times = time_steps({1: lambda: step(1), 2: lambda: step(2)}, 3, clock)
    assert order == [1, 2, 1, 2, 2, 1, 1, 2]
    assert times == {1: 1.0, 2: 2.0}
