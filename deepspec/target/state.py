"""A model's key–value state with a length per row, trees, and rollback: the only file that knows a cache's inside.

Target and drafts use the same class. Buffers are preallocated, so memory does not grow with the number of
rounds: forgetting is a smaller length, keeping a path through a tree is a gather into the same storage.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from deepspec.target.layout import Layout

SLACK = 64  # columns added when a buffer must grow, so that it does not grow every round


class _Layer(CacheLayerMixin):
    """One attention layer's keys and values, [rows, heads, capacity, dim], written where the state's plan says."""

    keys: Any  # Tensor once initialised; the library's annotation allows None everywhere
    values: Any

    def __init__(self, state: "State") -> None:
        super().__init__()
        # Weak: a cycle would keep buffers of hundreds of MB alive until the garbage collector comes round.
        self._state = weakref.ref(state)

    @property
    def state(self) -> "State":
        state = self._state()
        if state is None:
            raise RuntimeError("The state of these buffers is gone.")
        return state

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = self._buffer(key_states)
        self.values = self._buffer(value_states)
        self.is_initialized = True

    def _buffer(self, like: Tensor) -> Tensor:
        # Zeros, not empty: a masked column still enters the weighted sum as 0 · value, which must be finite.
        _, heads, _, dim = like.shape
        return like.new_zeros(self.state.max_rows, heads, self.state.capacity, dim)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.ensure_columns(self.state.capacity)
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _write(self, buffer: Tensor, new: Tensor) -> Tensor:
        rows, _, count, _ = new.shape
        start, slots = self.state.start, self.state.slots
        if slots is None:
            buffer[:rows, :, start : start + count] = new
        else:
            index = torch.arange(rows, device=new.device)[:, None]
            buffer[index, :, slots.to(new.device)] = new.transpose(1, 2)
        return buffer[:rows, :, : self.state.width]

    def ensure_columns(self, capacity: int) -> None:
        if self.is_initialized and self.keys.shape[2] < capacity:
            self.keys, self.values = (self._grown(buffer, capacity) for buffer in (self.keys, self.values))

    @staticmethod
    def _grown(buffer: Tensor, capacity: int) -> Tensor:
        rows, heads, columns, dim = buffer.shape
        grown = buffer.new_zeros(rows, heads, capacity, dim)
        grown[:, :, :columns] = buffer
        return grown

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.state.width, 0

    def get_seq_length(self) -> int:
        return max(self.state.lengths, default=0)

    def get_max_length(self) -> int:
        return -1


class State(Cache):
    """Keys and values of `rows` texts of different lengths.

    lengths: cached tokens a row, Python ints (reading them never waits for the device). `plan(layout)` before
    a forward says where its tokens go; `keep` afterwards says which of them stay.
    """

    def __init__(self, num_layers: int, max_rows: int, capacity: int, rows: int = 1) -> None:
        self.max_rows = max_rows
        self.capacity = capacity
        self.lengths = [0] * rows
        self.start = 0
        self.slots: Tensor | None = None
        self.width = 0
        self.buffers = [_Layer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self.buffers))

    @property
    def rows(self) -> int:
        return len(self.lengths)

    def plan(self, layout: Layout) -> None:
        """Point the next forward's writes behind each row's cached tokens."""
        self.width = layout.width
        if self.width > self.capacity:
            self.capacity = self.width + SLACK
        count = layout.positions.shape[1]
        # A start is a Python number, for which a compiled forward would be compiled anew every round.
        if len(set(layout.lengths)) == 1 and not layout.least_width:
            self.start, self.slots = layout.lengths[0] + layout.written, None
        else:
            device = layout.positions.device
            starts = torch.tensor(layout.lengths, device=device) + layout.written
            self.start, self.slots = 0, starts[:, None] + torch.arange(count, device=device)

    def keep(self, counts: Sequence[int], path: Tensor | None = None) -> None:
        """Keep `counts[b]` of the tokens the last forward wrote in row b; the others are forgotten.

        path: [B, M] int64, which of the written tokens (in order) stay, left-aligned and padded with any valid
        index; None = the first ones.
        """
        if path is not None:
            rows = torch.arange(self.rows, device=path.device)[:, None]
            starts = torch.tensor(self.lengths, device=path.device)[:, None]
            source, goal = starts + path, starts + torch.arange(path.shape[1], device=path.device)
            for buffer in self._buffers():
                row, to, of = (index.to(buffer.device) for index in (rows, goal, source))
                buffer[row, :, to] = buffer[row, :, of]
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget every row's tokens past `lengths[b]`."""
        self.lengths = list(lengths)

    def append(self, other: "State") -> None:
        """Add a one-row state as the last row, copied into this state's storage."""
        row = self.rows
        self.capacity = max(self.capacity, other.lengths[0])
        for mine, theirs in zip(self.buffers, other.buffers, strict=True):
            if not theirs.is_initialized:
                continue  # nothing was ever written there
            if not mine.is_initialized:
                mine.lazy_initialization(theirs.keys, theirs.values)
            mine.ensure_columns(self.capacity)
            length = other.lengths[0]
            for to, source in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
                to[
                    row
                ].zero_()  # what an earlier request left there must not reach the sum, not even as 0 · NaN
                to[row, :, :length] = source[0, :, :length]
        self.lengths.append(other.lengths[0])

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows (ascending), moved to the front of the same storage."""
        for to, source in enumerate(rows):
            if to != source:
                for buffer in self._buffers():
                    buffer[to] = buffer[source]
        self.lengths = [self.lengths[row] for row in rows]

    def _buffers(self) -> list[Tensor]:
        return [
            buffer for layer in self.buffers if layer.is_initialized for buffer in (layer.keys, layer.values)
        ]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.lengths, default=0)
