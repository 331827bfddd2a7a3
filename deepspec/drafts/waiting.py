"""What a draft has been told of and has not run yet, in rows of different lengths."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspec.drafts.contract import Beginning, Committed


@dataclass
class Waiting:
    """tokens [B, M], features [B, M, F] of the position before each, padded on the right; counts: a row's own."""

    tokens: Tensor
    features: Tensor
    counts: list[int]

    @classmethod
    def prompt(cls, beginning: Beginning) -> "Waiting":
        """The prompt's pairs: its tokens from the second on and the pending one, each with what came before."""
        tokens = beginning.tokens[:, 1:]
        return cls(tokens, beginning.features, [tokens.shape[1]])

    def append(self, committed: Committed) -> None:
        """What a round committed, behind what waits."""
        counts = [count + more for count, more in zip(self.counts, committed.counts, strict=True)]
        self.tokens = _append(self.tokens, self.counts, committed.tokens, committed.counts)
        self.features = _append(self.features, self.counts, committed.features, committed.counts)
        self.counts = counts

    def join(self, new: "Waiting") -> None:
        """Add one row, last."""
        self.tokens, self.features = _stack(self.tokens, new.tokens), _stack(self.features, new.features)
        self.counts = self.counts + new.counts

    def select(self, rows: Sequence[int]) -> None:
        index = list(rows)
        self.tokens, self.features = self.tokens[index], self.features[index]
        self.counts = [self.counts[row] for row in rows]

    def clear(self) -> None:
        """All of it has been run."""
        self.tokens, self.features = self.tokens[:, :0], self.features[:, :0]
        self.counts = [0] * len(self.counts)

    def last(self, x: Tensor) -> Tensor:
        """[B, M, ...] → [B, 1, ...]: each row's last entry that counts."""
        at = torch.tensor(self.counts, device=x.device) - 1
        return x[torch.arange(len(at), device=x.device), at][:, None]


def _stack(rows: Tensor, row: Tensor) -> Tensor:
    """[B, M, ...] and [1, M', ...] → [B+1, max(M, M'), ...], zeros on the right."""
    width = max(rows.shape[1], row.shape[1])
    stacked = rows.new_zeros(rows.shape[0] + 1, width, *rows.shape[2:])
    stacked[:-1, : rows.shape[1]] = rows
    stacked[-1:, : row.shape[1]] = row
    return stacked


def _append(first: Tensor, first_counts: list[int], second: Tensor, second_counts: list[int]) -> Tensor:
    """Each row's `first_counts` entries followed by its `second_counts` ones, zeros on the right."""
    if not any(first_counts):
        return second
    pairs = list(zip(first_counts, second_counts, strict=True))
    joined = first.new_zeros(len(pairs), max(a + b for a, b in pairs), *first.shape[2:])
    for row, (a, b) in enumerate(pairs):
        joined[row, :a], joined[row, a : a + b] = first[row, :a], second[row, :b]
    return joined
