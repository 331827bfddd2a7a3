"""Documents of any length into rows of one length, with little padding and no document torn apart."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.int32]


class HasTokens(Protocol):
    """A document, as far as packing needs it."""

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def loss_mask(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class PackedRows:
    """int32 [R, L] each. documents: the document's number within its row, −1 where padding; positions restart
    at 0 in each document; loss_mask is 0 on padding."""

    tokens: Matrix
    loss_mask: Matrix
    documents: Matrix
    positions: Matrix


def assign_rows(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing: indices of the documents in each row.

    Longest first (ties: lower index), each into the fullest row that still takes it (ties: the older row).
    Every length must be in [1, capacity].
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, row), ascending
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if not 1 <= length <= capacity:
            raise ValueError(f"document {index} has {length} tokens, and 1 to {capacity} fit a row")
        at = bisect_left(free, (length, -1))
        if at < len(free):
            left, row = free.pop(at)
        else:
            left, row = capacity, len(rows)
            rows.append([])
        rows[row].append(index)
        if left > length:
            insort(free, (left - length, row))
    return rows


def pack(
    lengths: Sequence[int], document: Callable[[int], HasTokens], length: int, pad: int, batch: int
) -> Iterator[PackedRows]:
    """Pack documents into rows of `length` tokens, `batch` rows at a time.

    lengths: tokens of each. document: its number → its `tokens` and `loss_mask`, asked for once each.
    """
    assigned = assign_rows(lengths, length)
    for first in range(0, len(assigned), batch):
        part = assigned[first : first + batch]
        shape = (len(part), length)
        packed = PackedRows(
            tokens=np.full(shape, pad, dtype=np.int32),
            loss_mask=np.zeros(shape, dtype=np.int32),
            documents=np.full(shape, -1, dtype=np.int32),
            positions=np.zeros(shape, dtype=np.int32),
        )
        for row, members in enumerate(part):
            start = 0
            for number, index in enumerate(members):
                item = document(index)
                end = start + len(item.tokens)
                packed.tokens[row, start:end] = item.tokens
                packed.loss_mask[row, start:end] = item.loss_mask
                packed.documents[row, start:end] = number
                packed.positions[row, start:end] = np.arange(end - start)
                start = end
        yield packed
