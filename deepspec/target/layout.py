"""Where a forward's tokens stand: positions, cache slots, and who sees whom."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Layout:
    """T new tokens for each of B rows, on top of `lengths[b]` cached ones.

    lengths: cached tokens a row (Python ints). positions: [B, T] int64. visible: [T, C] or [B, T, C] bool,
    which of the new tokens (columns) each new token (rows) may look at, itself included.
    Cached tokens stand at positions 0..length−1, left-aligned, and every new token sees them all (sliding
    layers: those inside the window).
    C = T, unless a tree grows level by level: then the first C − T columns are nodes that earlier forwards have
    written behind the cached tokens, and `columns` [B, C] has the positions of all.
    least_width: the attention reads at least so many columns, those behind the new tokens masked, so that its
    shape can stay the same from round to round. wide: the attention computes in float64, in which the order of
    its sums leaves no trace in a narrower result (`attention.grouped_sdpa`).
    """

    lengths: list[int]
    positions: Tensor
    visible: Tensor
    columns: Tensor | None = None
    least_width: int = 0
    wide: bool = False

    @property
    def written(self) -> int:
        """Nodes that earlier forwards have written behind the cached tokens."""
        return self.visible.shape[-1] - self.positions.shape[1]

    @property
    def width(self) -> int:
        """Columns of the attention: the longest row's cached tokens and the new ones, or `least_width`."""
        return max(self.least_width, max(self.lengths) + self.visible.shape[-1])


def chain(lengths: list[int], count: int, device: torch.device) -> Layout:
    """Each row's next `count` tokens, one after another."""
    steps = torch.arange(count, device=device)
    starts = torch.tensor(lengths, device=device)
    return Layout(lengths, starts[:, None] + steps, steps[:, None] >= steps)


def tree(lengths: list[int], parents: Tensor) -> Layout:
    """The pending token and a tree of drafted ones below it.

    parents: [B, N] int64, −1 = child of the pending token; topological order. New token 0 is the pending
    token, new token i+1 is node i; a node sees the pending token, its ancestors and itself, and stands at the
    position its depth gives.
    """
    rows, nodes = parents.shape
    reach = torch.eye(nodes + 1, device=parents.device).repeat(rows, 1, 1)
    reach[:, 1:].scatter_(2, (parents + 1)[..., None], 1.0)
    # Each squaring doubles the number of generations seen: a few small products, not one step a node.
    for _ in range(nodes.bit_length()):
        reach = (reach @ reach).clamp(max=1)
    visible = reach > 0
    depth = visible.sum(-1) - 1
    starts = torch.tensor(lengths, device=parents.device)
    return Layout(lengths, starts[:, None] + depth, visible)


def additive_mask(layout: Layout, dtype: torch.dtype, window: int | None = None) -> Tensor:
    """[B, 1, T, W] float: 0 where a token may look, the dtype's minimum elsewhere (W = `layout.width`).

    New token i of row b lies in column lengths[b] + i. With `window`, only columns whose position is less
    than `window` before the token's own.
    """
    new_positions = layout.positions if layout.columns is None else layout.columns
    (rows, tokens), count = layout.positions.shape, new_positions.shape[1]
    device = layout.positions.device
    columns = torch.arange(layout.width, device=device)
    if len(set(layout.lengths)) == 1:  # every row starts at the same column: no gather needed
        start, end = layout.lengths[0], layout.lengths[0] + count
        allowed = torch.ones(rows, tokens, layout.width, dtype=torch.bool, device=device)
        allowed[:, :, start:end] = layout.visible
        allowed[:, :, end:] = False
        column_positions = columns.repeat(rows, 1)
        column_positions[:, start:end] = new_positions
    else:
        starts = torch.tensor(layout.lengths, device=device)
        new = columns[None, :] - starts[:, None]  # [B, W] which new token a column holds; negative = cached
        index = new.clamp(0, count - 1)
        visible = layout.visible.expand(rows, tokens, count)
        fresh = torch.gather(visible, 2, index[:, None, :].expand(rows, tokens, layout.width))
        inside = (new < count)[:, None, :]
        allowed = torch.where((new < 0)[:, None, :], torch.ones_like(fresh), fresh & inside)
        column_positions = torch.where(new < 0, columns[None, :], torch.gather(new_positions, 1, index))
    if window is not None:
        allowed &= layout.positions[:, :, None] - column_positions[:, None, :] < window
    return _to_additive(allowed, dtype)


def document_mask(
    documents: Tensor, positions: Tensor, dtype: torch.dtype, window: int | None = None
) -> Tensor:
    """[B, 1, T, T] float for packed rows: causal inside each document, nothing across.

    documents, positions: [B, T] int64. Padding (document −1) sees itself alone, so no row is all masked.
    """
    same = (documents[:, :, None] == documents[:, None, :]) & (documents >= 0)[:, :, None]
    distance = positions[:, :, None] - positions[:, None, :]
    allowed = same & (distance >= 0)
    if window is not None:
        allowed &= distance < window
    allowed |= torch.eye(documents.shape[1], dtype=torch.bool, device=documents.device)
    return _to_additive(allowed, dtype)


def _to_additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    # The minimum and not −inf: a fully masked softmax row would be NaN, and 0·NaN is not 0.
    zero = torch.zeros((), dtype=dtype, device=allowed.device)
    lowest = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=allowed.device)
    return torch.where(allowed, zero, lowest)[:, None]
