"""Block drafts written by hand to the published layouts, and the same computed in a few plain lines: no code of ours."""

import torch
from torch import Tensor

from tests.interop.published import HEADS, HIDDEN, INNER, KV, rms

HEAD_DIM, RANK, LAYERS = 16, 5, 2


def block_tensors(
    captured: int, seed: int = 0, rnn: bool = False, markov: int = 0, rows: int = 97
) -> dict[str, Tensor]:
    """A random backbone in the names that all projects share, float64; `markov` its tokens' head, with a confidence.

    rows: of the draft's vocabulary.
    """
    draw = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64) * 0.3

    def norm(size: int = HIDDEN) -> Tensor:
        return torch.rand(size, generator=draw, dtype=torch.float64) + 0.5

    tensors = {
        "fc.weight": weight(HIDDEN, captured * HIDDEN),
        "hidden_norm.weight": norm(),
        "norm.weight": norm(),
    }
    for layer in range(LAYERS):
        inside = {
            "self_attn.q_proj": weight(HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": weight(KV * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": weight(KV * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": weight(HIDDEN, HEADS * HEAD_DIM),
            "self_attn.q_norm": norm(HEAD_DIM),
            "self_attn.k_norm": norm(HEAD_DIM),
            "mlp.gate_proj": weight(INNER, HIDDEN),
            "mlp.up_proj": weight(INNER, HIDDEN),
            "mlp.down_proj": weight(HIDDEN, INNER),
            "input_layernorm": norm(),
            "post_attention_layernorm": norm(),
        }
        tensors |= {f"layers.{layer}.{name}.weight": tensor for name, tensor in inside.items()}
    if markov:
        tensors |= {
            "markov_head.markov_w1.weight": weight(markov, RANK),
            "markov_head.markov_w2.weight": weight(rows, RANK),
            "confidence_head.proj.weight": weight(1, HIDDEN + RANK),
            "confidence_head.proj.bias": weight(1),
        }
    if rnn:
        tensors |= {
            "markov_head.joint_proj.weight": weight(3 * RANK, 2 * RANK + HIDDEN),
            "markov_head.joint_proj.bias": weight(3 * RANK),
        }
    return tensors


def rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """[n, heads, d] at positions [n], half-split form."""
    half = x.shape[-1] // 2
    angles = (positions[:, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half))[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def block_said(
    tensors: dict[str, Tensor],
    embedding: Tensor,
    head: Tensor,
    features: Tensor,
    text: list[int],
    *,
    mask: int,
    slots: int,
    first: int,
    theta: float = 10000.0,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor | None]:
    """[K, Vd] logits behind a prompt, forced along the text, and the confidence [K] if there is any.

    features: [P, F] of the prompt without its pending token. text: the prompt, the pending token, K drafted ones.
    slots: of the block; those from `first` on predict.
    """
    start = len(features)
    context = rms(features @ tensors["fc.weight"].T, tensors["hidden_norm.weight"], eps)
    stream = embedding[torch.tensor([text[start], *[mask] * (slots - 1)])]
    places = torch.arange(start, start + slots)
    for layer in range(LAYERS):

        def at(name: str, prefix: str = f"layers.{layer}.") -> Tensor:
            return tensors[f"{prefix}{name}.weight"]

        x = rms(stream, at("input_layernorm"), eps)
        both, every = torch.cat([context, x]), torch.arange(start + slots)
        queries = (x @ at("self_attn.q_proj").T).unflatten(-1, (HEADS, HEAD_DIM))
        keys = (both @ at("self_attn.k_proj").T).unflatten(-1, (KV, HEAD_DIM))
        values = (both @ at("self_attn.v_proj").T).unflatten(-1, (KV, HEAD_DIM))
        queries = rotated(rms(queries, at("self_attn.q_norm"), eps), places, theta)
        keys = rotated(rms(keys, at("self_attn.k_norm"), eps), every, theta)
        mixed = []
        for number in range(HEADS):
            own = number // (HEADS // KV)
            scores = queries[:, number] @ keys[:, own].T / HEAD_DIM**0.5
            mixed.append(scores.softmax(-1) @ values[:, own])
        stream = stream + torch.cat(mixed, -1) @ at("self_attn.o_proj").T
        y = rms(stream, at("post_attention_layernorm"), eps)
        gate = y @ at("mlp.gate_proj").T
        stream = stream + (gate * gate.sigmoid() * (y @ at("mlp.up_proj").T)) @ at("mlp.down_proj").T
    hidden = rms(stream, tensors["norm.weight"], eps)[first:]
    logits = hidden @ head.T
    if "markov_head.markov_w1.weight" not in tensors:
        return logits, None
    rows = tensors["markov_head.markov_w1.weight"][torch.tensor(text[start : start + len(hidden)])]
    latent = rows
    if "markov_head.joint_proj.weight" in tensors:
        state, found = torch.zeros(RANK, dtype=torch.float64), []
        for row, h in zip(rows, hidden, strict=True):
            z = tensors["markov_head.joint_proj.weight"] @ torch.cat([state, row, h])
            gate, candidate, output = (z + tensors["markov_head.joint_proj.bias"]).chunk(3)
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
            found.append(output.tanh())
        latent = torch.stack(found)
    said = torch.cat([hidden, rows], -1) @ tensors["confidence_head.proj.weight"][0]
    said = said + tensors["confidence_head.proj.bias"]
    return logits + latent @ tensors["markov_head.markov_w2.weight"].T, said.sigmoid()
