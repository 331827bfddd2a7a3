"""EAGLE (Li et al. 2024, arXiv 2401.15077): a decoder layer that predicts the target's next feature.

The feature f_i is the target's last hidden state at position i *behind* its final norm, what its head reads:

    x_i = fc([emb(t_{i+1}); f_i])                                       2H → H, with bias
    f̂_{i+1} = layer(x_i)                                                H → H, no norm before its attention
    q(t_{i+2} | ·) = softmax(head(f̂_{i+1}))                             the target's own head, no further norm

Each further step has f̂ in place of f (`recursive.py` runs the steps). Published with one step in training, so that a
draft never sees its own output there; `ttt_steps` unrolls more. Loss Σ_s decay^s (SmoothL1(f̂, f) + 0.1 ·
cross-entropy against the target's distribution). In training f gets noise U(−a, a) · 512/T, T the document's length.
Decoding as EAGLE-2 (2024b) is `tree.py`'s.
"""

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from deepspec.drafts.contract import DraftBatch, TargetModel
from deepspec.drafts.layers import DecoderLayer
from deepspec.drafts.losses import smooth_l1
from deepspec.drafts.options import EagleOptions
from deepspec.drafts.recursive import RecursiveConfig, RecursiveDraft
from deepspec.drafts.step_weights import OtherParts
from deepspec.drafts.unrolled import shift


class EagleConfig(RecursiveConfig):
    model_type = "deepspec_eagle"

    def __init__(self, noise: float = 0.1, **shared: Any) -> None:
        self.noise = noise
        super().__init__(**shared)


class EagleDraft(RecursiveDraft):
    config_class = EagleConfig
    own_loss: ClassVar[dict[str, float]] = {"smooth_l1": 1.0, "soft_ce": 0.1}
    own_parts = ("smooth_l1",)

    def __init__(self, config: EagleConfig) -> None:
        others = [DecoderLayer(config) for _ in range(config.num_layers - 1)]
        super().__init__(config, [DecoderLayer(config, input_norm=False), *others])
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.post_init()

    @classmethod
    def from_target(cls, options: EagleOptions, target: Any, target_ids: Tensor | None) -> "EagleDraft":
        """A fresh draft for `target`, of its sizes and rope; it reads the output of the last layer."""
        return cls.sized(
            options, target, target_ids, capture_layers=[target.num_layers - 1], noise=options.noise
        )

    def fuse(self, target: TargetModel, features: Tensor) -> Tensor:
        return target.norm(features).to(self.dtype)

    def enter(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        return self.fc(torch.cat([embeddings, hidden], -1))

    def settle(self, hidden: Tensor) -> Tensor:
        return hidden

    def training_inputs(self, batch: DraftBatch) -> Tensor:
        features = super().training_inputs(batch)
        if not self.training or batch.seeds is None or self.config.noise == 0:
            return features
        lengths = (batch.documents[:, :, None] == batch.documents[:, None, :]).sum(-1)
        scale = 2 * self.config.noise * 512 / lengths[..., None]
        return features + (uniforms(batch.seeds, features) - 0.5) * scale.to(features.dtype)

    def other_parts(self, batch: DraftBatch, step: int, rows: Tensor, settled: Tensor) -> OtherParts:
        """Row i's f̂ of step s is compared with f_{i+1+s}."""
        goal = batch.context.target.norm(shift(batch.last_hidden, step + 1)[rows])
        return {"smooth_l1": partial(smooth_l1, settled, goal)}


def uniforms(seeds: Tensor, like: Tensor) -> Tensor:
    """[B, T, H] in [0, 1): row b's are a function of seeds[b] alone, whatever batch, padding or device."""
    rows = []
    for seed in seeds.tolist():
        generator = torch.Generator().manual_seed(seed)
        rows.append(torch.rand(like.shape[1:], generator=generator))
    return torch.stack(rows).to(like)
