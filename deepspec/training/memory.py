"""Features of rows seen before, kept in memory while they fit: later epochs then need no target forward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

GIB = 1 << 30
HELD_OUT_SHARE = 0.2  # held-out rows are few, but met at every evaluation


@dataclass
class FeatureMemory:
    """Row number → (features, last_hidden) on the CPU, first come, until `gib` are used.

    Rows are captured one at a time, so that a row's features do not depend on the batch it was first met in:
    a resumed run, which meets rows in other batches, must go on with the same bits.
    """

    gib: float
    used: int = 0
    rows: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def get(self, row: int, length: int) -> tuple[Tensor, Tensor] | None:
        """[length, F] and [length, H] of a row, or None if it was not kept (or kept at another length)."""
        found = self.rows.get(row)
        return found if found is not None and len(found[0]) == length else None

    def offer(self, row: int, features: Tensor, last_hidden: Tensor) -> None:
        """Keep a row if there is room."""
        size = sum(x.numel() * x.element_size() for x in (features, last_hidden))
        if row not in self.rows and self.used + size <= self.gib * GIB:
            self.rows[row] = (features.cpu(), last_hidden.cpu())
            self.used += size


def split_budget(gib: float) -> tuple[FeatureMemory, FeatureMemory]:
    """Memories of the training rows and of the held-out rows, which have `gib` between them."""
    return FeatureMemory(gib * (1 - HELD_OUT_SHARE)), FeatureMemory(gib * HELD_OUT_SHARE)


def remembered(
    rows: Sequence[int],
    length: int,
    memory: FeatureMemory,
    device: torch.device,
    capture: Callable[[slice], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """[B, T, F] and [B, T, H] of a batch's rows on `device`; those that are not kept are captured, one at a time.

    capture: a slice of one row → its [1, T, F] and [1, T, H].
    """
    parts = []
    for index, row in enumerate(rows):
        kept = memory.get(row, length)
        if kept is None:
            features, hidden = capture(slice(index, index + 1))
            kept = (features[0], hidden[0])
            memory.offer(row, *kept)
        parts.append(kept)
    return stacked(parts, device)


def stacked(parts: list[tuple[Tensor, Tensor]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of one length → [B, T, F] and [B, T, H] on `device`."""
    features, hidden = zip(*parts, strict=True)
    return torch.stack(features).to(device), torch.stack(hidden).to(device)
