"""Documents of any length into rows of one length, with little padding and no document torn apart."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.int32]


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
    tokens: Sequence[Sequence[int]], masks: Sequence[Sequence[int]], length: int, pad: int
) -> PackedRows:
    """Pack documents (`tokens` and `masks`, pairwise of equal length) into rows of `length` tokens."""
    assigned = assign_rows([len(document) for document in tokens], length)
    shape = (len(assigned), length)
    packed = PackedRows(
        tokens=np.full(shape, pad, dtype=np.int32),
        loss_mask=np.zeros(shape, dtype=np.int32),
        documents=np.full(shape, -1, dtype=np.int32),
        positions=np.zeros(shape, dtype=np.int32),
    )
    for row, members in enumerate(assigned):
        start = 0
        for number, index in enumerate(members):
            end = start + len(tokens[index])
            packed.tokens[row, start:end] = tokens[index]
            packed.loss_mask[row, start:end] = masks[index]
            packed.documents[row, start:end] = number
            packed.positions[row, start:end] = np.arange(end - start)
            start = end
    return packed
