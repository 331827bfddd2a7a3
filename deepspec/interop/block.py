"""Block drafts, DFlash and DSpark, in other projects' words. The tensors of the backbone have our names everywhere.

What a block is: K + 1 slots, of which the anchor's own predicts nothing (DFlash), or K that all predict (DSpark).
speculators and vLLM: `sample_from_anchor` says which; embeddings and head lie beside, `d2t`/`t2d` if the vocabulary is
reduced. DFlash's authors, SpecForge and SGLang: neither, they are the target's. DeepSpec: DSpark only (its DFlash is
one without Markov head), five captured layers, the whole vocabulary. An open slot is a token everywhere.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepspec.drafts.contract import TrainableDraft
from deepspec.drafts.dflash import DFlashConfig, DFlashDraft
from deepspec.drafts.dspark import DSparkConfig, DSparkDraft
from deepspec.errors import UserError
from deepspec.interop.conversions import from_layer_inputs, to_layer_inputs, to_offsets, to_rope_fields
from deepspec.interop.layout import (
    CONFIDENCE,
    Checkpoint,
    Serving,
    bare_head,
    check_captured,
    check_embeddings,
    check_layers,
    draft_shape_of,
    embeddings,
    exported_tensors,
    frozen_head,
    llama_fields,
    loaded,
    mask_limit,
    refuse,
    scaled_by,
    speculators_settings,
    take_mask_token,
    take_vocabulary,
    tensors_with_head,
)
from deepspec.target import Target

Block = DFlashDraft | DSparkDraft
NEAREST = "Export it with format=speculators or format=hf"

# ---------------------------------------------------------------------- out


def to_speculators(draft: Block, target: Target, serving: Serving) -> Checkpoint:
    """The layout of speculators 0.9. `UserError` for a draft that it cannot carry."""
    config = draft.config
    check_layers(draft, target, "vLLM and speculators read the input of a layer")
    _check_backbone(draft)
    refuse("Export it with format=hf", scaled_by(target))
    own = draft.lm_head is not None and draft.target_ids is None
    refuse(
        "Train it with draft.head=frozen, or with a reduced draft.vocab_size",
        (own, "speculators puts the target's head in the place of the one that the draft has trained"),
    )
    tensors, _ = tensors_with_head(draft, target)
    vocab = {} if draft.target_ids is None else to_offsets(draft.target_ids, config.vocab_size)
    tensors |= {"embed_tokens.weight": embeddings(target).to(draft.dtype), **vocab}
    kind, architecture, heads, notes = "dflash", "DFlashSpeculator", {}, _left_behind(draft)
    if isinstance(draft, DSparkDraft):
        kind, architecture, heads = "dspark", "DSparkSpeculator", _heads(draft)
        tensors |= _confidence(draft)
    settings = speculators_settings(kind, architecture, draft, target, serving) | {
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "target_hidden_size": config.hidden_size,
        "block_size": config.block_tokens + draft.first_slot,
        "aux_hidden_state_layer_ids": to_layer_inputs(draft.capture_layers),
        "mask_token_id": config.mask_token,
        "sample_from_anchor": draft.first_slot == 0,
        "sliding_window_non_causal": True,  # vLLM takes it for all layers, of whatever kind
        **heads,
    }
    return Checkpoint(settings, tensors, notes)


def to_vllm(draft: Block, target: Target, serving: Serving) -> Checkpoint:
    """The layout of speculators, of which vLLM serves a part."""
    _check_markov(draft, "vLLM serves")
    return to_speculators(draft, target, serving)


def to_sglang(draft: Block, target: Target, serving: Serving) -> Checkpoint:
    """The layout of DFlash's authors and SpecForge, which SGLang serves. `UserError` for what it cannot carry."""
    config = draft.config
    check_layers(draft, target, "SGLang captures what enters the layer after")
    _check_backbone(draft)
    _check_markov(draft, "SGLang serves")
    refuse(
        NEAREST,
        (draft.target_ids is not None, "SGLang's block drafts have no reduced vocabulary"),
        scaled_by(target),
    )
    reason = "SGLang's block drafts use the target's head, and this one has trained its own"
    refuse("Train it with draft.head=frozen", (draft.lm_head is not None, reason))
    frozen_head(draft, target)  # the engine knows no other than the matrix
    tensors, _ = exported_tensors(draft)
    kept = {"mask_token_id": config.mask_token, "target_layer_ids": list(draft.capture_layers)}
    heads: dict[str, Any] = {}
    if isinstance(draft, DSparkDraft):
        tensors |= _confidence(draft)
        heads = _heads(draft)
    settings = {
        "architectures": ["DFlashDraftModel" if draft.first_slot else "DSparkDraftModel"],
        **llama_fields(draft, to_rope_fields(config.rope_parameters)),
        "layer_types": ["full_attention"] * config.num_layers,
        "block_size": config.block_tokens + draft.first_slot,
        "num_target_layers": target.num_layers,
        "dflash_config": kept | heads,
        **heads,
    }
    return Checkpoint(settings, tensors, _left_behind(draft))


