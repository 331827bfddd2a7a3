"""What storing costs in accuracy, measured in seconds before hours of capture; and the rows that calibrate a format."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepspec.errors import UserError
from deepspec.target.features.documents import columns, needed, spans, teachers
from deepspec.target.features.writer import Recipe, Rows

CALIBRATION_ROWS, GATE_ROWS = 32, 64
CROP = 128  # tokens of each such row
TEACHERS = 1024  # positions whose logits are compared


@dataclass(frozen=True)
class Sample:
    """hidden: [N, L+1, H] of the captured layers and the last hidden state, at positions a draft can learn from, on
    the target's device. teacher: [N] bool, the last hidden state is a teacher there."""

    hidden: Tensor
    teacher: Tensor
    rows: int


@torch.no_grad()
def sample(target: Any, rows: Rows, layers: Sequence[int], count: int, batch_size: int) -> Sample:
    """Up to `count` rows at even distances, `CROP` tokens of each from its first supervised document on."""
    count = min(count, len(rows))
    cropped = [one for index in range(count) if (one := _crop(rows[index * len(rows) // count])) is not None]
    hidden, teacher = [], []
    for first in range(0, len(cropped), batch_size):
        part = cropped[first : first + batch_size]
        batch = columns(part)
        where = (x.to(target.device) for x in (batch.tokens, batch.positions, batch.documents))
        captured = target.capture(*where, list(layers))
        wide = torch.cat([captured.features, captured.last_hidden], -1).unflatten(-1, (len(layers) + 1, -1))
        for number, row in enumerate(part):
            for span in spans(number, row["tokens"], row["loss_mask"], row["documents"]):
                at = np.flatnonzero(needed(span.loss_mask, None))
                hidden.append(wide[number, torch.from_numpy(at + span.start).to(target.device)])
                teacher.append(torch.from_numpy(teachers(span.loss_mask)[at]))
    if not hidden:
        raise UserError("No row has a supervised token (every loss_mask is 0): there is nothing to capture.")
    return Sample(torch.cat(hidden), torch.cat(teacher).to(target.device), len(cropped))


def _crop(row: Any) -> dict[str, Any] | None:
    """The row from the start of its first supervised document on; None if nothing is supervised in it."""
    mask, documents = np.asarray(row["loss_mask"]).astype(bool), np.asarray(row["documents"])
    if not mask.any():
        return None
    first = int(np.argmax(documents == documents[int(np.argmax(mask))]))
    last = int(np.argmax(mask))
    first = max(first, last - CROP // 2) if last - first >= CROP else first
    names = ("tokens", "loss_mask", "documents", "positions")
    return {name: torch.as_tensor(row[name])[first : first + CROP] for name in names}


@torch.no_grad()
def measured(target: Any, recipe: Recipe, found: Sample) -> dict[str, Any]:
    """Stored and read back against the target's own: errors by layer, and what becomes of the teacher's logits.

    relative_error: ‖x̂ − x‖ / ‖x‖ over the whole layer; relative_error_of_channels: the median over channels of the
    same, which a few large channels cannot hide. kl: mean KL(p ‖ p̂) in nats; top1: how often both say the same token.
    """
    layers = [*map(str, recipe.layers), "last"]
    back = _back(recipe, found.hidden)
    by_layer = {}
    for index, layer in enumerate(layers):
        real, other = found.hidden[:, index].float(), back[:, index].float()
        channel = (other - real).norm(dim=0) / real.norm(dim=0).clamp(min=1e-30)
        by_layer[layer] = {
            "relative_error": ((other - real).norm() / real.norm().clamp(min=1e-30)).item(),
            "relative_error_of_channels": channel.median().item(),
        }
    at = found.teacher.nonzero()[:, 0]
    at = at[torch.linspace(0, len(at) - 1, min(len(at), TEACHERS), device=at.device).long()]
    said = target.logits(found.hidden[at, -1]).float().log_softmax(-1)
    kept = target.logits(back[at, -1]).float().log_softmax(-1)
    divergence = (said.exp() * (said - kept)).nan_to_num(0.0).sum(-1)
    return {
        "rows": found.rows,
        "positions": len(found.hidden),
        "teacher_positions": len(at),
        "kl": divergence.mean().item(),
        "kl_largest": divergence.max().item(),
        "top1_agreement": (said.argmax(-1) == kept.argmax(-1)).float().mean().item(),
        "layers": by_layer,
    }


def _back(recipe: Recipe, hidden: Tensor) -> Tensor:
    """[N, L+1, H] through the store's format and back; the last hidden state as it is stored."""

    def through(part: str, states: Tensor) -> Tensor:
        codec = recipe.codec_of(part)
        return codec.decode(codec.encode(states), states.dtype)

    kept = through("features", hidden[:, :-1]) if recipe.layers else hidden[:, :0]
    # the last layer is the last of the captured ones where it is not stored by itself
    return torch.cat([kept, through("last", hidden[:, -1:]) if recipe.last else kept[:, -1:]], 1)


def summary(quality: dict[str, Any], format: str) -> str:
    """One line for people."""
    errors = ", ".join(
        f"{name} {100 * one['relative_error']:.2f}%" for name, one in quality["layers"].items()
    )
    return (
        f"features {format}: relative error by layer {errors}; teacher KL {quality['kl']:.1e} nats (largest "
        f"{quality['kl_largest']:.1e}), top-1 agreement {100 * quality['top1_agreement']:.1f}% at "
        f"{quality['teacher_positions']} positions of {quality['rows']} rows"
    )
