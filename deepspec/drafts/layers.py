"""Layers that several drafts share. Plain modules: no cache library, no parallelism."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from deepspec.target.attention import attend_grouped
from deepspec.target.state import State


class Attention(nn.Module):
    """Grouped-query attention whose inputs may be wider than its output (EAGLE-3 feeds it 2H).

    The projections are apart from the attention itself, because training (packed rows, unrolled steps) and
    decoding (a state) attend differently over the same ones.
    """

    def __init__(
        self,
        inputs: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        bias: bool = False,
        norm_eps: float | None = None,
    ) -> None:
        """bias: of queries, keys and values (Qwen2). norm_eps: normalise each head's queries and keys (Qwen3)."""
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = nn.Linear(inputs, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(inputs, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(inputs, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)
        if norm_eps is not None:
            self.q_norm: nn.Module | None = nn.RMSNorm(head_dim, eps=norm_eps)
            self.k_norm: nn.Module | None = nn.RMSNorm(head_dim, eps=norm_eps)
        else:
            self.q_norm = self.k_norm = None

    def queries(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """[B, T, inputs] → [B, heads, T, d], rotated."""
        queries = self._heads(self.q_proj(x), self.heads)
        return rotate(queries if self.q_norm is None else self.q_norm(queries), rotary)

    def keys_values(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """[B, T, inputs] → keys (rotated) and values, [B, kv_heads, T, d] each."""
        keys = self._heads(self.k_proj(x), self.kv_heads)
        keys = rotate(keys if self.k_norm is None else self.k_norm(keys), rotary)
        return keys, self._heads(self.v_proj(x), self.kv_heads)

    def output(self, mixed: Tensor) -> Tensor:
        """[B, heads, T, d] → [B, T, hidden]."""
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def cached(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], state: State, layer: int, mask: Tensor
    ) -> Tensor:
        """Decoding: append to layer `layer` of `state` (planned by the caller) and attend over all of it."""
        q = self.queries(x, rotary)
        k, v = state.update(*self.keys_values(x, rotary), layer)
        return self.output(attend_grouped(q, k, v, mask))

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Attention and MLP on a residual stream, by a draft's configuration (`draft_shape`).

    inputs: width of what the attention reads, None = the stream's own. input_norm: normalise it (EAGLE does not).
    """

    def __init__(self, config: Any, inputs: int | None = None, input_norm: bool = True) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps) if input_norm else None
        self.self_attn = Attention(
            inputs or hidden,
            hidden,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            bias=getattr(config, "attention_bias", False),
            norm_eps=eps if getattr(config, "head_norms", False) else None,
        )
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.mlp = MLP(hidden, config.intermediate_size)

    def read(self, stream: Tensor, embeddings: Tensor) -> Tensor:
        """What the attention reads: the stream, normalised. embeddings: the row's token, for layers that want it."""
        return stream if self.input_layernorm is None else self.input_layernorm(stream)

    def finish(self, stream: Tensor, attended: Tensor) -> Tensor:
        """The stream behind the layer; attended: the attention's output."""
        stream = stream + attended
        return stream + self.mlp(self.post_attention_layernorm(stream))


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """[B, kv_heads, S, d] → [B, heads, S, d]."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding of [B, heads, T, d] by cos and sin [B, T, d] (Su et al. 2021, half-split form)."""
    cos, sin = (part[:, None].to(x.dtype) for part in rotary)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Rotary:
    """cos and sin by the target's own rope parameters (scaling included), for the draft's head size.

    Not a module: its table is computed, not learnt, and must survive loading on the meta device.
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        self.inner: LlamaRotaryEmbedding | None = None

    def __call__(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [B, T] → cos, sin [B, T, d] in the dtype of `like`."""
        if self.inner is None or self.inner.inv_freq.device != like.device:
            self.inner = LlamaRotaryEmbedding(self.config).to(like.device)
        return self.inner(like, positions)


def draft_shape(target_config: Any) -> dict[str, Any]:
    """A draft layer's sizes from any target's configuration: heads, rope, norm and activation width.

    Families that do not store plain keys (latent attention) have no head size of that kind: theirs is
    hidden/heads, made even for rotary.
    """
    hidden, heads = target_config.hidden_size, target_config.num_attention_heads
    kv_heads = getattr(target_config, "num_key_value_heads", None) or heads
    head_dim = getattr(target_config, "head_dim", None)
    if head_dim is None or hasattr(target_config, "kv_lora_rank"):
        head_dim, kv_heads = max(2, hidden // heads // 2 * 2), heads
    return {
        "hidden_size": hidden,
        "intermediate_size": _dense_width(target_config),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": getattr(target_config, "rms_norm_eps", None) or 1e-6,
        "max_position_embeddings": getattr(target_config, "max_position_embeddings", None) or 1 << 20,
        "rope_parameters": _rope(target_config),
    }


def _dense_width(config: Any) -> int:
    width = getattr(config, "intermediate_size", None)
    return width if isinstance(width, int) and width > 0 else 4 * config.hidden_size


def _rope(config: Any) -> dict[str, Any]:
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if (
        "rope_type" not in rope and "rope_theta" not in rope
    ):  # one entry per attention type: take the global one
        rope = dict(rope.get("full_attention") or {})
    rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", 10000.0)
    # A draft rotates its whole head, whatever part of its own the target does.
    rope.pop("partial_rotary_factor", None)
    return rope
