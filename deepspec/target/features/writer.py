"""Packed rows → shards of a feature store, by any number of processes, killed and started again at will.

A shard is a fixed range of rows and the target runs over fixed batches of them, so that its bytes do not depend on
who writes it or how often the writer was killed. Process r of n writes the shards r, r + n, …; what is written is
skipped. At most two shards are in memory: the one that grows and the one being written.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from deepspec.artifacts import failed_write, file_sha256, free_space
from deepspec.config.schema import StoreFormat
from deepspec.errors import UserError
from deepspec.target.features.codec import Codec, Encoded
from deepspec.target.features.documents import Span, columns, needed, spans, teachers
from deepspec.target.features.files import DONE, SUFFIX, Contents, Part, write_shard


class Rows(Protocol):
    """Packed rows with the columns tokens, loss_mask, documents and positions, by number."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Recipe:
    """What a store's shards hold. layers: captured, ascending. last: the last hidden state is a part of its own.
    reach: as in `needed`. everything: all positions' features, whatever the loss mask."""

    layers: list[int]
    last: bool
    reach: int | None
    everything: bool
    codec: Codec

    @property
    def parts(self) -> list[str]:
        return [*(["features"] if self.layers else []), *(["last"] if self.last else [])]

    def chosen(self, part: str, span: Span) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """[n] bool: the positions of a document that a part holds."""
        if part == "last":
            return teachers(span.loss_mask)
        return np.ones_like(span.loss_mask) if self.everything else needed(span.loss_mask, self.reach)

    def format_of(self, part: str) -> StoreFormat:
        """A teacher is not stored in four bits."""
        format = self.codec.format
        return StoreFormat.int8 if format is StoreFormat.int4 and part == "last" else format

    def codec_of(self, part: str, columns: Sequence[int] | None = None) -> Codec:
        """The codec of a part; columns: places in `layers`, None = all of the part."""
        channels = self.codec.channels
        if part == "last":
            return Codec(self.format_of(part), None if channels is None else channels[len(self.layers) :])
        if channels is None:
            return self.codec
        return Codec(
            self.codec.format, channels[list(range(len(self.layers)) if columns is None else columns)]
        )


@dataclass(frozen=True)
class ShardPlan:
    """One shard to be: rows [first, end) of a split."""

    name: str
    first: int
    end: int


def shard_plans(prefix: str, rows: int, rows_each: int) -> list[ShardPlan]:
    starts = range(0, rows, rows_each)
    return [
        ShardPlan(f"{prefix}-{number:05d}{SUFFIX}", first, min(first + rows_each, rows))
        for number, first in enumerate(starts)
    ]


def write_shards(
    target: Any,
    rows: Rows,
    plans: Sequence[ShardPlan],
    folder: Path,
    recipe: Recipe,
    batch_size: int,
    known: Callable[[bytes], bool] = lambda key: False,
    on_rows: Callable[[int], None] = lambda count: None,
) -> None:
    """Write those of `plans` that are not finished. known: documents that the store has already.

    Errors: `UserError` where the disk is full or the target's hidden states are not numbers.
    """
    with ThreadPoolExecutor(1) as writer:
        writing: Future[None] | None = None
        for plan in plans:
            if not (folder / plan.name).with_suffix(DONE).is_file():
                contents = _captured(target, rows, plan, recipe, batch_size, known, on_rows)
                if writing is not None:
                    _finished(writing, folder)
                writing = writer.submit(write_shard, folder / plan.name, contents, file_sha256)
            else:
                on_rows(plan.end - plan.first)
        if writing is not None:
            _finished(writing, folder)


def _finished(writing: Future[None], folder: Path) -> None:
    try:
        writing.result()
    except Exception as error:
        if (why := failed_write(error)) is None:
            raise
        raise UserError(
            f"A shard in {folder} could not be written: {why} ({free_space(folder)}). What is finished stays. Make "
            "room and give the same command again; features.format=int8 and features.keep=needed take least, "
            "features.source=online none."
        ) from error


def _captured(
    target: Any,
    rows: Rows,
    plan: ShardPlan,
    recipe: Recipe,
    batch_size: int,
    known: Callable[[bytes], bool],
    on_rows: Callable[[int], None],
) -> Contents:
    """The contents of one shard."""
    contents = Contents([Part(name) for name in recipe.parts])
    before: _Running | None = None
    for running in _batches(target, rows, plan, recipe, batch_size, known, on_rows):
        if before is not None:
            before.collect(contents, recipe)  # while the device works on the next batch
        before = running
    if before is not None:
        before.collect(contents, recipe)
    return contents


def _batches(
    target: Any,
    rows: Rows,
    plan: ShardPlan,
    recipe: Recipe,
    batch_size: int,
    known: Callable[[bytes], bool],
    on_rows: Callable[[int], None],
) -> Iterator["_Running"]:
    wanted: list[tuple[Any, list[Span]]] = []
    seen: set[bytes] = set()
    for number in range(plan.first, plan.end):
        row = rows[number]
        kept = []
        for span in spans(len(wanted), row["tokens"], row["loss_mask"], row["documents"]):
            key = span.key
            if key not in seen and not known(key) and any(recipe.chosen(p, span).any() for p in recipe.parts):
                seen.add(key)
                kept.append(span)
        if kept:
            wanted.append((row, kept))
        if len(wanted) == batch_size or (wanted and number == plan.end - 1):
            yield _run(target, wanted, recipe)
            wanted = []
        on_rows(1)


@dataclass
class _Running:
    """A batch on its way through the device: encoded parts, and the documents they belong to."""

    spans: list[Span]
    encoded: dict[str, Encoded]
    finite: Tensor

    def collect(self, contents: Contents, recipe: Recipe) -> None:
        """Wait for the device and add the batch to the shard."""
        if not bool(self.finite):
            raise UserError(
                "The target's hidden states are not finite numbers in some of the rows: its weights are damaged, or "
                "target.dtype is too narrow for it. Nothing of this shard was stored."
            )
        contents.keys += [span.key for span in self.spans]
        contents.tokens += sum(span.end - span.start for span in self.spans)
        for part in contents.parts:
            stored = self.encoded[part.name]
            scales = None if stored.scales is None else stored.scales.cpu()
            part.add(Encoded(stored.values.cpu(), scales))
            for span in self.spans:
                places = np.flatnonzero(recipe.chosen(part.name, span))
                part.places.append(places.astype(np.int32))
                part.counts.append(len(places))


def _run(target: Any, wanted: Sequence[tuple[Any, list[Span]]], recipe: Recipe) -> _Running:
    """Capture a batch and encode the positions that are kept, all on the target's device."""
    batch = columns([row for row, _ in wanted])
    device = target.device
    captured = target.capture(
        batch.tokens.to(device), batch.positions.to(device), batch.documents.to(device), recipe.layers
    )
    kept = [span for _, own in wanted for span in own]
    encoded: dict[str, Encoded] = {}
    finite = torch.ones((), dtype=torch.bool, device=device)
    for part in recipe.parts:
        at = [np.flatnonzero(recipe.chosen(part, span)) + span.start for span in kept]
        line = np.repeat([span.row for span in kept], [len(one) for one in at])
        index = torch.from_numpy(line).to(device), torch.from_numpy(np.concatenate(at)).to(device)
        hidden = captured.last_hidden if part == "last" else captured.features
        picked = hidden[index].unflatten(-1, (-1, captured.last_hidden.shape[-1]))
        finite &= torch.isfinite(picked).all()
        encoded[part] = recipe.codec_of(part).encode(picked)
    return _Running(kept, encoded, finite)
