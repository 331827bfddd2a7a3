"""A draft layer that starts from the target's last decoder layer instead of from noise.

The draft continues the target's own residual stream, so the target's last layer and final norm are a beginning when
there are only minutes, and little text, to train. One trial (SmolLM2-135M, 35,000 supervised tokens, two epochs, one
seed): mean Σ min(p, q) on held-out text 0.157 against 0.143 from random weights, τ 1.36 against 1.34. What does not
fit (another kind of layer, other sizes) stays random.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

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
    names = ["self_attn.o_proj"]
    if isinstance(_find(source, "mlp.act_fn"), nn.SiLU | SiLUActivation):
        names += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    for name in names:
        if _copy(_find(layer, name), _find(source, name)):
            copied.append(name)
    plain = _find(source, "self_attn.q_norm") is None  # normalised queries and keys are another layer's kind
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj") if plain else ():
        mine, theirs = _find(layer, name), _find(source, name)
        if theirs is not None and mine.weight[:, hidden:].shape == theirs.weight.shape:
            mine.weight[:, :hidden].mul_(DAMPING)
            mine.weight[:, hidden:].copy_(theirs.weight)
            copied.append(name)
    norms = {
        "input_layernorm": (layer.hidden_norm, _find(source, "input_layernorm")),
        "post_attention_layernorm": (
            layer.post_attention_layernorm,
            _find(source, "post_attention_layernorm"),
        ),
        "norm": (draft.norm, target.norm),
    }
    for name, (mine, norm) in norms.items():
        scale = None if norm is None else _rms_scale(norm, hidden, target)
        if scale is not None:
            mine.weight.copy_(scale)
            copied.append(name)
    return copied


def _find(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def _copy(mine: Any, theirs: Any) -> bool:
    weight = getattr(theirs, "weight", None)
    if weight is None or mine.weight.shape != weight.shape:
        return False
    mine.weight.copy_(weight)
    return True


def _rms_scale(norm: Any, hidden: int, target: Any) -> Tensor | None:
    """An RMS norm's scale [H] whatever its family stores (some keep the weight minus 1): its output on ones.

    None where the norm is no RMS norm, which its output on another vector tells.
    """
    ones = torch.ones(1, hidden, dtype=target.dtype, device=target.device)
    other = torch.linspace(-1, 2, hidden, dtype=target.dtype, device=target.device)[None]
    scale = norm(ones)
    expected = other * other.float().square().mean().rsqrt().to(other.dtype) * scale
    return scale[0] if torch.allclose(norm(other), expected, rtol=2e-2, atol=1e-3) else None
