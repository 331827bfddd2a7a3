"""A draft layer that starts from the target's last decoder layer instead of from noise.

The draft continues the target's own residual stream, so the target's last layer, final norm and head are a far
better beginning than random weights when there are only minutes, and little text, to train. What does not fit
(another kind of layer, other sizes) stays random.
"""

from typing import Any

import torch
from torch import Tensor, nn

DAMPING = 0.3  # of the random weights that read what the target's layer never saw


@torch.no_grad()
def warm_start(draft: Any, target: Any) -> list[str]:
    """Copy what fits into an EAGLE-3 draft's first layer, norms and `fc`; the names of what was copied.

    fc starts as the identity on the last captured layer, so that g is the target's own stream.
    """
    layer, source, hidden = draft.layers[0], target.layers[-1], draft.config.hidden_size
    copied: list[str] = []
    if draft.config.target_hidden_size == hidden:
        draft.fc.weight.mul_(DAMPING)
        draft.fc.weight[:, -hidden:] += torch.eye(hidden)
        copied.append("fc")
    for name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "self_attn.o_proj"):
        if _copy(_find(layer, name), _find(source, name)):
            copied.append(name)
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        mine, theirs = _find(layer, name), _find(source, name)
        if theirs is not None and mine.weight[:, hidden:].shape == theirs.weight.shape:
            mine.weight[:, :hidden].mul_(DAMPING)
            mine.weight[:, hidden:].copy_(theirs.weight)
            copied.append(name)
    norms = (
        (layer.hidden_norm, _find(source, "input_layernorm")),
        (layer.post_attention_layernorm, _find(source, "post_attention_layernorm")),
        (draft.norm, target.norm),
    )
    for mine, norm in norms:
        if norm is not None:
            mine.weight.copy_(_effective_weight(norm, hidden, target))
            copied.append("norm")
    return copied


def _find(module: nn.Module, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)  # type: ignore[assignment]
        if module is None:
            return None
    return module


def _copy(mine: Any, theirs: Any) -> bool:
    fits = theirs is not None and getattr(theirs, "weight", None) is not None
    if not fits or mine.weight.shape != theirs.weight.shape:
        return False
    mine.weight.copy_(theirs.weight)
    return True


def _effective_weight(norm: Any, hidden: int, target: Any) -> Tensor:
    """An RMS norm's scale whatever its family stores (some keep the weight minus 1): its output on ones."""
    return norm(torch.ones(1, hidden, dtype=target.dtype, device=target.device))[0]
