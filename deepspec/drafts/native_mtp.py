"""The multi-token-prediction module that a target's own checkpoint brings, as the start of an MTP draft.

transformers leaves these tensors out when it loads the target. Three published layouts are known; the module is the
first of its kind where a checkpoint has several:

    DeepSeek-V3, GLM-4.5   model.layers.<number of layers>.{enorm, hnorm, eh_proj, shared_head.norm, <a layer's>}
    MiMo                   model.mtp_layers.0.{token_layernorm, hidden_layernorm, input_proj, final_layernorm, ...},
                           whose projection reads the hidden state first, the embedding second
    Qwen3-Next, Qwen3.5    mtp.{pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm, layers.0.<a layer's>}

What the draft's layer has a place for is taken: all of a layer with grouped-query attention and one feed-forward part.
Latent attention, attention that rotates a part of each head only, gates, experts and quantised weights have none; that
part of the layer, or all of it, then starts from noise, and norms and projection alone are the target's. Embedding and
head of the module are the target's own in all of these.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspec.errors import UserError
from deepspec.target.stored import stored_tensors

PLAIN = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
)  # else a number means nothing without its scale
LAYER = (
    *("input_layernorm", "post_attention_layernorm"),
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("self_attn.q_norm", "self_attn.k_norm"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)


@dataclass(frozen=True)
class Layout:
    """prefix: of all its tensors; {} is the number of the target's layers. names: ours → theirs. layer: prefix of the
    decoder layer's behind it. hidden_first: the projection's halves stand the other way round."""

    prefix: str
    names: Mapping[str, str]
    layer: str = ""
    hidden_first: bool = False


LAYOUTS = (
    Layout(
        "model.layers.{}.",
        {"embedding_norm": "enorm", "hidden_norm": "hnorm", "proj": "eh_proj", "norm": "shared_head.norm"},
    ),
    Layout(
        "model.mtp_layers.0.",
        {
            "embedding_norm": "token_layernorm",
            "hidden_norm": "hidden_layernorm",
            "proj": "input_proj",
            "norm": "final_layernorm",
        },
        hidden_first=True,
    ),
    Layout(
        "mtp.",
        {
            "embedding_norm": "pre_fc_norm_embedding",
            "hidden_norm": "pre_fc_norm_hidden",
            "proj": "fc",
            "norm": "norm",
        },
        layer="layers.0.",
    ),
)


@torch.no_grad()
def native_start(draft: Any, target: Any) -> list[str]:
    """Copy the target's own module into a fresh MTP draft; names of the draft's tensors that were copied, and at the
    end, in parentheses, those of the checkpoint that had no place.

    `UserError` where the checkpoint has no such module, or one whose norms and projection are not the draft's.
    """
    path = str(target.model.name_or_path)
    revision = getattr(target.model.config, "_commit_hash", None)
    prefixes = [one.prefix.format(target.num_layers) for one in LAYOUTS]
    found = stored_tensors(path, revision, lambda name: name.startswith(tuple(prefixes)))
    for layout, prefix in zip(LAYOUTS, prefixes, strict=True):
        mine = {name.removeprefix(prefix): one for name, one in found.items() if name.startswith(prefix)}
        if f"{layout.names['proj']}.weight" in mine:
            return _taken(draft, target, layout, mine, path)
    raise UserError(
        f"draft.start=target: {path} has no multi-token-prediction weights (looked for {', '.join(prefixes)}). Use "
        "draft.start=random."
    )


def _taken(draft: Any, target: Any, layout: Layout, mine: dict[str, Tensor], path: str) -> list[str]:
    offset = _norm_offset(target)
    places = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in layout.names.items()}
    for part in LAYER:
        for kind in ("weight", "bias"):
            places[f"layers.0.{part}.{kind}"] = f"{layout.layer}{part}.{kind}"
    parameters = dict(draft.named_parameters())
    fits = {
        ours: mine[theirs]
        for ours, theirs in places.items()
        if ours in parameters and theirs in mine and mine[theirs].shape == parameters[ours].shape
        if mine[theirs].dtype in PLAIN
    }
    if missing := [ours for ours in layout.names if f"{ours}.weight" not in fits]:
        raise UserError(
            f"draft.start=target: {path}'s own {layout.names[missing[0]]} does not fit the draft's {missing[0]}. Use "
            "draft.start=random."
        )
    attention = [name for name in parameters if name.startswith("layers.0.self_attn.")]
    feed_forward = [name for name in parameters if name.startswith("layers.0.mlp.")]
    for whole in (attention, feed_forward):  # half of either would be no start
        if not all(name in fits for name in whole) or (whole is attention and _rotates_partly(target.config)):
            fits = {name: one for name, one in fits.items() if name not in whole}
    if not any(name in fits for name in (*attention, *feed_forward)):
        fits = {name: one for name, one in fits.items() if not name.startswith("layers.")}
    for ours, one in fits.items():
        value = one.to(parameters[ours].dtype)
        if ours.endswith("norm.weight"):
            value = value + offset
        if ours == "proj.weight" and layout.hidden_first:
            value = torch.cat(value.chunk(2, 1)[::-1], 1)
        parameters[ours].copy_(value)
    used = {places[ours] for ours in fits}
    left = sorted(name for name in mine if name not in used)
    return [*fits, *([f"({len(left)} without a place: {', '.join(left[:4])})"] if left else [])]


def _rotates_partly(config: Any) -> bool:
    """The draft rotates a head's whole width, whatever part of it the target does: such attention would be another."""
    rope = getattr(config, "rope_parameters", None) or {}
    settings = [rope, *(one for one in rope.values() if isinstance(one, dict))]
    part = [one.get("partial_rotary_factor") for one in settings] + [
        getattr(config, "partial_rotary_factor", None)
    ]
    return any(one not in (None, 1, 1.0) for one in part)


def _norm_offset(target: Any) -> float:
    """What the family adds to a norm's stored weight: 1 where it stores the scale minus one."""
    norm = getattr(target.decoder, "norm", None)
    weight = getattr(norm, "weight", None)
    if weight is None:
        return 0.0
    scale = target.norm(torch.ones(1, weight.numel(), dtype=weight.dtype, device=weight.device))[0]
    return float(round(float((scale - weight).mean())))
