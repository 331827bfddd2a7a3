"""MTP, multi-token prediction as in DeepSeek-V3 (2024, arXiv 2412.19437, §2.2), used recursively.

    x_i = proj([norm_e(emb(t_{i+1})); norm_h(h_i)])                     2H → H, embedding first
    y_i = layer(x_i)                                                    H → H
    q(t_{i+2} | ·) = softmax(head(norm(y_i)))                           MTP's own final norm, the target's own head

h_i is the target's last hidden state at position i, before its final norm or after it: implementations disagree, so
`norm_input` says. Each further step has norm(y) in place of h, with the same weights (`recursive.py` runs the steps);
loss Σ_s β^s · cross-entropy against the target's distribution, β = `step_decay` (FastMTP, Cai et al. 2025).

The layer is one of the target's kind as far as grouped-query attention goes: its heads, head norms (Qwen3), biases
(Qwen2) and widths. A family with latent attention or experts gets a plain layer of its sizes instead. `start=target`
starts from the module of this kind in the target's own checkpoint (`native_mtp.py`).
"""

from typing import Any

import torch
from torch import Tensor, nn

from deepspec.drafts.contract import TargetModel
from deepspec.drafts.layers import DecoderLayer
from deepspec.drafts.native_mtp import native_start
from deepspec.drafts.options import MtpOptions
from deepspec.drafts.recursive import RecursiveConfig, RecursiveDraft


class MtpConfig(RecursiveConfig):
    model_type = "deepspec_mtp"

    def __init__(
        self,
        norm_input: str = "before",
        attention_bias: bool = False,
        head_norms: bool = False,
        **shared: Any,
    ) -> None:
        self.norm_input = norm_input
        self.attention_bias = attention_bias
        self.head_norms = head_norms
        super().__init__(**shared)


class MtpDraft(RecursiveDraft):
    config_class = MtpConfig

    def __init__(self, config: MtpConfig) -> None:
        super().__init__(config, [DecoderLayer(config) for _ in range(config.num_layers)])
        hidden, wide, eps = config.hidden_size, config.target_hidden_size, config.rms_norm_eps
        self.embedding_norm = nn.RMSNorm(wide, eps=eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.proj = nn.Linear(wide + hidden, hidden, bias=False)
        self.norm = nn.RMSNorm(hidden, eps=eps)
        self.post_init()

    @classmethod
    def from_target(cls, options: MtpOptions, target: Any, target_ids: Tensor | None) -> "MtpDraft":
        """A fresh draft for `target`, of its sizes and rope; it reads the output of the last layer."""
        draft = cls.sized(
            options,
            target,
            target_ids,
            capture_layers=[target.num_layers - 1],
            norm_input=options.norm_input,
            **attention_kind(target),
        )
        if options.start == "target":
            draft.config.started_from = native_start(draft, target)
        return draft

    def fuse(self, target: TargetModel, features: Tensor) -> Tensor:
        return (target.norm(features) if self.config.norm_input == "after" else features).to(self.dtype)

    def enter(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        return self.proj(torch.cat([self.embedding_norm(embeddings), self.hidden_norm(hidden)], -1))

    def settle(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)


def attention_kind(target: Any) -> dict[str, bool]:
    """Whether the target's last layer normalises its heads' queries and keys, and whether it has biases there."""
    attention = getattr(target.layers[-1], "self_attn", None)
    norm, queries = getattr(attention, "q_norm", None), getattr(attention, "q_proj", None)
    head_dim = getattr(attention, "head_dim", None)
    return {
        "head_norms": norm is not None and norm.weight.shape[-1] == head_dim,
        "attention_bias": getattr(queries, "bias", None) is not None,
    }
