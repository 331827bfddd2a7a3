"""The two sides of every conversion: a checkpoint of another project, and a draft of ours."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepspec.drafts.contract import TrainableDraft
from deepspec.drafts.layers import head_rows
from deepspec.errors import UserError
from deepspec.interop.conversions import FREE_OF_LENGTH, from_offsets, from_rope_fields
from deepspec.target import Target

SPECULATORS = "0.9.0"  # the version of the package whose layout is written
CONFIDENCE = (
    "The confidence head stays behind: the format has no place for it. The drafted tokens are the same."
)


@dataclass
class Checkpoint:
    """config: `config.json`. notes: what was left behind on the way, and what follows for whoever uses it. tokenizer:
    to lie beside it."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    notes: list[str] = field(default_factory=list)
    tokenizer: Any = None


@dataclass(frozen=True)
class Serving:
    """What a format says about its use. target: where an engine finds the target, a hub name or a folder.
    tokens: K, drafted tokens a round."""

    target: str
    tokens: int


def refuse(instead: str, *limits: tuple[bool, str]) -> None:
    """`UserError` for the first limit of a format that is met: why, and (`instead`) the nearest thing that works."""
    for met, reason in limits:
        if met:
            raise UserError(f"{reason}. {instead}.")


def speculators_settings(
    kind: str, architecture: str, draft: TrainableDraft, target: Target, serving: Serving, **layer: Any
) -> dict[str, Any]:
    """The part of a speculators configuration that all its kinds share. layer: changes of the layer's fields.

    The layer has `rope_parameters` only: it is read by transformers 5, which the older fields would confuse.
    """
    rope = {"rope_parameters": dict(draft.config.rope_parameters)}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": serving.tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": serving.target, "architectures": [type(target.model).__name__]},
        },
        "transformer_layer_config": llama_fields(draft, rope) | layer,
        "tie_word_embeddings": False,
        "dtype": str(draft.dtype).removeprefix("torch."),
    }


def exported_tensors(draft: TrainableDraft) -> tuple[dict[str, Tensor], list[str]]:
    """A draft's tensors under our names, without its vocabulary and confidence head; a note on the latter."""
    tensors = {name: tensor.detach().cpu() for name, tensor in draft.state_dict().items()}
    tensors.pop("target_ids", None)
    confidence = [name for name in tensors if name.startswith("confidence_head.")]
    for name in confidence:
        del tensors[name]
    return tensors, [CONFIDENCE] if confidence else []


def tensors_with_head(draft: Any, target: Target) -> tuple[dict[str, Tensor], list[str]]:
    """`exported_tensors` with a head in any case: a frozen one is the target's rows."""
    tensors, notes = exported_tensors(draft)
    if draft.lm_head is None:
        tensors["lm_head.weight"] = frozen_head(draft, target).to(draft.dtype)
    return tensors, notes


def frozen_head(draft: Any, target: Target) -> Tensor:
    """The target's head as the matrix that formats carry; `UserError` where it does more than multiply by one."""
    rows = bare_head(target, draft.target_ids)
    if rows is None:
        raise UserError(
            f"The draft uses the head of {target.name} (draft.head=frozen), which scales, shifts or caps its logits. The "
            "format has only a matrix. Train it with draft.head=trained."
        )
    return rows


def bare_head(target: Target, ids: Tensor | None) -> Tensor | None:
    """[Vd, H] the target's head for these tokens, None where it does more than multiply by that matrix."""
    rows = head_rows(target, ids)
    # large enough to feel a soft cap
    probe = torch.linspace(-16, 16, target.hidden_size, dtype=target.dtype, device=target.device)[None]
    plain = (probe @ rows.T).float()
    bare = (target.head(probe, ids).float() - plain).norm() <= 2e-2 * plain.norm()
    return rows.cpu() if bool(bare) else None


def check_layers(draft: TrainableDraft, target: Target, why: str) -> None:
    """`UserError` for a draft that reads the output of the target's last layer, which engines do not give."""
    last = target.num_layers - 1
    reason = (
        f"The draft reads the output of the target's last layer ({last}): {why}, and there is none behind it"
    )
    refuse(
        "Train it with other draft.capture_layers (null takes a low, a middle and a high one)",
        (last in draft.capture_layers, reason),
    )


def llama_fields(draft: TrainableDraft, rope: Mapping[str, Any]) -> dict[str, Any]:
    """The draft layers' sizes under the names of a Llama configuration. rope: its rope fields."""
    config = draft.config
    return {
        "model_type": "qwen3" if getattr(config, "head_norms", False) else "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "dtype": str(draft.dtype).removeprefix("torch."),
        **rope,
    }


