"""P-EAGLE in the words of speculators: its EAGLE-3 with a mask token and what stands in place of unknown features."""

from typing import Any

from torch import Tensor

from deepspec.drafts.contract import TrainableDraft
from deepspec.drafts.peagle import PEagleDraft
from deepspec.interop import eagle3
from deepspec.interop.layout import Checkpoint, Serving, mask_limit, refuse, take_mask_token
from deepspec.target import Target


def to_speculators(draft: PEagleDraft, target: Target, serving: Serving) -> Checkpoint:
    """The layout of speculators 0.9. `UserError` for a draft that it cannot carry."""
    refuse("Train it with draft.mask_token=ID, or export it with format=hf", mask_limit(draft))
    checkpoint = eagle3.to_speculators(draft, target, serving, "peagle", "PEagleSpeculator")
    checkpoint.config["mask_token_id"] = draft.config.mask_token
    checkpoint.tensors["mask_hidden"] = checkpoint.tensors["mask_hidden"][None, None]
    return checkpoint


def to_vllm(draft: PEagleDraft, target: Target, serving: Serving) -> Checkpoint:
    """The same, of which vLLM 0.32 does not carry over the norm of each captured layer."""
    reason = "vLLM's P-EAGLE has no norm of each captured layer (draft.norm_layers)"
    refuse("Train it without, or export it with format=speculators", (draft.config.norm_layers, reason))
    return to_speculators(draft, target, serving)


def from_speculators(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> TrainableDraft:
    """A P-EAGLE draft in the layout of speculators → ours, for `target`."""
    if "mask_hidden" in tensors:
        tensors = {**tensors, "mask_hidden": tensors["mask_hidden"].flatten()}
    mask_token = take_mask_token(config.get("mask_token_id"), target)
    return eagle3.from_speculators(config, tensors, target, PEagleDraft, mask_token=mask_token)
