"""How large target and draft are, from their configurations."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from deepspec.config.schema import Config
from deepspec.drafts.registry import new_draft
from deepspec.target import Target
from deepspec.target.outline import Outline, Parameters, cached_bytes

BITS = {
    "fp8": 8,
    "finegrained_fp8": 8,
    "compressed-tensors": 8,
    "mxfp4": 4,
}  # of weights, where not told otherwise


@dataclass(frozen=True)
class TargetSizes:
    """weights, edges: bytes. cached: bytes of keys and values a token. itemsize: bytes of an activation. attended:
    width of all queries, keys and values of a layer together. inner: width of a layer's feed-forward part."""

    parameters: Parameters
    weights: int
    edges: int
    cached: int
    itemsize: int
    hidden: int
    layers: int
    vocab: int
    inner: int
    attended: int


@dataclass(frozen=True)
class DraftSizes:
    """trained: parameters that learn. saved: bytes of its weights file. one_pass: all tokens of a chain in one
    forward."""

    parameters: int
    trained: int
    saved: int
    capture_layers: list[int]
    reach: int | None
    one_pass: bool


def target_sizes(outline: Outline) -> TargetSizes:
    config, counted = outline.config, outline.parameters()
    itemsize = torch.empty(0, dtype=outline.dtype).element_size()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    inner = max(
        getattr(config, "intermediate_size", None) or 0, getattr(config, "moe_intermediate_size", None) or 0
    )
    return TargetSizes(
        parameters=counted,
        weights=round(counted.total * _weight_bytes(outline, itemsize)),
        edges=counted.edges * itemsize,  # quantised checkpoints leave embedding and head as they are
        cached=cached_bytes(config, itemsize),
        itemsize=itemsize,
        hidden=outline.hidden_size,
        layers=outline.num_layers,
        vocab=outline.vocab_size,
        inner=inner or 4 * outline.hidden_size,
        attended=(heads + 2 * kv_heads) * width,
    )


def _weight_bytes(outline: Outline, itemsize: int) -> float:
    """Of one parameter, scales of quantised ones left out."""
    asked = getattr(outline.model.config, "quantization_config", None)
    if asked is None:
        return itemsize
    settings = asked if isinstance(asked, dict) else asked.to_dict()
    bits = settings.get("bits") or BITS.get(str(settings.get("quant_method")))
    if settings.get("load_in_4bit"):
        bits = 4
    return bits / 8 if bits else itemsize


def draft_sizes(options: Any, outline: Target) -> DraftSizes:
    """Of the draft that training would start with, made without numbers."""
    size = getattr(options, "vocab_size", None)
    if options.algorithm != "standalone":
        options = _from_noise(options)
    named = options.algorithm == "standalone" and options.start not in ("target", "random")
    with (
        nullcontext() if named else torch.device("meta")
    ):  # a model with a name is small, and read from its folder
        draft = new_draft(options, outline, None if size is None else torch.arange(size))
    return DraftSizes(
        parameters=sum(one.numel() for one in draft.parameters()),
        trained=sum(one.numel() for one in draft.parameters() if one.requires_grad),
        saved=sum(one.numel() * one.element_size() for one in draft.state_dict().values()),
        capture_layers=list(draft.capture_layers),
        reach=draft.feature_reach,
        one_pass=draft.one_pass,
    )


def _from_noise(options: Any) -> Any:
    """The same sizes without a look at weights."""
    return replace(options, start="random") if hasattr(options, "start") else options


def processes_of(config: Config, devices: int) -> int:
    """Processes that train: one a device, unless training is told to be single."""
    return 1 if config.train.parallel.value == "single" else devices
