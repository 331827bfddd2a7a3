"""Every draft algorithm by name: its options, how a fresh one is made, how a saved one is loaded."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from deepspec.drafts.contract import Drafter, TrainableDraft
from deepspec.drafts.eagle3 import Eagle3Draft, Eagle3Options
from deepspec.drafts.ngram import NgramDraft, NgramOptions
from deepspec.errors import UserError

DRAFTS: dict[str, tuple[type[Any], type[Any]]] = {"eagle3": (Eagle3Options, Eagle3Draft)}
UNTRAINED: dict[str, tuple[type[Any], type[Any]]] = {"ngram": (NgramOptions, NgramDraft)}


def option_classes() -> dict[str, type[Any]]:
    """Algorithm name → the dataclass of its hyper-parameters."""
    return {name: options for name, (options, _) in (DRAFTS | UNTRAINED).items()}


def untrained_draft(options: Any) -> Drafter | None:
    """The draft itself, where it has nothing to train; None for those that have."""
    return UNTRAINED[options.algorithm][1](options) if options.algorithm in UNTRAINED else None


def new_draft(options: Any, target: Any, target_ids: Tensor | None) -> TrainableDraft:
    """A fresh draft for `target`. target_ids: [Vd] ascending target ids, None = the whole vocabulary."""
    if options.algorithm in UNTRAINED:
        raise UserError(f"The draft {options.algorithm} has nothing to train; evaluate it as it is.")
    if options.algorithm not in DRAFTS:
        raise UserError(
            f"draft.algorithm is {options.algorithm!r}; it must be one of {', '.join(sorted(DRAFTS))}."
        )
    target.require("features")
    draft = DRAFTS[options.algorithm][1].from_target(options, target, target_ids)
    target.check_layers(draft.capture_layers)
    return draft


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
    classes = {draft.config_class.model_type: draft for _, draft in DRAFTS.values()}
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
