"""MTP in the words of speculators: one layer of Qwen3's kind, with embeddings and head of the target.

| ours | theirs, below `mtp_layers.0.` |
|---|---|
| `embedding_norm`, `hidden_norm` | `token_layernorm`, `hidden_layernorm` |
| `proj`, `norm` | `input_proj`, `final_layernorm` |
| `layers.0.*` | the same names without the prefix |
"""

from typing import Any

from torch import Tensor

from deepspec.drafts.contract import TrainableDraft
from deepspec.drafts.mtp import MtpConfig, MtpDraft
from deepspec.errors import UserError
from deepspec.interop.layout import (
    Checkpoint,
    Serving,
    draft_shape_of,
    exported_tensors,
    loaded,
    refuse,
    scaled_by,
    speculators_settings,
)
from deepspec.target import Target

LAYER = "mtp_layers.0."
THEIRS = {
    "embedding_norm.": f"{LAYER}token_layernorm.",
    "hidden_norm.": f"{LAYER}hidden_layernorm.",
    "proj.": f"{LAYER}input_proj.",
    "norm.": f"{LAYER}final_layernorm.",
    "layers.0.": LAYER,
}


def to_speculators(draft: MtpDraft, target: Target, serving: Serving) -> Checkpoint:
    """The layout of speculators 0.9 (`MTPDraftModel`). `UserError` for a draft that it cannot carry."""
    config = draft.config
    refuse(
        "Export it with format=hf, or train an EAGLE-3 (draft=eagle3)",
        (draft.target_ids is not None, "speculators' MTP has no reduced vocabulary (draft.vocab_size=null)"),
        (config.num_layers > 1, "speculators' MTP has one layer"),
        (not config.head_norms or config.attention_bias, "speculators' MTP is a layer of Qwen3's kind only"),
        (
            config.norm_input != "before",
            "speculators' MTP reads the hidden state before the target's final norm",
        ),
        scaled_by(target),
    )
    ours, notes = exported_tensors(draft)
    tensors = {_theirs(name): tensor for name, tensor in ours.items()}
    layers = target.num_layers  # speculators reads the id of the last hidden state from it
    settings = speculators_settings(
        "mtp", "MTPDraftModel", draft, target, serving, num_hidden_layers=layers
    ) | {"num_nextn_predict_layers": 1}
    return Checkpoint(settings, tensors, notes)


def from_speculators(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> TrainableDraft:
    """An MTP draft in the layout of speculators → ours, for `target`."""
    layer = config.get("transformer_layer_config") or {}
    if any(".experts." in name or ".linear_attn." in name for name in tensors):
        raise UserError(
            "The MTP layer has experts or linear attention; only a plain layer can be brought over."
        )
    shape = draft_shape_of(layer, target)
    ours = MtpConfig(
        capture_layers=[target.num_layers - 1],
        norm_input="before",
        head_norms=f"{LAYER}self_attn.q_norm.weight" in tensors,
        **shape,
    )
    return loaded(MtpDraft(ours), {_ours(name): t for name, t in tensors.items()}, "the draft")


def _theirs(name: str) -> str:
    return next((new + name.removeprefix(old) for old, new in THEIRS.items() if name.startswith(old)), name)


def _ours(name: str) -> str:
    back = {new: old for old, new in THEIRS.items()}  # the bare prefix of the layer stands last
    return next((old + name.removeprefix(new) for new, old in back.items() if name.startswith(new)), name)
