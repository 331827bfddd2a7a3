"""EAGLE-3 in other projects' words.

speculators and vLLM: our own tensor names, `layers.0.*`, with embeddings and `d2t`/`t2d` beside them.
SGLang and SafeAILab: the first layer is `midlayer.*`, no embeddings; whatever else it is called is passed over there.
DeepSpec (DeepSeek): five captured layers, head norms as in Qwen3, the whole vocabulary.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from deepspec.drafts.contract import TrainableDraft
from deepspec.drafts.eagle3 import Eagle3Draft
from deepspec.errors import UserError
from deepspec.interop.conversions import (
    from_layer_inputs,
    published_layers,
    to_layer_inputs,
    to_offsets,
    to_rope_fields,
)
from deepspec.interop.layout import (
    Checkpoint,
    Serving,
    check_captured,
    check_embeddings,
    check_layers,
    draft_shape_of,
    embeddings,
    llama_fields,
    loaded,
    refuse,
    scaled_by,
    speculators_settings,
    take_vocabulary,
    tensors_with_head,
)
from deepspec.target import Target

# ---------------------------------------------------------------------- out


def to_speculators(
    draft: Eagle3Draft,
    target: Target,
    serving: Serving,
    kind: str = "eagle3",
    architecture: str = "Eagle3Speculator",
) -> Checkpoint:
    """The layout of speculators 0.9, which vLLM serves. `UserError` for a draft that it cannot carry."""
    config = draft.config
    check_layers(draft, target, "vLLM and speculators read the input of a layer")
    tensors, notes = tensors_with_head(draft, target)
    vocab = {} if draft.target_ids is None else to_offsets(draft.target_ids, config.vocab_size)
    tensors |= {"embed_tokens.weight": embeddings(target).to(draft.dtype), **vocab}
    settings = speculators_settings(kind, architecture, draft, target, serving) | {
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_residual,
        "norm_before_fc": config.norm_features,
        "fc_norm": config.norm_layers,
        "norm_output": config.normalised_feedback,
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": to_layer_inputs(draft.capture_layers),
    }
    return Checkpoint(settings, tensors, notes)


def to_sglang(draft: Eagle3Draft, target: Target, serving: Serving) -> Checkpoint:
    """The layout of SGLang, which SafeAILab's own checkpoints share. `UserError` for what it cannot carry."""
    config = draft.config
    check_layers(draft, target, "SGLang captures what enters the layer after")
    refuse(
        "Export it with format=vllm",
        (config.num_layers > 1, "SGLang's loaders disagree on the second layer of an EAGLE-3 draft"),
        (
            config.norm_residual,
            "SGLang's EAGLE-3 has no residual stream that starts from the norm (norm_residual)",
        ),
        (config.norm_features, "SGLang's EAGLE-3 has no norm over all captured layers (norm_features)"),
        (_head_norms(draft), "SGLang's EAGLE-3 has no norms of queries and keys (Qwen3's)"),
        scaled_by(target),
    )
    tensors, notes = tensors_with_head(draft, target)
    vocab = {} if draft.target_ids is None else to_offsets(draft.target_ids, config.vocab_size)
    settings = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **llama_fields(draft, to_rope_fields(config.rope_parameters)),
        "torch_dtype": str(draft.dtype).removeprefix("torch."),
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "fc_norm": config.norm_layers,
        "norm_output": config.normalised_feedback,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(draft.capture_layers),
            "use_aux_hidden_state": True,
        },
    }
    return Checkpoint(settings, _renamed(tensors, "layers.0.", "midlayer.") | vocab, notes)


def to_deepspec(draft: Eagle3Draft, target: Target, serving: Serving) -> Checkpoint:
    """DeepSeek's DeepSpec. `UserError` for what it cannot carry, which is every EAGLE-3 trained here."""
    config = draft.config
    norms = config.norm_layers or config.normalised_feedback or config.norm_residual or config.norm_features
    refuse(
        "Export it with format=vllm or format=sglang",
        (
            not _head_norms(draft),
            "DeepSpec's EAGLE-3 normalises queries and keys (as Qwen3), this draft does not",
        ),
        (len(config.capture_layers) != 5, "DeepSpec's EAGLE-3 reads exactly five captured layers"),
        (config.num_layers > 1, "A further layer of DeepSpec's EAGLE-3 reads the embeddings again"),
        (draft.target_ids is not None, "DeepSpec has no reduced vocabulary"),
        (norms, "DeepSpec's EAGLE-3 has neither the norms of EAGLE-3.1 nor those of speculators"),
    )
    tensors, notes = tensors_with_head(draft, target)
    tensors["embed_tokens.weight"] = embeddings(target).to(draft.dtype)
    settings = target.config.to_dict() | llama_fields(
        draft, {"rope_parameters": dict(config.rope_parameters)}
    )
    settings |= {
        "architectures": ["Qwen3Eagle3Model"],
        "num_target_layers": target.num_layers,
        "draft_num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "target_layer_ids": list(draft.capture_layers),
        "target_model_name_or_path": serving.target,
        "ttt_length": config.ttt_steps,
        "step_loss_decay": config.step_decay,
    }
    return Checkpoint(settings, tensors, notes)


