"""EAGLE-3 in other projects' words.

speculators and vLLM: our own tensor names, `layers.0.*`, with embeddings and `d2t`/`t2d` beside them.
SGLang and SafeAILab: the first layer is `midlayer.*`, no embeddings; whatever else it is called is passed over there.
DeepSpec (DeepSeek): five captured layers, head norms as in Qwen3, the whole vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepspec.drafts.contract import TrainableDraft
from deepspec.drafts.eagle3 import Eagle3Config, Eagle3Draft
from deepspec.errors import UserError
from deepspec.interop.conversions import (
    from_layer_inputs,
    from_offsets,
    published_layers,
    to_layer_inputs,
    to_offsets,
    to_rope_fields,
)
from deepspec.interop.layout import (
    Checkpoint,
    Serving,
    check_embeddings,
    draft_shape_of,
    embeddings,
    exported_tensors,
    llama_fields,
    loaded,
    refuse,
    scaled_by,
    speculators_settings,
)
from deepspec.target import Target

# ---------------------------------------------------------------------- out


def to_speculators(draft: Eagle3Draft, target: Target, serving: Serving) -> Checkpoint:
    """The layout of speculators 0.9, which vLLM serves. `UserError` for a draft that it cannot carry."""
    config = draft.config
    _check_layers(draft, target, "vLLM and speculators read the input of a layer")
    tensors, notes = _tensors(draft, target)
    vocab = {} if draft.target_ids is None else to_offsets(draft.target_ids, config.vocab_size)
    tensors |= {"embed_tokens.weight": embeddings(target).to(draft.dtype), **vocab}
    settings = speculators_settings("eagle3", "Eagle3Speculator", draft, target, serving) | {
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
    _check_layers(draft, target, "SGLang captures what enters the layer after")
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
    tensors, notes = _tensors(draft, target)
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
    tensors, notes = _tensors(draft, target)
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


def _check_layers(draft: Eagle3Draft, target: Target, why: str) -> None:
    last = target.num_layers - 1
    reason = (
        f"The draft reads the output of the target's last layer ({last}): {why}, and there is none behind it"
    )
    refuse(
        "Train it with other draft.capture_layers (null takes a low, a middle and a high one)",
        (last in draft.capture_layers, reason),
    )


def _head_norms(draft: Eagle3Draft) -> bool:
    return bool(getattr(draft.config, "head_norms", False))


def _tensors(draft: Eagle3Draft, target: Target) -> tuple[dict[str, Tensor], list[str]]:
    """With a head in any case: a frozen one is the target's rows."""
    tensors, notes = exported_tensors(draft)
    if draft.lm_head is None:
        tensors["lm_head.weight"] = _frozen_head(draft, target).to(draft.dtype)
    return tensors, notes


def _frozen_head(draft: Eagle3Draft, target: Target) -> Tensor:
    """The target's head as the matrix that formats carry; `UserError` where it does more than multiply by one."""
    weight = target.model.get_output_embeddings().weight
    rows = weight if draft.target_ids is None else weight[draft.target_ids.to(weight.device)]
    # large enough to feel a soft cap
    probe = torch.linspace(-16, 16, target.hidden_size, dtype=target.dtype, device=target.device)[None]
    plain = (probe @ rows.T).float()
    bare = (target.head(probe, draft.target_ids).float() - plain).norm() <= 2e-2 * plain.norm()
    reason = f"The draft uses the head of {target.name} (draft.head=frozen), which scales, shifts or caps its logits"
    refuse("The format has only a matrix. Train it with draft.head=trained", (not bool(bare), reason))
    return rows.detach().cpu()


def _renamed(tensors: Mapping[str, Tensor], prefix: str, other: str) -> dict[str, Tensor]:
    return {
        other + name.removeprefix(prefix) if name.startswith(prefix) else name: t
        for name, t in tensors.items()
    }


# ---------------------------------------------------------------------- in


def from_speculators(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> TrainableDraft:
    """A draft in the layout of speculators → ours, for `target`."""
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
        capture_layers=from_layer_inputs(ids) if ids else published_layers(target.num_layers),
        norm_residual=bool(config["norm_before_residual"]),
        norm_features=bool(config.get("norm_before_fc")),
        norm_layers=bool(config.get("fc_norm")),
        normalised_feedback=bool(config.get("norm_output")),
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
    layer: Mapping[str, Any], tensors: dict[str, Tensor], target: Target, **settings: Any
) -> TrainableDraft:
    layers = settings["capture_layers"]
    if layers != sorted(set(layers)):
        raise UserError(f"The draft reads the layers {layers}; only ascending ones are known here.")
    target.check_layers(layers)
    shape = draft_shape_of(layer, target)
    tensors = dict(tensors)
    check_embeddings(tensors, target)
    head = tensors.get("lm_head.weight")
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    ids = None
    if head is not None:
        if d2t is not None:
            ids = from_offsets(d2t, t2d, len(head), target.vocab_size)
        elif len(head) >= target.vocab_size:
            tensors["lm_head.weight"] = head[: target.vocab_size]  # rows behind it are padding
        else:
            raise UserError(
                f"The draft's head has {len(head)} rows and there is no d2t to say of which tokens."
            )
    if ids is not None:
        tensors["target_ids"] = ids
    config = Eagle3Config(
        draft_vocab_size=None if ids is None else len(ids),
        num_layers=layer.get("num_hidden_layers") or 1,
        head="frozen" if head is None else "trained",
        head_norms="layers.0.self_attn.q_norm.weight" in tensors,
        **settings,
        **shape,
    )
    return loaded(Eagle3Draft(config), tensors, "the draft")
