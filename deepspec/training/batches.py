"""Packed rows → batches, in an order that the seed alone decides.

All epochs are one stream of rows; an optimiser step takes the next ranks × accumulation × batch_size of it,
whichever process they fall to, and only the last step may find fewer. So any number of processes trains on
the same batches, and a step number is all that is needed to go on in the middle of an epoch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from deepspec.drafts.contract import TargetModel
from deepspec.errors import UserError
from deepspec.randomness import splitmix64
from deepspec.target import Captured

PADDING = {"tokens": 0, "loss_mask": 0, "documents": -1, "positions": 0}
STAND_IN = -1


class Rows(Protocol):
    """Packed rows: a `datasets.Dataset` or a list of dicts, with the columns of `PADDING`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class CapturingTarget(TargetModel, Protocol):
    """The part of the target that batches need."""

    device: torch.device

    def capture(self, tokens: Tensor, positions: Tensor, documents: Tensor, layers: Sequence[int]) -> Any:
        """[B, T] each → an object with features [B, T, len(layers)·H] and last_hidden [B, T, H]."""


@dataclass
class RowBatch:
    """Columns [B, T] int64, padded on the right. ids: their row numbers. seeds: [B], one a row and epoch.

    counted: False for a stand-in, a real row given to a process for which the last step has none left, so
    that all processes run the same number of passes; it must weigh nothing. captured: their features, where they
    were fetched ahead.
    """

    tokens: Tensor
    loss_mask: Tensor
    documents: Tensor
    positions: Tensor
    ids: list[int]
    counted: bool
    seeds: Tensor | None = None
    captured: Captured | None = None

    @property
    def token_count(self) -> int:
        """Tokens that are not padding."""
        return int((self.documents >= 0).sum()) if self.counted else 0


@lru_cache(maxsize=4)
def epoch_order(rows: int, seed: int, epoch: int) -> list[int]:
    """Row numbers by a hash of (seed, epoch, row): a row added or removed leaves the others' order."""
    seed_key, epoch_key = np.uint64(seed % 2**64), np.uint64(epoch)
    key = splitmix64(splitmix64(np.array([seed_key])) + epoch_key)
    return np.argsort(splitmix64(key ^ splitmix64(np.arange(rows, dtype=np.uint64))), kind="stable").tolist()


@dataclass(frozen=True)
class Plan:
    """Which part of the stream each process takes at each step.

    stream: rows in all epochs together. batch_size, accumulation: as configured; ranks: processes.
    """

    stream: int
    batch_size: int
    accumulation: int = 1
    ranks: int = 1

    @property
    def rows_a_step(self) -> int:
        return self.batch_size * self.accumulation * self.ranks

    @property
    def steps(self) -> int:
        return -(-self.stream // self.rows_a_step)

    def rows_before(self, step: int) -> int:
        """Rows of the stream taken by the first `step` steps."""
        return min(self.stream, step * self.rows_a_step)

    def micro_batch(self, step: int, micro: int, rank: int) -> range:
        """Places in the stream; empty where the last step has no rows left for this process."""
        start = (step * self.accumulation + micro) * self.ranks * self.batch_size + rank * self.batch_size
        return range(min(start, self.stream), min(start + self.batch_size, self.stream))


class _Stream(Dataset[dict[str, Any]]):
    def __init__(self, rows: Rows, seed: int | None) -> None:
        self.rows, self.seed = rows, seed

    def __getitem__(self, place: int) -> dict[str, Any]:
        epoch, index = divmod(max(place, 0), len(self.rows))
        row = index if self.seed is None else epoch_order(len(self.rows), self.seed, epoch)[index]
        draws = _row_seed(self.seed or 0, epoch, row)
        return {**self.rows[row], "id": row, "counted": place != STAND_IN, "seed": draws}


def _row_seed(seed: int, epoch: int, row: int) -> int:
    """A key for what a draft draws over a row: the same whatever batch, process or resumption it falls to."""
    key = splitmix64(np.array([seed % 2**64], dtype=np.uint64))
    for part in (epoch, row):
        key = splitmix64(key ^ np.uint64(part))
    return int(key[0] >> np.uint64(1))


class _Places(Sampler[list[int]]):
    def __init__(self, plan: Plan, rank: int, first_step: int) -> None:
        self.plan, self.rank, self.first_step = plan, rank, first_step

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.first_step, self.plan.steps):
            for micro in range(self.plan.accumulation):
                yield list(self.plan.micro_batch(step, micro, self.rank)) or [STAND_IN]


def collate(rows: list[dict[str, Any]]) -> RowBatch:
    """Rows of any lengths → one padded batch."""
    length = max(len(row["tokens"]) for row in rows)
    columns: dict[str, Any] = {}
    for name, pad in PADDING.items():
        columns[name] = torch.full((len(rows), length), pad)
        for index, row in enumerate(rows):
            columns[name][index, : len(row[name])] = torch.as_tensor(row[name])
    return RowBatch(
        **columns,
        ids=[row["id"] for row in rows],
        counted=all(row["counted"] for row in rows),
        seeds=torch.tensor([row["seed"] for row in rows]),
    )


def windows(
    rows: Rows, plan: Plan, rank: int, seed: int | None, first_step: int = 0
) -> Iterator[list[RowBatch]]:
    """This process's micro-batches, one list an optimiser step. seed None: the rows in their own order."""
    loader = iter(
        DataLoader(
            _Stream(rows, seed),
            batch_sampler=_Places(plan, rank, first_step),
            collate_fn=collate,
            generator=torch.Generator(),  # else making a loader draws from the draft's own random stream
        )
    )
    while window := [batch for _, batch in zip(range(plan.accumulation), loader, strict=False)]:
        yield window


def check_rows(rows: Rows, what: str) -> None:
    """Stop before any long work if there is nothing to learn from; `what` names the rows for the error."""
    if len(rows) == 0:
        raise UserError(f"{what} has no rows: prepare more prompts (data.prompts, data.builtin_prompts).")
    missing = [name for name in PADDING if name not in rows[0]]
    if missing:
        raise UserError(f"{what} lacks the column(s) {', '.join(missing)}: make it with deepspec.prepare.")
    if not any(torch.as_tensor(rows[index]["loss_mask"]).any() for index in range(len(rows))):
        raise UserError(f"{what}: no token is supervised (every loss_mask is 0). Does it hold answers?")
