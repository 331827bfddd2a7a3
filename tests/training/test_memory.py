"""Kept features: used instead of the target, within the budget, and independent of the batch."""

import torch

from deepspec.training.batches import Plan, windows
from deepspec.training.memory import GIB, FeatureMemory, split_budget
from deepspec.training.sources import Online, draft_batch
from tests.training.fakes import FakeTarget
from tests.training.fakes import rows as make_rows


def test_a_second_epoch_does_not_run_the_target() -> None:
    target, rows = FakeTarget(), make_rows(4)
    memory = FeatureMemory(gib=1.0)
    made: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for window in windows(rows, Plan(8, 2), 0, seed=3):
        for one in window:
            batch = draft_batch(one, Online(target, [0, 2], memory=memory))
            for index, row in enumerate(one.ids):
                made.setdefault(row, []).append((batch.features[index], batch.last_hidden[index]))
    assert target.captures == 4
    for first, second in made.values():
        assert torch.equal(first[0], second[0])
        assert torch.equal(first[1], second[1])


def test_the_budget_is_kept_and_what_does_not_fit_is_still_right() -> None:
    target, rows = FakeTarget(), make_rows(4)
    (window,) = windows(rows, Plan(4, 4), 0, seed=None)
    whole = draft_batch(window[0], Online(target, [0, 2]))
    size = (whole.features[0].numel() + whole.last_hidden[0].numel()) * whole.features.element_size()
    memory = FeatureMemory(gib=2.5 * size / GIB)
    for _ in range(2):
        batch = draft_batch(window[0], Online(target, [0, 2], memory=memory))
        torch.testing.assert_close(batch.features, whole.features)
    assert sorted(memory.rows) == [0, 1]
    assert memory.used == 2 * size


def test_held_out_rows_have_a_share_inside_the_budget() -> None:
    training, held_out = split_budget(2.0)
    assert training.gib > held_out.gib > 0
    assert training.gib + held_out.gib <= 2.0
    assert [memory.gib for memory in split_budget(0.0)] == [0.0, 0.0]
