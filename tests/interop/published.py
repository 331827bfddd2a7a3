"""Drafts written by hand to the published layouts, and the same computed by a plain loop: no code of ours."""

import torch
from torch import Tensor

HIDDEN, HEADS, KV, INNER = 32, 4, 2, 48


def eagle3_tensors(layers: int = 3, rows: int = 97, seed: int = 0, head_dim: int = 8) -> dict[str, Tensor]:
    """A random EAGLE-3 in SafeAILab's names, float64; `rows` of its head."""
    draw = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64) * 0.3

    def norm(size: int = HIDDEN) -> Tensor:
        return torch.rand(size, generator=draw, dtype=torch.float64) + 0.5

    attention = {
        "q_proj": weight(HEADS * head_dim, 2 * HIDDEN),
        "k_proj": weight(KV * head_dim, 2 * HIDDEN),
        "v_proj": weight(KV * head_dim, 2 * HIDDEN),
        "o_proj": weight(HIDDEN, HEADS * head_dim),
    }
    mlp = {
        "gate_proj": weight(INNER, HIDDEN),
        "up_proj": weight(INNER, HIDDEN),
        "down_proj": weight(HIDDEN, INNER),
    }
    return {
        "fc.weight": weight(HIDDEN, layers * HIDDEN),
        "norm.weight": norm(),
        "lm_head.weight": weight(rows, HIDDEN),
        **{f"midlayer.self_attn.{name}.weight": tensor for name, tensor in attention.items()},
        **{f"midlayer.mlp.{name}.weight": tensor for name, tensor in mlp.items()},
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.post_attention_layernorm.weight": norm(),
    }


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rope(x: Tensor, position: int, theta: float) -> Tensor:
    """One head [d] at one position, half-split form."""
    half = len(x) // 2
    angles = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    a, b = x[:half], x[half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()])


def eagle3_logits(
    tensors: dict[str, Tensor],
    embedding: Tensor,
    features: Tensor,
    tokens: list[int],
    drafted: list[int],
    *,
    theta: float = 10000.0,
    eps: float = 1e-5,
    norm_residual: bool = False,
    norm_output: bool = False,
) -> Tensor:
    """[K, Vd] logits of EAGLE-3 (Li et al. 2025) behind a prompt, forced along `drafted`, row by row.

    tensors: in SafeAILab's names; `fc_norm.{i}`, `input_norm` and head norms are used where they are. features:
    [P, F] at the prompt's positions. tokens: the prompt and the pending token, P + 1.
    """
    head_dim = tensors["midlayer.self_attn.o_proj.weight"].shape[1] // HEADS

    def at(name: str) -> Tensor:
        return tensors[f"midlayer.{name}.weight"]

    if "input_norm.weight" in tensors:
        features = rms(features, tensors["input_norm.weight"], eps)
    if "fc_norm.0.weight" in tensors:
        count = features.shape[1] // HIDDEN
        parts = [rms(p, tensors[f"fc_norm.{i}.weight"], eps) for i, p in enumerate(features.chunk(count, -1))]
        features = torch.cat(parts, -1)
    streams = list(features @ tensors["fc.weight"].T)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    found = []
    given = [*tokens[1:], *drafted]
    for row in range(len(tokens) - 1 + len(drafted) - 1):
        stream = streams[row]
        normed = rms(stream, at("hidden_norm"), eps)
        x = torch.cat([rms(embedding[given[row]], at("input_layernorm"), eps), normed])
        queries, key, value = (
            (at(f"self_attn.{name}_proj") @ x).view(-1, head_dim) for name in ("q", "k", "v")
        )
        if "midlayer.self_attn.q_norm.weight" in tensors:
            queries, key = (rms(queries, at("self_attn.q_norm"), eps), rms(key, at("self_attn.k_norm"), eps))
        keys.append(torch.stack([rope(head, row, theta) for head in key]))
        values.append(value)
        mixed = []
        for head in range(HEADS):
            query, own = rope(queries[head], row, theta), head // (HEADS // KV)
            scores = torch.stack([query @ k[own] for k in keys]) / head_dim**0.5
            mixed.append(sum(w * v[own] for w, v in zip(scores.softmax(0), values, strict=True)))
        stream = (normed if norm_residual else stream) + at("self_attn.o_proj") @ torch.cat(mixed)
        y = rms(stream, at("post_attention_layernorm"), eps)
        gate = at("mlp.gate_proj") @ y
        stream = stream + at("mlp.down_proj") @ (gate * gate.sigmoid() * (at("mlp.up_proj") @ y))
        out = rms(stream, tensors["norm.weight"], eps)
        if row >= len(tokens) - 2:
            found.append(tensors["lm_head.weight"] @ out)
            streams.append(out if norm_output else stream)
    return torch.stack(found)
