"""A trained draft, read back from the folder that training (or an import) wrote."""

import json
from pathlib import Path

from safetensors import SafetensorError

from deepspec.drafts.contract import TrainableDraft
from deepspec.drafts.registry import draft_classes
from deepspec.errors import UserError


def load_draft(folder: Path) -> TrainableDraft:
    """A draft saved by `save_pretrained`. Missing or unexpected tensors are errors, never filled in silently."""
    config = folder / "config.json"
    if not config.is_file():
        raise UserError(
            f"{folder} holds no draft (no config.json). Give the folder that deepspec.train wrote."
        )
    try:
        kind = json.loads(config.read_text(encoding="utf-8")).get("model_type")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{config} is damaged ({error}). Train or export the draft again.") from error
    classes = draft_classes()
    if kind not in classes:
        raise UserError(
            f"{config}: model_type {kind!r} is not a draft of deepspec ({', '.join(sorted(classes))})."
        )
    try:
        draft, loaded = classes[kind].from_pretrained(folder, output_loading_info=True)
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise UserError(
            f"The draft in {folder} could not be loaded: {' '.join(str(error).split())[:300]}"
        ) from error
    wrong = {
        key: sorted(loaded.get(key) or []) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
    }
    if any(wrong.values()):
        raise UserError(
            f"The draft in {folder} does not fit its own config: {wrong}. Train or export it again."
        )
    return draft.eval()
