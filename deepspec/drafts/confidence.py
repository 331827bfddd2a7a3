"""How sure a draft is of its next token: the confidence head that any family may carry.

    c = σ(wᵀ[h; e])

h: the hidden state that gives the token's distribution. e: something of the token *before* it (its embedding; the
Markov row in DSpark). Never the token itself: a scheduler that stops by what was drawn changes the distribution of
the output (Cheng et al. 2026, arXiv 2607.05147, appendix A). Trained towards the chance of acceptance
c* = Σ_v min(p(v), q(v)) by `losses.confidence_bce`.
"""

import torch
from torch import Tensor, nn


class ConfidenceHead(nn.Module):
    """hidden, extra: widths of h and e. bias: a constant beside them, which drafts of other trainers have."""

    def __init__(self, hidden: int, extra: int, bias: bool = False) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden + extra, 1, bias=bias)
        for parameter in self.proj.parameters():
            nn.init.zeros_(parameter)  # one half everywhere until something is known

    def forward(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """h [..., hidden] and e [..., extra] → raw logits [...]; a sigmoid makes them probabilities."""
        return self.proj(torch.cat([hidden, previous], -1)).squeeze(-1)
