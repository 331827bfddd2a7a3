"""Rows reach each process once an epoch, in an order that only the seed decides."""

from typing import Any

import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspec.errors import UserError
from deepspec.training.batches import Plan, check_rows, collate, epoch_order, windows
from deepspec.training.sources import Online, draft_batch
from tests.training import fakes


def plain_rows(count: int) -> list[dict[str, Any]]:
    """Row i says i, i + 1 times."""
    made = []
    for i in range(count):
        length = i + 1
        made.append(
            {
                "tokens": [i] * length,
                "loss_mask": [1] * length,
                "documents": [0] * length,
                "positions": list(range(length)),
            }
        )
    return made


sizes = st.integers(1, 4)


@given(count=st.integers(1, 9), epochs=st.integers(1, 3), batch=sizes, accumulation=sizes, ranks=sizes)
@settings(max_examples=60, deadline=None)
def test_every_epoch_gives_every_row_once_to_one_process(
    count: int, epochs: int, batch: int, accumulation: int, ranks: int
) -> None:
    rows, plan = plain_rows(count), Plan(count * epochs, batch, accumulation, ranks)
    by_rank = [list(windows(rows, plan, rank, seed=3)) for rank in range(ranks)]
    assert {len(one) for one in by_rank} == {plan.steps}
    seen: list[int] = []
    for step in range(plan.steps):
        assert {len(one[step]) for one in by_rank} == {accumulation}
        own = [micro for one in by_rank for micro in one[step] if micro.counted]
        seen += sorted(row for micro in own for row in micro.ids)
        assert len(seen) == plan.rows_before(step + 1) == min(count * epochs, (step + 1) * plan.rows_a_step)
        assert all(len(micro.ids) <= batch for micro in own)
    stream = [row for epoch in range(epochs) for row in epoch_order(count, 3, epoch)]
    steps = range(0, len(stream), plan.rows_a_step)
    assert seen == [row for start in steps for row in sorted(stream[start : start + plan.rows_a_step])]


def test_any_number_of_processes_takes_the_same_rows_a_step() -> None:
    rows = plain_rows(11)

    def by_step(batch: int, accumulation: int, ranks: int) -> list[list[int]]:
        plan = Plan(22, batch, accumulation, ranks)
        taken = [list(windows(rows, plan, rank, seed=1)) for rank in range(ranks)]
        return [
            sorted(row for one in taken for micro in one[step] if micro.counted for row in micro.ids)
            for step in range(plan.steps)
        ]

    assert by_step(4, 1, 1) == by_step(2, 2, 1) == by_step(1, 2, 2) == by_step(1, 1, 4)


def test_going_on_in_the_middle_of_an_epoch() -> None:
    rows, plan = plain_rows(7), Plan(14, 2, 1, 2)
    whole = [window[0].ids for window in windows(rows, plan, 1, seed=5)]
    assert [window[0].ids for window in windows(rows, plan, 1, seed=5, first_step=2)] == whole[2:]


def test_order_is_a_function_of_seed_epoch_and_row() -> None:
    order = epoch_order(50, 7, 2)
    assert sorted(order) == list(range(50))
    assert [row for row in epoch_order(60, 7, 2) if row < 50] == order
    assert order != epoch_order(50, 8, 2) != epoch_order(50, 7, 3)
    assert epoch_order(5, -1, 0) == epoch_order(5, 2**64 - 1, 0)
    places = torch.tensor([epoch_order(6, seed, 0).index(0) for seed in range(600)])
    assert torch.bincount(places, minlength=6).min() > 60  # about 100 each


def test_a_process_without_rows_gets_a_stand_in_that_counts_nothing() -> None:
    (window,) = windows(plain_rows(3), Plan(1, 1, 2, 1), 0, seed=0)
    assert [micro.counted for micro in window] == [True, False]
    assert window[1].token_count == 0


@pytest.mark.parametrize("as_dataset", [False, True])
def test_padding(as_dataset: bool) -> None:
    rows: Any = plain_rows(3)
    if as_dataset:
        rows = Dataset.from_list(rows).with_format("torch")
    (window,) = windows(rows, Plan(3, 3), 0, seed=None)
    (batch,) = window
    assert batch.tokens.tolist() == [[0, 0, 0], [1, 1, 0], [2, 2, 2]]
    assert batch.documents.tolist() == [[0, -1, -1], [0, 0, -1], [0, 0, 0]]
    assert batch.loss_mask.tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert batch.positions.tolist() == [[0, 0, 0], [0, 1, 0], [0, 1, 2]]
    assert (batch.token_count, batch.ids) == (6, [0, 1, 2])


def test_draft_batch_carries_the_targets_features() -> None:
    target = fakes.FakeTarget()
    row = {**fakes.rows(1)[0], "id": 0, "counted": True, "seed": 7}
    batch = collate([row])
    batch.loss_mask[:] = 1
    batch.documents[0, -2:] = -1
    made = draft_batch(batch, Online(target, [0, 2]), steps=4)
    captured = target.capture(batch.tokens, batch.positions, batch.documents, [0, 2])
    assert torch.equal(made.features, captured.features)
    assert torch.equal(made.last_hidden, captured.last_hidden)
    assert made.loss_mask.dtype == torch.bool
    assert made.loss_mask[0].tolist() == [True] * (batch.tokens.shape[1] - 2) + [False] * 2
    assert made.context.target is target
    assert made.steps == 4


def test_rows_that_teach_nothing_are_refused() -> None:
    with pytest.raises(UserError, match="no rows"):
        check_rows([], "The data")
    with pytest.raises(UserError, match="loss_mask, positions"):
        check_rows([{"tokens": [1], "documents": [0]}], "The data")
    silent = [{**row, "loss_mask": [0] * len(row["tokens"])} for row in plain_rows(3)]
    with pytest.raises(UserError, match="no token is supervised"):
        check_rows(silent, "The data")
    check_rows([*silent, *plain_rows(1)], "The data")
