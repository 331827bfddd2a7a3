"""EAGLE (the first) in the words of SafeAILab, SGLang and vLLM.

`fc` with or without bias, `layers.{i}.*` without the first layer's input norm, the target's own head on the whole
vocabulary. SGLang and vLLM give it the target's embeddings where it brings none.
"""

from typing import Any

import torch
from torch import Tensor

from deepspec.drafts.contract import TrainableDraft
from deepspec.drafts.eagle import EagleConfig, EagleDraft
from deepspec.errors import UserError
from deepspec.interop.conversions import to_rope_fields
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
)
from deepspec.target import Target


def to_sglang(draft: EagleDraft, target: Target, serving: Serving) -> Checkpoint:
    """The layout of SGLang's `LlamaForCausalLMEagle`, which takes embeddings and head from the target."""
    refuse("Export it with format=vllm, which carries the scaled ones", scaled_by(target))
    return _published(draft, "LlamaForCausalLMEagle")


def to_vllm(draft: EagleDraft, target: Target, serving: Serving) -> Checkpoint:
    """The same tensors with embeddings, for vLLM's `EagleLlamaForCausalLM`."""
    checkpoint = _published(draft, "EagleLlamaForCausalLM")
    checkpoint.tensors["embed_tokens.weight"] = embeddings(target).to(draft.dtype)
    return checkpoint


def _published(draft: EagleDraft, architecture: str) -> Checkpoint:
    refuse(
        "Train it with draft.vocab_size=null, or an EAGLE-3 (draft=eagle3)",
        (
            draft.target_ids is not None,
            "EAGLE checkpoints have no reduced vocabulary: engines use the whole head",
        ),
    )
    tensors, notes = exported_tensors(draft)
    settings = {
        "architectures": [architecture],
        **llama_fields(draft, to_rope_fields(draft.config.rope_parameters)),
        "torch_dtype": str(draft.dtype).removeprefix("torch."),
        "bias": True,  # of `fc`
    }
    return Checkpoint(settings, tensors, notes)


def from_published(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> TrainableDraft:
    """An EAGLE draft in SafeAILab's layout → ours, for `target`; without a bias of `fc` it gets one of zeros."""
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    shape = draft_shape_of(config, target)
    check_embeddings(tensors, target)
    if head := [name for name in ("lm_head.weight", "d2t", "t2d") if name in tensors]:
        raise UserError(f"The draft brings {head[0]}; EAGLE drafts use the target's head on its vocabulary.")
    if "fc.weight" in tensors:
        rows = tensors["fc.weight"]
        tensors.setdefault("fc.bias", torch.zeros(len(rows), dtype=rows.dtype))
    ours = EagleConfig(
        capture_layers=[target.num_layers - 1],
        num_layers=config.get("num_hidden_layers") or 1,
        ttt_steps=1,
        **shape,
    )
    return loaded(EagleDraft(ours), tensors, "the draft")