def _head_norms(draft: Eagle3Draft) -> bool:
    return bool(getattr(draft.config, "head_norms", False))


def _renamed(tensors: Mapping[str, Tensor], prefix: str, other: str) -> dict[str, Tensor]:
    return {
        other + name.removeprefix(prefix) if name.startswith(prefix) else name: t
        for name, t in tensors.items()
    }


# ---------------------------------------------------------------------- in


def from_speculators(
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    target: Target,
    kind: type[Eagle3Draft] = Eagle3Draft,
    **more: Any,
) -> TrainableDraft:
    """A draft in the layout of speculators → ours, for `target`. more: settings of a `kind` of EAGLE-3."""
    layer = config.get("transformer_layer_config") or {}
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    if "norm_before_residual" not in config:
        raise UserError(
            "The draft's config.json does not say norm_before_residual, on whose default the loaders disagree. Add it "
            "(true for most drafts that speculators trained, false for converted ones), and import it again."
        )
    return _draft(
        layer,
        tensors,
        target,
        kind,
        capture_layers=from_layer_inputs(ids) if ids else published_layers(target.num_layers),
        norm_residual=bool(config["norm_before_residual"]),
        norm_features=bool(config.get("norm_before_fc")),
        norm_layers=bool(config.get("fc_norm")),
        normalised_feedback=bool(config.get("norm_output")),
        **more,
    )


def from_sglang(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> TrainableDraft:
    """A draft in the layout of SafeAILab, SpecForge, AngelSlim and SGLang → ours, for `target`."""
    tensors = _renamed(_renamed(tensors, "model.", ""), "midlayer.", "layers.0.")
    legacy = {f"aux_norm_{name}.": f"fc_norm.{place}." for place, name in enumerate(("low", "mid", "high"))}
    for old, new in legacy.items():
        tensors = _renamed(tensors, old, new)
    ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if (config.get("num_hidden_layers") or 1) > 1:
        raise UserError(
            "The draft has more than one layer, on which SGLang's loaders disagree; only one is read."
        )
    return _draft(
        config,
        tensors,
        target,
        capture_layers=list(ids) if ids else published_layers(target.num_layers),
        norm_layers=bool(config.get("fc_norm") or config.get("use_aux_norm")),
        normalised_feedback=bool(config.get("norm_output")),
    )


def from_deepspec(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> TrainableDraft:
    """An EAGLE-3 draft of DeepSeek's DeepSpec → ours, for `target`."""
    if config.get("num_hidden_layers") != 1:
        raise UserError("A further layer of DeepSpec's EAGLE-3 reads the embeddings again; only one is read.")
    return _draft(
        config,
        tensors,
        target,
        capture_layers=config["target_layer_ids"],
        ttt_steps=config.get("ttt_length", 5),
        step_decay=config.get("step_loss_decay", 0.8),
    )


def _draft(
    layer: Mapping[str, Any],
    tensors: dict[str, Tensor],
    target: Target,
    kind: type[Eagle3Draft] = Eagle3Draft,
    **settings: Any,
) -> TrainableDraft:
    check_captured(settings["capture_layers"], target)
    shape = draft_shape_of(layer, target)
    tensors = dict(tensors)
    check_embeddings(tensors, target)
    ids = take_vocabulary(tensors, target)
    config = kind.config_class(
        draft_vocab_size=None if ids is None else len(ids),
        num_layers=layer.get("num_hidden_layers") or 1,
        head="trained" if "lm_head.weight" in tensors else "frozen",
        head_norms="layers.0.self_attn.q_norm.weight" in tensors,
        **settings,
        **shape,
    )
    return loaded(kind(config), tensors, "the draft")