def to_deepspec(draft: DSparkDraft, target: Target, serving: Serving) -> Checkpoint:
    """DeepSeek's DeepSpec. `UserError` for what it cannot carry."""
    config = draft.config
    _check_backbone(draft)
    reason = (
        f"DeepSpec's block drafts read exactly five captured layers, this one {len(config.capture_layers)}"
    )
    refuse(
        f"{NEAREST}, or train it with five draft.capture_layers",
        (len(config.capture_layers) != 5, reason),
    )
    refuse(NEAREST, (draft.target_ids is not None, "DeepSpec has no reduced vocabulary"))
    check_layers(draft, target, "DeepSpec captures it behind the final norm")
    tensors, _ = tensors_with_head(draft, target)
    tensors |= {"embed_tokens.weight": embeddings(target).to(draft.dtype), **_confidence(draft)}
    settings = target.config.to_dict() | llama_fields(
        draft, {"rope_parameters": dict(config.rope_parameters)}
    )
    settings |= {
        "architectures": ["Qwen3DSparkModel"],
        "layer_types": ["full_attention"] * config.num_layers,
        "num_target_layers": target.num_layers,
        "target_layer_ids": list(draft.capture_layers),
        "block_size": config.block_tokens,
        "mask_token_id": config.mask_token,
        "num_anchors": config.anchors or 512,
        **_heads(draft),
    }
    return Checkpoint(settings, tensors, [])


def dflash_to_deepspec(draft: DFlashDraft, target: Target, serving: Serving) -> Checkpoint:
    """`UserError`: DeepSpec's DFlash is another one."""
    raise UserError(
        "DeepSpec's DFlash predicts from the anchor's own slot, this one from the next on. Export it with format=vllm or "
        "format=sglang, or train draft=dspark with draft.rank=0, which is DeepSpec's."
    )


def _check_backbone(draft: Block) -> None:
    refuse("Train it with draft.mask_token=ID, or export it with format=hf", mask_limit(draft))
    refuse(
        "Train it with draft.head_norms=true, or export it with format=hf",
        (
            not draft.config.head_norms,
            "Every reader of block drafts normalises queries and keys, this one does not",
        ),
    )


def _check_markov(draft: Block, who: str) -> None:
    rnn = isinstance(draft, DSparkDraft) and draft.config.rank > 0 and draft.config.sequential == "rnn"
    refuse(
        "Train it with draft.sequential=markov, or export it with format=speculators or format=deepspec",
        (
            rnn,
            f"{who} the plain Markov head only, and this draft's remembers all tokens before (draft.sequential=rnn)",
        ),
    )


def _heads(draft: DSparkDraft) -> dict[str, Any]:
    config = draft.config
    return {
        "markov_rank": config.rank,
        "markov_head_type": "rnn" if config.sequential == "rnn" and config.rank else "vanilla",
        "enable_confidence_head": draft.confidence_head is not None,
        "confidence_head_with_markov": config.rank > 0,
    }


def _confidence(draft: DSparkDraft) -> dict[str, Tensor]:
    """Theirs has a constant, ours may."""
    if draft.confidence_head is None:
        return {}
    proj = draft.confidence_head.proj
    bias = proj.weight.new_zeros(1) if proj.bias is None else proj.bias
    named = {"weight": proj.weight, "bias": bias}
    return {f"confidence_head.proj.{name}": tensor.detach().cpu() for name, tensor in named.items()}


def _left_behind(draft: Block) -> list[str]:
    return [CONFIDENCE] if isinstance(draft, DFlashDraft) and draft.confidence_head is not None else []


# ---------------------------------------------------------------------- in


