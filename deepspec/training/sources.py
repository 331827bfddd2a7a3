"""Where the features of packed rows come from: the target as it runs, or a store. The same tensors either way."""

import queue
import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from deepspec.drafts.contract import DraftBatch, DraftContext, TargetModel
from deepspec.target import Captured
from deepspec.target.features import StoredRows
from deepspec.training.batches import CapturingTarget, RowBatch
from deepspec.training.memory import FeatureMemory, remembered, split_budget


class FeatureSource(Protocol):
    """Features for one draft.

    target: what the draft embeds, normalises and has logits with; its device is the draft's. ahead: optimiser steps
    whose features are fetched before they are asked for, in a thread of their own; 0 = none.
    """

    target: TargetModel
    device: torch.device
    ahead: int

    def captured(self, window: Sequence[RowBatch]) -> list[Captured]:
        """Features [B, T, F] and last hidden states [B, T, H] of each batch, on `device`."""


@dataclass(frozen=True)
class Sources:
    """Of the training rows and of the held-out rows."""

    train: FeatureSource
    held_out: FeatureSource


class Online:
    """The target runs beside the draft, forward only, in its own number format.

    runs: the target that is run, on a device of its own or the draft's; target: the one that the draft uses, None = the
    same. memory: rows it holds are not run again. batch_size: rows run at a time, independent of the draft's batches;
    None = each of the draft's batches as one. With a memory rows run one by one, see `FeatureMemory`.
    """

    def __init__(
        self,
        runs: CapturingTarget,
        layers: Sequence[int],
        *,
        memory: FeatureMemory | None = None,
        batch_size: int | None = None,
        target: CapturingTarget | None = None,
        ahead: int = 0,
    ) -> None:
        self.runs, self.layers, self.batch_size = runs, list(layers), batch_size
        self.memory = memory if memory is not None and memory.gib > 0 else None
        uses = runs if target is None else target
        self.target: TargetModel = uses
        self.device = uses.device
        # one and the same model cannot run a text and give the draft logits at the same time
        self.ahead = ahead if target is not None else 0

    def captured(self, window: Sequence[RowBatch]) -> list[Captured]:
        if self.memory is not None:
            return [self._kept(batch, self.memory) for batch in window]
        if self.batch_size is None:
            return [self._here(self._run(batch)) for batch in window]
        return [self._in_parts(batch, self.batch_size) for batch in window]

    def _run(self, batch: RowBatch, rows: slice = slice(None)) -> Captured:
        columns = (batch.tokens, batch.positions, batch.documents)
        tokens, positions, documents = (column[rows].to(self.runs.device) for column in columns)
        return self.runs.capture(tokens, positions, documents, layers=self.layers)

    def _here(self, captured: Captured) -> Captured:
        return Captured(captured.features.to(self.device), captured.last_hidden.to(self.device))

    def _in_parts(self, batch: RowBatch, size: int) -> Captured:
        parts = [self._run(batch, slice(first, first + size)) for first in range(0, len(batch.ids), size)]
        return self._here(
            Captured(
                torch.cat([one.features for one in parts]), torch.cat([one.last_hidden for one in parts])
            )
        )

    def _kept(self, batch: RowBatch, memory: FeatureMemory) -> Captured:
        def capture(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
            captured = self._run(batch, rows)
            return captured.features, captured.last_hidden

        return Captured(*remembered(batch.ids, batch.tokens.shape[1], memory, self.device, capture))


class FromStore:
    """Rows' features out of a store. target: the target's edges, or all of it."""

    def __init__(self, rows: StoredRows, target: TargetModel, ahead: int = 0) -> None:
        self.rows, self.target, self.device, self.ahead = rows, target, rows.device, ahead

    def captured(self, window: Sequence[RowBatch]) -> list[Captured]:
        return [self.rows.read(batch.tokens, batch.loss_mask, batch.documents) for batch in window]


def online(
    runs: CapturingTarget,
    layers: Sequence[int],
    keep_gib: float,
    batch_size: int | None = None,
    target: CapturingTarget | None = None,
    ahead: int = 0,
) -> Sources:
    """Both online, with `keep_gib` of memory between them; the rest as in `Online`."""
    train, held_out = (
        Online(runs, layers, memory=memory, batch_size=batch_size, target=target, ahead=ahead)
        for memory in split_budget(keep_gib)
    )
    return Sources(train, held_out)


def draft_batch(
    rows: RowBatch, source: FeatureSource, steps: int | None = None, loss_parts: Sequence[str] | None = None
) -> DraftBatch:
    """What the draft learns from: rows and their features, on the source's device."""
    captured = rows.captured if rows.captured is not None else source.captured([rows])[0]
    documents = rows.documents.to(source.device)
    return DraftBatch(
        context=DraftContext(source.target),
        tokens=rows.tokens.to(source.device),
        loss_mask=rows.loss_mask.to(source.device).bool() & (documents >= 0),
        documents=documents,
        positions=rows.positions.to(source.device),
        features=captured.features,
        last_hidden=captured.last_hidden,
        steps=steps,
        loss_parts=loss_parts,
        seeds=rows.seeds,
    )


def fetched_ahead(
    windows: Iterator[list[RowBatch]], source: FeatureSource
) -> Generator[list[RowBatch], None, None]:
    """The same windows; with `source.ahead`, so many are fetched beforehand with their features in `captured`.

    What fails in the thread is raised here, at the window that it was for.
    """
    if source.ahead < 1:
        yield from windows
        return
    ready: queue.Queue[list[RowBatch] | BaseException | None] = queue.Queue(source.ahead)
    left = threading.Event()

    def put(item: list[RowBatch] | BaseException | None) -> None:
        while not left.is_set():
            try:
                return ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def work() -> None:
        try:
            for window in windows:
                captured = source.captured(window)
                put([replace(one, captured=its) for one, its in zip(window, captured, strict=True)])
                if left.is_set():
                    return
            put(None)
        except BaseException as error:  # whatever it is, it belongs to the thread that trains
            put(error)

    thread = threading.Thread(target=work, name="features", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        left.set()
        thread.join()
