"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): a draft layer over fused target features, trained on its own outputs.

Row i pairs the target's features at position i with the token at i + 1 and predicts the token at i + 2:

    g_i = fc([f^low; f^mid; f^high]_i)                                  F → H
    h_i = layer([norm(emb(t_{i+1})); norm(g_i)]),  residual stream g_i  2H → H
    q(t_{i+2} | ·) = softmax(lm_head(norm(h_i)))                        H → Vd

Each further step has the row's own h in place of g (`recursive.py` runs the steps, in training and in decoding).
Loss Σ_s decay^s · cross-entropy against the target's distribution (`soft_ce`).
EAGLE-3.1: `norm_layers` normalises each captured layer before `fc`, `normalised_feedback` feeds norm(h) back.
Drafts of other trainers may also have one norm over all captured layers (`norm_features`) or a residual stream that
starts from norm(g) (`norm_residual`); here nothing trains such a draft from scratch, but one may be trained further.
"""

from typing import Any

import torch
from torch import Tensor, nn

from deepspec.drafts.contract import TargetModel
from deepspec.drafts.layers import DecoderLayer, head_rows
from deepspec.drafts.options import Eagle3Options
from deepspec.drafts.recursive import RecursiveConfig, RecursiveDraft
from deepspec.drafts.warm_start import warm_start


class Eagle3Config(RecursiveConfig):
    model_type = "deepspec_eagle3"

    def __init__(
        self,
        norm_layers: bool = False,
        normalised_feedback: bool = False,
        head: str = "trained",
        norm_features: bool = False,
        norm_residual: bool = False,
        **shared: Any,
    ) -> None:
        self.norm_layers = norm_layers
        self.normalised_feedback = normalised_feedback
        self.head = head
        self.norm_features = norm_features
        self.norm_residual = norm_residual
        super().__init__(**shared)


class Eagle3Layer(DecoderLayer):
    """The first layer: its attention reads [norm(emb); norm(stream)]."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, inputs=2 * config.hidden_size)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm_residual = config.norm_residual

    def read(self, stream: Tensor, embeddings: Tensor) -> Tensor:
        return torch.cat([super().read(embeddings, embeddings), self.hidden_norm(stream)], -1)

    def finish(self, stream: Tensor, attended: Tensor) -> Tensor:
        return super().finish(self.hidden_norm(stream) if self.norm_residual else stream, attended)


class Eagle3Draft(RecursiveDraft):
    config_class = Eagle3Config
    inherited = (*RecursiveDraft.inherited, "norm_residual", "norm_features", "head_norms")
    fc_norm: Any  # nn.ModuleList or None
    input_norm: nn.RMSNorm | None
    lm_head: nn.Linear | None

    def __init__(self, config: Eagle3Config) -> None:
        others = [DecoderLayer(config) for _ in range(config.num_layers - 1)]
        super().__init__(config, [Eagle3Layer(config), *others])
        hidden, captured = config.hidden_size, len(config.capture_layers)
        norms = [nn.RMSNorm(config.target_hidden_size, eps=config.rms_norm_eps) for _ in range(captured)]
        self.fc_norm = nn.ModuleList(norms) if config.norm_layers else None
        fused = captured * config.target_hidden_size
        self.input_norm = nn.RMSNorm(fused, eps=config.rms_norm_eps) if config.norm_features else None
        self.fc = nn.Linear(fused, hidden, bias=False)
        self.norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        width = config.draft_vocab_size or config.vocab_size
        self.lm_head = nn.Linear(hidden, width, bias=False) if config.head == "trained" else None
        self.post_init()

    @classmethod
    def from_target(cls, options: Eagle3Options, target: Any, target_ids: Tensor | None) -> "Eagle3Draft":
        """A fresh draft for `target`: its sizes, rope and norm; a trained head starts from the target's own rows."""
        draft = cls.sized(
            options,
            target,
            target_ids,
            capture_layers=options.capture_layers or default_layers(target.num_layers),
            norm_layers=options.norm_layers,
            normalised_feedback=options.normalised_feedback,
            head=options.head,
        )
        if draft.lm_head is not None:
            with torch.no_grad():
                draft.lm_head.weight.copy_(head_rows(target, target_ids))
        if options.start == "target":
            draft.config.started_from = warm_start(draft, target)
        return draft

    def fuse(self, target: TargetModel, features: Tensor) -> Tensor:
        features = features.to(self.dtype)
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(features)

    def settle(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)

    def logits(self, target: TargetModel, settled: Tensor) -> Tensor:
        return super().logits(target, settled) if self.lm_head is None else self.lm_head(settled)

    def feedback(self, hidden: Tensor, settled: Tensor) -> Tensor:
        return settled if self.config.normalised_feedback else hidden


def default_layers(count: int) -> list[int]:
    """Low, middle and high of `count` target layers: [1, n//2−1, n−4], clamped to [0, n−2], unique, ascending."""
    wanted = [1, count // 2 - 1, count - 4]
    return sorted({min(max(layer, 0), max(count - 2, 0)) for layer in wanted})