def from_speculators(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> TrainableDraft:
    """A DFlash or DSpark draft in the layout of speculators → ours, for `target`."""
    kind, layer = config["speculators_model_type"], config.get("transformer_layer_config") or {}
    every = config.get("sample_from_anchor")
    if every is None:
        every = kind == "dspark"
    markov = _markov(config) if kind == "dspark" else {"rank": 0}
    return _draft(
        layer,
        tensors,
        target,
        every_slot=bool(every),
        markov=markov,
        block_size=config["block_size"],
        mask_token=config.get("mask_token_id"),
        capture_layers=from_layer_inputs(config["aux_hidden_state_layer_ids"]),
    )


def from_authors(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> TrainableDraft:
    """A draft in the layout of DFlash's authors, SpecForge and SGLang → ours, for `target`."""
    inner = config.get("dflash_config") or {}
    both = {**config, **inner}  # newer checkpoints have everything of a block in `dflash_config`
    if (projector := both.get("projector_type")) not in (None, "dflash", "dspark"):
        raise UserError(
            f"The draft's projector_type is {projector!r}; only plain DFlash and DSpark are known here."
        )
    if both.get("input_embedding_scale") not in (None, 1, 1.0) or both.get("is_causal"):
        raise UserError(
            "The draft scales the embeddings or looks back only within its block (input_embedding_scale, is_causal); "
            "drafts here do neither."
        )
    dspark = (config.get("architectures") or [""])[0] == "DSparkDraftModel"
    return _draft(
        config,
        tensors,
        target,
        every_slot=dspark,
        markov=_markov(both) if dspark else {"rank": 0},
        block_size=both["block_size"],
        mask_token=both.get("mask_token_id"),
        capture_layers=both["target_layer_ids"],
    )


def from_deepspec(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> TrainableDraft:
    """A DSpark draft of DeepSeek's DeepSpec, or its DFlash → ours, for `target`."""
    return _draft(
        config,
        tensors,
        target,
        every_slot=True,
        markov=_markov(config),
        block_size=config["block_size"],
        mask_token=config["mask_token_id"],
        capture_layers=config["target_layer_ids"],
    )


def _markov(config: Mapping[str, Any]) -> dict[str, Any]:
    """rank and sequential of ours; `UserError` for a head that we do not have."""
    rank, kind = config.get("markov_rank") or 0, config.get("markov_head_type") or "vanilla"
    if rank and kind not in ("vanilla", "rnn"):
        raise UserError(f"The draft's Markov head is {kind!r}; vanilla and rnn are known here.")
    return {"rank": rank, "sequential": "rnn" if kind == "rnn" else "markov"}


def _draft(
    layer: Mapping[str, Any],
    tensors: dict[str, Tensor],
    target: Target,
    *,
    every_slot: bool,
    markov: dict[str, Any],
    block_size: int,
    mask_token: int | None,
    capture_layers: list[int],
) -> TrainableDraft:
    """every_slot: the anchor's own predicts too. markov: rank and sequential."""
    if not every_slot and markov["rank"]:
        raise UserError(
            "The draft has a Markov head, and its anchor's slot predicts nothing; only one that does is known."
        )
    check_captured(capture_layers, target)
    if target.num_layers - 1 in capture_layers:
        raise UserError(
            f"The draft reads the target's last hidden state (layer {target.num_layers - 1}), which other projects take "
            "behind the final norm and drafts here before it."
        )
    tensors = dict(tensors)
    check_embeddings(tensors, target)
    ids = take_vocabulary(tensors, target)
    _drop_targets_head(tensors, ids, target)
    shared = {
        "draft_vocab_size": None if ids is None else len(ids),
        "capture_layers": list(capture_layers),
        "num_layers": layer.get("num_hidden_layers") or 1,
        "head": "trained" if "lm_head.weight" in tensors else "frozen",
        "mask_token": take_mask_token(mask_token, target),
        "head_norms": "layers.0.self_attn.q_norm.weight" in tensors,
        **_confidence_of(tensors, markov["rank"]),
        **draft_shape_of(layer, target),
    }
    if every_slot:
        made: Block = DSparkDraft(DSparkConfig(block_tokens=block_size, **markov, **shared))
    else:
        made = DFlashDraft(DFlashConfig(block_tokens=block_size - 1, **shared))
    return loaded(made, tensors, "the draft")


def _drop_targets_head(tensors: dict[str, Tensor], ids: Tensor | None, target: Target) -> None:
    """A head that is the target's own (rounded, it may be) is not kept a second time."""
    head, rows = tensors.get("lm_head.weight"), bare_head(target, ids)
    if head is not None and rows is not None and torch.equal(head, rows.to(head.dtype)):
        del tensors["lm_head.weight"]


def _confidence_of(tensors: dict[str, Tensor], rank: int) -> dict[str, bool]:
    """Whether there is a confidence head, and a constant in it; one that does not see the token before is widened."""
    weight = tensors.get("confidence_head.proj.weight")
    if weight is None:
        return {"confidence": False}
    hidden = tensors["norm.weight"].shape[0]
    if weight.shape[1] == hidden:
        tensors["confidence_head.proj.weight"] = torch.nn.functional.pad(weight, (0, rank))
    return {"confidence": True, "confidence_bias": "confidence_head.proj.bias" in tensors}
