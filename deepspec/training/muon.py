"""Muon for the draft's inner matrices, AdamW for all the rest, as one optimiser.

Muon (Jordan et al. 2024) orthogonalises a matrix's momentum; tables with a row or column a vocabulary entry (heads,
embeddings), norms and biases are not what it is made for. torch's own Muon does the step, its update scaled to the
root mean square of AdamW's (Liu et al. 2025, arXiv 2502.16982), so that one learning rate and decay serve both.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

MOMENTUM = 0.95


class MuonWithAdamW(torch.optim.Optimizer):
    """matrices: [n, m] each. others: AdamW's groups. Both parts see the same `state` and `param_groups`, those of
    this object, so that saving, loading and learning-rate schedules need not know of them."""

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        others: Sequence[dict[str, Any]],
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        self._muon = torch.optim.Muon(
            list(matrices),
            lr=lr,
            weight_decay=weight_decay,
            momentum=MOMENTUM,
            adjust_lr_fn="match_rms_adamw",
        )
        self._adamw = torch.optim.AdamW(list(others), lr=lr, betas=betas, eps=eps) if others else None
        self._parts = [part for part in (self._muon, self._adamw) if part is not None]
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        first = len(self._muon.param_groups)
        self._muon.param_groups = self.param_groups[:first]
        if self._adamw is not None:
            self._adamw.param_groups = self.param_groups[first:]
        for part in self._parts:
            part.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Both parts' step; the gradients are already there, a closure is not called for."""
        for part in self._parts:
            part.step()
        return None


def inner_matrices(model: nn.Module) -> list[nn.Parameter]:
    """What Muon is for: learning matrices that have no vocabulary on either side."""
    config: Any = getattr(model, "config", None)
    vocabularies = {getattr(config, "vocab_size", None), getattr(config, "draft_vocab_size", None)}
    tables = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
    return [
        one
        for one in model.parameters()
        if one.requires_grad
        and one.dim() == 2
        and id(one) not in tables
        and not vocabularies.intersection(one.shape)
    ]
