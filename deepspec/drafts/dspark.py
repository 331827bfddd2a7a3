"""DSpark (Cheng et al. 2026, arXiv 2607.05147): a block draft whose tokens depend on the ones drawn before them.

The backbone is that of `block`, with K slots: the anchor's own predicts t_{a+1}. On top of it a small sequential head
adds a bias from the token before, x_{k−1} = t_{a+k−1} (drawn in decoding, the text's in training):

    logits_k = head(h_k) + b_k W2                                            Vd
    markov:  b_k = W1[x_{k−1}]                                               r
    rnn:     z = [s_{k−1}; W1[x_{k−1}]; h_k],  b_k = tanh(W_o z),            s_0 = 0
             s_k = σ(W_g z) ⊙ s_{k−1} + (1 − σ(W_g z)) ⊙ tanh(W_c z)
    c_k = σ(wᵀ[h_k; W1[x_{k−1}]])                                            confidence that x_k is accepted

W1 has a row for every token of the target, W2 a column for every token of the draft; with r = 0 there is no such head,
and the draft is a DFlash whose first slot predicts too. Loss, with w_k = exp(−(k−1)/γ):

    0.1 · CE(text) + 0.9 · ‖q_k − p_k‖₁ + 1.0 · BCE(c_k, c*_k),   c*_k = 1 − ½ ‖q_k − p_k‖₁

The part `tv` is ½ ‖q − p‖₁, hence its weight of 1.8.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from deepspec.drafts.block import BlockConfig, BlockDraft
from deepspec.drafts.contract import TargetModel


class DSparkConfig(BlockConfig):
    model_type = "deepspec_dspark"

    def __init__(self, sequential: str = "markov", rank: int = 256, **rest: Any) -> None:
        self.sequential = sequential
        self.rank = rank
        super().__init__(**rest)


class MarkovHead(nn.Module):
    """A bias from the token before. vocab, draft_vocab: rows of W1, columns of W2."""

    def __init__(self, vocab: int, draft_vocab: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=rank**-0.5)
        nn.init.zeros_(self.markov_w2.weight)  # no bias until one is learnt

    def forward(self, row: Tensor, hidden: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """row [..., r] of W1, hidden [..., H] → b [..., r], and the memory for the next slot."""
        return row, None


class RNNHead(MarkovHead):
    """The same with a memory of all tokens before: s, [..., r]."""

    def __init__(self, vocab: int, draft_vocab: int, rank: int, hidden: int) -> None:
        super().__init__(vocab, draft_vocab, rank)
        self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)  # W_g, W_c and W_o

    def forward(self, row: Tensor, hidden: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        state = torch.zeros_like(row) if memory is None else memory
        gate, candidate, output = self.joint_proj(torch.cat([state, row, hidden], -1)).chunk(3, -1)
        keep = gate.sigmoid()
        return output.tanh(), keep * state + (1 - keep) * candidate.tanh()


class DSparkDraft(BlockDraft):
    config_class = DSparkConfig
    first_slot = 0
    init_conversions: ClassVar[dict[str, tuple[str, ...]]] = {"deepspec_dflash": ("markov_head.",)}

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        sizes = (config.vocab_size, config.draft_vocab_size or config.vocab_size, config.rank)
        self.markov_head: MarkovHead | None
        if config.rank == 0:
            self.markov_head = None
        elif config.sequential == "rnn":
            self.markov_head = RNNHead(*sizes, config.hidden_size)
        else:
            self.markov_head = MarkovHead(*sizes)
        self.post_init()

    @classmethod
    def own_settings(cls, options: Any) -> dict[str, Any]:
        return {"sequential": options.sequential, "rank": options.rank}

    @property
    def default_loss(self) -> dict[str, float]:
        parts = {"ce": 0.1, "tv": 1.8}
        return parts | ({"confidence": 1.0} if self.confidence_head is not None else {})

    @property
    def previous_width(self) -> int:
        return self.config.rank

    def follow(
        self, target: TargetModel, hidden: Tensor, previous: Tensor, memory: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if self.markov_head is None:
            return (
                None,
                None if self.confidence_head is None else self.confidence_head(hidden, hidden[..., :0]),
                None,
            )
        row = self.markov_head.markov_w1(previous)
        latent, memory = self.markov_head(row, hidden, memory)
        confidence = None if self.confidence_head is None else self.confidence_head(hidden, row)
        return latent, confidence, memory

    def bias(self, latent: Tensor) -> Tensor:
        assert self.markov_head is not None  # `follow` gives no latent without it
        return self.markov_head.markov_w2(latent)
