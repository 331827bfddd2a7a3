"""What every format spells differently: layer ids, draft vocabularies, rope fields. Each way has its way back.

Inside deepspec `layer i` is the output of decoder layer i, 0-based.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspec.errors import UserError

# Kinds of rope whose angles do not depend on the longest text a model was made for.
FREE_OF_LENGTH = ("default", "linear", "llama3")


def to_layer_inputs(layers: Sequence[int]) -> list[int]:
    """speculators and vLLM: an id indexes `hidden_states`, and so names the *input* of that layer."""
    return [layer + 1 for layer in layers]


def from_layer_inputs(ids: Sequence[int]) -> list[int]:
    """Back again; `UserError` for id 0, the embeddings, which are no layer's output."""
    if any(number < 1 for number in ids):
        raise UserError(
            f"The draft reads the hidden states {list(ids)}; 0 are the embeddings, which are not captured here."
        )
    return [number - 1 for number in ids]


def published_layers(count: int) -> list[int]:
    """What EAGLE-3 reads where its checkpoint does not say: the inputs of 2, n/2 and n−3, as outputs."""
    return from_layer_inputs([2, count // 2, count - 3])


def to_offsets(target_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """[Vd] ascending target ids → `d2t` [Vd] int64, target id = draft id + d2t, and `t2d` [V] bool."""
    ids = target_ids.cpu().long()
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": mask}


def from_offsets(d2t: Tensor, t2d: Tensor | None, rows: int, vocab_size: int) -> Tensor | None:
    """`d2t` and `t2d` → [Vd] target ids, None for the whole vocabulary. rows: of the draft's head.

    `UserError` where they contradict each other, the head or the target.
    """
    ids = d2t.cpu().long() + torch.arange(len(d2t))
    wrong = None
    if len(ids) != rows:
        wrong = f"it has {len(ids)} entries and the head {rows} rows"
    elif len(ids) == 0 or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size or bool((ids.diff() <= 0).any()):
        wrong = f"the target ids it gives are not ascending within 0 to {vocab_size - 1}"
    elif t2d is not None and len(t2d) != vocab_size:
        wrong = f"t2d is of {len(t2d)} tokens, the target has {vocab_size}"
    elif t2d is not None and not torch.equal(t2d.cpu().bool().nonzero()[:, 0], ids):
        wrong = "t2d marks other tokens"
    if wrong:
        raise UserError(f"The draft vocabulary (d2t) cannot be right: {wrong}.")
    return None if rows == vocab_size else ids


def to_rope_fields(rope: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` as transformers 5 has them, and the older `rope_theta` and `rope_scaling` beside them."""
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    plain = scaling.get("rope_type", "default") == "default"
    return {
        "rope_parameters": dict(rope),
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if plain else scaling,
    }


def from_rope_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters`, or else the older fields; `UserError` for a rope that a draft layer does not have here."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    rope.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    partial = rope.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    if "mrope_section" in rope or partial != 1.0 or "full_attention" in rope:
        raise UserError(
            "The draft rotates its heads by section, in part or differently by layer (mrope_section, "
            "partial_rotary_factor); only a rope over the whole head is known here."
        )
    return rope
