"""Features from the target and from a store: the same loss for every family; batches, threads and devices."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspec.drafts.registry import new_draft
from deepspec.errors import UserError
from deepspec.target import Captured
from deepspec.target.features import FeatureStore, StoredRows, make_store
from deepspec.training.batches import Plan, RowBatch, windows
from deepspec.training.memory import FeatureMemory
from deepspec.training.sources import FromStore, Online, draft_batch, fetched_ahead
from tests.models import tiny_target
from tests.target.stores import order
from tests.target.stores import rows as packed
from tests.training.fakes import FakeTarget
from tests.training.fakes import rows as make_rows
from tests.training.test_train_families import OPTIONS


@pytest.mark.parametrize("family", sorted(OPTIONS))
def test_a_store_teaches_what_the_target_teaches(family: str, tmp_path: Path) -> None:
    """What was not stored is filled with rubbish: nothing may depend on it."""
    target = tiny_target("llama")
    torch.manual_seed(0)
    draft = new_draft(replace(OPTIONS[family], vocab_size=None), target, None).double()
    rows = packed(4)
    reach = draft.feature_reach
    made = order(
        tmp_path / "store",
        target,
        draft.capture_layers,
        splits={"train": rows},
        positions="needed" if reach is None else reach,
    )
    make_store(made, target, say=lambda line: None)
    stored = StoredRows(FeatureStore(made.folder, "x"), draft.capture_layers, target.device, target.dtype)
    ((together,),) = windows(rows, Plan(4, 4), 0, seed=3)
    real = draft_batch(together, Online(target, draft.capture_layers))
    read = draft_batch(together, FromStore(stored, target))
    for column in (read.features, read.last_hidden):
        missing = ~(column != 0).any(-1)  # nothing, where the last layer is read: then both are one tensor
        column[missing] = 1e3 * torch.randn_like(column[missing])
    assert float(read.last_hidden.abs().max()) > 100
    expected, found = draft(real), draft(read)
    total = 0.0
    for name in expected.sums:
        torch.testing.assert_close(found.sums[name], expected.sums[name], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.weights[name], expected.weights[name], rtol=1e-5, atol=1e-5)
        total = total + found.sums[name]
    for name in ("valid", "hits", "match"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
    sum(expected.sums.values()).backward()
    gradients = [one.grad.clone() for one in draft.parameters() if one.grad is not None]
    draft.zero_grad()
    total.backward()
    others = [one.grad for one in draft.parameters() if one.grad is not None]
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_the_targets_batch_is_independent_of_the_drafts(size: int) -> None:
    target, rows = FakeTarget(), make_rows(5)
    window = next(windows(rows, Plan(5, 5), 0, seed=None))
    (whole,) = Online(target, [0, 2]).captured(window)
    before = target.captures
    (parts,) = Online(target, [0, 2], batch_size=size).captured(window)
    assert target.captures - before == -(-5 // size)
    torch.testing.assert_close(parts.features, whole.features)
    torch.testing.assert_close(parts.last_hidden, whole.last_hidden)


def test_a_target_of_its_own_runs_and_the_draft_uses_the_other() -> None:
    runs, used = FakeTarget(), FakeTarget()
    source = Online(runs, [0, 2], target=used, ahead=2, memory=FeatureMemory(1.0))
    assert (source.target, source.ahead) == (used, 2)
    assert Online(runs, [0, 2], ahead=2).ahead == 0  # one model cannot do both at once
    source.captured(next(windows(make_rows(2), Plan(2, 2), 0, seed=None)))
    assert (runs.captures, used.captures) == (2, 0)


class Slow:
    """A source that says when it is asked."""

    device = torch.device("cpu")

    def __init__(self, ahead: int, fail_at: int = -1) -> None:
        self.target: Any = FakeTarget()
        self.ahead, self.fail_at, self.asked = ahead, fail_at, 0
        self.threads: set[int] = set()

    def captured(self, window: Sequence[RowBatch]) -> list[Captured]:
        if self.asked == self.fail_at:
            raise UserError("A shard is damaged.")
        self.asked += 1
        self.threads.add(threading.get_ident())
        return Online(self.target, [0, 2]).captured(window)


def some_windows() -> Iterator[list[RowBatch]]:
    return windows(make_rows(6), Plan(12, 2), 0, seed=5)


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_fetched_ahead_are_the_same_windows(ahead: int) -> None:
    source = Slow(ahead)
    found = list(fetched_ahead(some_windows(), source))
    for (one,), (other,) in zip(found, some_windows(), strict=True):
        assert one.ids == other.ids
        expected = draft_batch(other, Online(source.target, [0, 2]))
        assert torch.equal(draft_batch(one, source).features, expected.features)
    assert (threading.get_ident() in source.threads) == (ahead == 0)
    assert source.asked == len(found)


def test_a_failure_arrives_where_the_window_would_have() -> None:
    source, got = Slow(2, fail_at=2), 0
    with pytest.raises(UserError, match="damaged"):
        for _ in fetched_ahead(some_windows(), source):
            got += 1
    assert got == 2


def test_leaving_early_ends_the_thread() -> None:
    source = Slow(1)
    running = fetched_ahead(some_windows(), source)
    next(running)
    running.close()
    assert not [one for one in threading.enumerate() if one.name == "features"]
    assert source.asked < 6