def draft_shape_of(layer: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """The other way: a layer's configuration → our draft's sizes; `UserError` for what no draft here has."""
    for key, wanted in {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}.items():
        if layer.get(key) not in (None, wanted):
            raise UserError(
                f"The draft's layer has {key} {layer[key]!r}; only {wanted!r} can be brought over."
            )
    if "sliding_attention" in (layer.get("layer_types") or []):
        raise UserError("The draft's layers attend within a sliding window; drafts here attend to all.")
    hidden, heads = layer["hidden_size"], layer["num_attention_heads"]
    if hidden != target.hidden_size:
        raise UserError(
            f"The draft has hidden size {hidden}, {target.name} has {target.hidden_size}. Give the target that the "
            "draft was made for (target=hf target.path=...); drafts of another width are not known here."
        )
    rope = from_rope_fields(layer)
    positions = layer.get("max_position_embeddings") or target.max_positions
    return {
        "hidden_size": hidden,
        "target_hidden_size": hidden,
        "vocab_size": target.vocab_size,
        "intermediate_size": layer["intermediate_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": layer.get("num_key_value_heads") or heads,
        "head_dim": layer.get("head_dim") or hidden // heads,
        "rms_norm_eps": layer.get("rms_norm_eps") or 1e-6,
        # where it decides nothing it is the target's, so that a fresh draft of that target is of the same shape
        "max_position_embeddings": target.max_positions if rope["rope_type"] in FREE_OF_LENGTH else positions,
        "rope_parameters": rope,
    }


def mask_limit(draft: TrainableDraft) -> tuple[bool, str]:
    """A limit for `refuse`, of all formats of drafts with open slots."""
    learnt = draft.config.mask_token is None
    return (
        learnt,
        "The draft has learnt a vector for its open slots (draft.mask_token=null), where engines embed a token",
    )


def take_mask_token(token: int | None, target: Target) -> int:
    """The token of open slots; `UserError` unless the target has it."""
    if token is None or not 0 <= token < target.vocab_size:
        raise UserError(
            f"The draft's mask_token_id is {token}; {target.name} has the tokens 0 to {target.vocab_size - 1}."
        )
    return token


def check_captured(layers: Sequence[int], target: Target) -> None:
    """`UserError` for captured layers that are out of order or not the target's."""
    if list(layers) != sorted(set(layers)):
        raise UserError(f"The draft reads the layers {list(layers)}; only ascending ones are known here.")
    target.check_layers(layers)


def take_vocabulary(tensors: dict[str, Tensor], target: Target) -> Tensor | None:
    """`d2t` and `t2d` out of `tensors`, `target_ids` in; those ids [Vd], None for the whole vocabulary.

    The head's rows behind the target's vocabulary are padding and go. `UserError` where they contradict each other.
    """
    d2t, t2d, head = tensors.pop("d2t", None), tensors.pop("t2d", None), tensors.get("lm_head.weight")
    if head is None:
        return None
    if d2t is not None:
        ids = from_offsets(d2t, t2d, len(head), target.vocab_size)
        if ids is not None:
            tensors["target_ids"] = ids
        return ids
    if len(head) < target.vocab_size:
        raise UserError(f"The draft's head has {len(head)} rows and there is no d2t to say of which tokens.")
    tensors["lm_head.weight"] = head[: target.vocab_size]
    return None


def check_embeddings(tensors: dict[str, Tensor], target: Target) -> None:
    """Take `embed_tokens.weight` out of `tensors`; `UserError` unless it is the target's own."""
    given = tensors.pop("embed_tokens.weight", None)
    if given is None:
        return
    own = embeddings(target)
    fits = given.shape[1] == own.shape[1] and given.shape[0] >= own.shape[0]
    close = fits and torch.allclose(given[: len(own)].float(), own.float(), rtol=2e-2, atol=1e-4)
    if not close:
        raise UserError(
            f"The draft brings embeddings of its own, which are not those of {target.name}: it was trained with them "
            "or for another target. Drafts here read the target's embeddings; choose the draft's own target."
        )


def embeddings(target: Target) -> Tensor:
    """[V, H] as a draft reads them, the family's embedding scale included."""
    count = target.model.get_input_embeddings().weight.shape[0]
    return target.embed(torch.arange(count, device=target.device)).cpu()


def scaled_by(target: Target) -> tuple[bool, str]:
    """A limit for `refuse`, of formats whose readers give the draft the bare rows of the target's embedding."""
    rows = target.model.get_input_embeddings().weight[:64]
    scaled = not torch.equal(target.embed(torch.arange(len(rows), device=target.device)), rows)
    return scaled, f"The draft would be given the bare rows of the embedding, and {target.name} scales them"


def loaded(draft: TrainableDraft, tensors: Mapping[str, Tensor], what: str) -> TrainableDraft:
    """`draft` with these tensors; missing, unexpected or misshapen ones are a `UserError`."""
    wanted = draft.state_dict()
    missing, unexpected = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    shapes = [
        f"{name} is {list(tensors[name].shape)}, not {list(wanted[name].shape)}"
        for name in sorted(wanted.keys() & tensors.keys())
        if tensors[name].shape != wanted[name].shape
    ]
    wrong = [f"{name} is missing" for name in missing] + [f"{name} is unexpected" for name in unexpected]
    if wrong := wrong + shapes:
        more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise UserError(
            f"The tensors of {what} are not those that its configuration says: {'; '.join(wrong[:4])}{more}."
        )
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if unknown := [dtype for dtype in dtypes if dtype.itemsize < 2]:
        raise UserError(f"The tensors of {what} are quantised ({unknown[0]}); give the draft in bfloat16.")
    dtype = max(dtypes, key=lambda one: one.itemsize)
    draft = draft.to(dtype)  # type: ignore[arg-type]
    draft.load_state_dict(dict(tensors))
    return draft.eval()
