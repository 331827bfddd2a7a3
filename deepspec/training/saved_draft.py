"""A trained draft, read back from the folder that training (or an import) wrote, or another one started from it."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from deepspec.drafts.contract import TrainableDraft
from deepspec.drafts.registry import draft_classes
from deepspec.errors import UserError

WEIGHTS = "model.safetensors"
# Of a draft's configuration: what decides how it learns, or where it comes from, but not what it computes.
FREE = {
    *("model_type", "architectures", "transformers_version", "dtype", "_name_or_path"),
    *("ttt_steps", "step_weights", "step_decay", "noise", "started_from", "init_from", "confidence"),
    *("gamma", "anchors", "keep_rows"),
}


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


def start_from(draft: TrainableDraft, folder: Path) -> TrainableDraft:
    """`draft` with the weights of a saved draft that computes the same, which its configuration notes.

    It is another object where the saved draft has settings that no option says (`TrainableDraft.inherited`).
    UserError for another family (unless `init_conversions` has it), other sizes or settings, another draft
    vocabulary, missing or unexpected tensors. Only a confidence head, and what a conversion names, may be new.
    """
    saved, what = load_draft(folder), f"draft.init_from={folder}"
    kind, mine = saved.config.model_type, draft.config.model_type
    conversion = draft.init_conversions.get(kind, () if kind == mine else None)
    if conversion is None:
        raise UserError(f"{what} is a {kind}, from which a {mine} cannot start.")
    draft = _like(saved, draft)
    theirs, ours = _flat(saved.config.to_dict()), _flat(draft.config.to_dict())
    differing = [
        key
        for key in sorted(theirs.keys() & ours.keys())
        if key.partition(".")[0] not in FREE and theirs[key] != ours[key]
    ]
    if differing:
        shown = "; ".join(f"{key} is {theirs[key]}, here {ours[key]}" for key in differing[:4])
        raise UserError(f"{what} is another draft than the one configured: {shown}.")
    given, wanted = saved.state_dict(), draft.state_dict()
    new = ("confidence_head.", *conversion)
    missing = sorted(name for name in wanted.keys() - given.keys() if not name.startswith(new))
    unexpected = sorted(given.keys() - wanted.keys())
    if missing or unexpected:
        raise UserError(
            f"{what} does not fit: missing tensors {missing[:4]}, unexpected ones {unexpected[:4]}."
        )
    if other := sorted(name for name in given if given[name].shape != wanted[name].shape):
        raise UserError(f"{what} does not fit: tensors of other shapes {other[:4]}.")
    ids = wanted.get("target_ids")
    if ids is not None and not torch.equal(given["target_ids"].to(ids.device), ids):
        raise UserError(
            f"{what} has a draft vocabulary of other tokens than the data: its head means other words. Use the data it "
            "was trained on, or start without it."
        )
    draft.load_state_dict(given, strict=False)
    draft.config.init_from = {"folder": str(folder), "model_type": kind, "sha256": weights_sha256(folder)}
    return draft


def _like(saved: TrainableDraft, draft: TrainableDraft) -> TrainableDraft:
    """`draft`, made again with the settings that it inherits where they differ."""
    theirs, ours = saved.config.to_dict(), draft.config.to_dict()
    taken = {
        key: theirs[key] for key in draft.inherited if key in theirs and theirs[key] != ours.get(key, False)
    }
    if not taken:
        return draft
    made = type(draft)(type(draft.config)(**(ours | taken)))
    fitting = made.state_dict()
    kept = {
        name: t
        for name, t in draft.state_dict().items()
        if name in fitting and fitting[name].shape == t.shape
    }
    made.load_state_dict(kept, strict=False)
    return made


def weights_sha256(folder: Path) -> str:
    """Of a saved draft's weights, shortened; `UserError` where there are none."""
    try:
        return hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise UserError(f"{folder} holds no draft ({error.strerror}: {WEIGHTS}).") from error


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found
