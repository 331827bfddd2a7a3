"""Which hidden state a target's own MTP module was trained on: implementations disagree, its loss does not."""

from collections.abc import Callable
from typing import Any

from accelerate import Accelerator

from deepspec.training.batches import Rows
from deepspec.training.held_out import HeldOut, evaluate_held_out
from deepspec.training.sources import FeatureSource

ROWS = 8


def settle_norm_input(
    draft: Any,
    rows: Rows,
    source: FeatureSource,
    accelerator: Accelerator,
    batch_size: int,
    say: Callable[[str], None],
) -> None:
    """`draft.norm_input=auto`: before or after the target's final norm, whichever gives the next tokens of some rows the
    lower cross-entropy; both stand in the draft's configuration afterwards. Collective."""
    if getattr(draft.config, "norm_input", None) != "auto":
        return
    draft.to(accelerator.device)
    found: dict[str, float] = {}
    for kind in ("before", "after"):
        draft.config.norm_input = kind
        how = HeldOut(ROWS, 1, 0.0, 0, batch_size)
        seen = evaluate_held_out(
            draft, rows, how, source=source, coefficients={"ce": 1.0}, accelerator=accelerator
        )
        found[kind] = float(seen["held_out_loss"])
    draft.config.norm_input = min(found, key=found.__getitem__)
    draft.config.norm_input_losses = found
    say(
        f"draft.norm_input={draft.config.norm_input}: cross-entropy {found['before']:.3f} from the hidden state before "
        f"the target's final norm, {found['after']:.3f} from behind it."
    )
