"""Which positions of a packed row a draft can learn from, and by what name a document's features are found.

The target sees each document of a packed row alone, so features belong to documents: in another row, or beside new
documents, they are the same. A document's name is a hash of its tokens and its loss mask, and so a store can never
give one document's features for another's.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

KEY_BYTES = 16
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Span:
    """One document of one packed row: its columns [start, end), its tokens and its loss mask."""

    row: int
    start: int
    end: int
    tokens: NDArray[np.int32]
    loss_mask: Flags

    @property
    def key(self) -> bytes:
        """The document's name."""
        content = self.tokens.astype("<i4").tobytes() + self.loss_mask.tobytes()
        return hashlib.sha256(content).digest()[:KEY_BYTES]


def spans(row: int, tokens: Any, loss_mask: Any, documents: Any) -> Iterator[Span]:
    """The documents of one packed row; columns [T] each, padding (−1) left out."""
    numbers = np.asarray(documents)
    ids, mask = np.asarray(tokens).astype(np.int32), np.asarray(loss_mask).astype(bool)
    edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
    for start, end in pairwise(edges):
        if end > start and numbers[start] >= 0:
            yield Span(row, start, end, ids[start:end], mask[start:end])


def needed(loss_mask: Flags, reach: int | None) -> Flags:
    """[n] bool: positions that lie at most `reach` before a supervised one of the document (None: anywhere before).

    A draft that is supervised at position i has read features of positions before i only, and no draft looks at
    what comes after; so the others can be left out without changing what is learnt.
    """
    count = len(loss_mask)
    until = np.concatenate([[0], np.cumsum(loss_mask)])
    after = np.arange(1, count + 1)
    last = np.minimum(after + (count if reach is None else reach), count)
    return until[last] > until[after]


def teachers(loss_mask: Flags) -> Flags:
    """[n] bool: positions whose last hidden state is a teacher: the next token of the document is supervised."""
    return needed(loss_mask, 1)


@dataclass(frozen=True)
class Columns:
    """Columns [B, T] of packed rows."""

    tokens: torch.Tensor
    loss_mask: torch.Tensor
    documents: torch.Tensor
    positions: torch.Tensor


def columns(rows: list[Any]) -> Columns:
    """Packed rows, cut behind the last token that is no padding (rows may be of different lengths)."""
    length = max(int((torch.as_tensor(row["documents"]) >= 0).sum()) for row in rows)
    made = {}
    for name, pad in (("tokens", 0), ("loss_mask", 0), ("documents", -1), ("positions", 0)):
        made[name] = torch.full((len(rows), length), pad)
        for index, row in enumerate(rows):
            values = torch.as_tensor(row[name])[:length]
            made[name][index, : len(values)] = values
    return Columns(**made)
