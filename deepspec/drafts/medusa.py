"""Medusa (Cai et al. 2024, arXiv 2401.10774): K heads on the target's last hidden state, each for one token ahead.

With f the target's last hidden state at position a−1, after its final norm (the pending token t_a is not seen):

    h_k = f + SiLU(W_k f + b_k)                 H, W_k and b_k start at 0
    q(t_{a+k} | ·) = softmax(head_k(h_k))       H → Vd,  k = 1..K

Each head_k is the draft's own and starts from the target's rows (`head: trained`), or all are the target's head
(`frozen`). Loss Σ_k decay^(k−1) · cross-entropy with the text. No head knows what the others drew.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from deepspec.drafts.confidence import ConfidenceHead
from deepspec.drafts.contract import (
    Beginning,
    Committed,
    Control,
    DraftBatch,
    DraftContext,
    DraftLoss,
    Proposal,
    TargetModel,
    TrainableDraft,
)
from deepspec.drafts.layers import head_rows
from deepspec.drafts.options import MedusaOptions
from deepspec.drafts.slots import propose_from_slots
from deepspec.drafts.statistics import PARTS, WITHOUT_CONFIDENCE, StepStatistics
from deepspec.drafts.step_weights import WeightedSteps
from deepspec.drafts.unrolled import shift, supervised


class MedusaConfig(PreTrainedConfig):
    """capture_layers: the target's last layer alone."""

    model_type = "deepspec_medusa"

    def __init__(
        self,
        hidden_size: int = 64,
        vocab_size: int = 256,
        draft_vocab_size: int | None = None,
        capture_layers: Sequence[int] = (0,),
        heads: int = 5,
        step_weights: str = "decay",
        step_decay: float = 0.8,
        head: str = "trained",
        confidence: bool = False,
        **rest: Any,
    ) -> None:
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size
        self.draft_vocab_size = draft_vocab_size
        self.capture_layers = list(capture_layers)
        self.heads = heads
        self.step_weights = step_weights
        self.step_decay = step_decay
        self.head = head
        self.confidence = confidence
        super().__init__(**rest)


class MedusaHead(nn.Module):
    """rows: of its own head, None = none."""

    def __init__(self, hidden: int, rows: int | None) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.lm_head = None if rows is None else nn.Linear(hidden, rows, bias=False)

    def forward(self, normed: Tensor) -> Tensor:
        """f [..., H] → h [..., H]."""
        return normed + nn.functional.silu(self.linear(normed))


@dataclass
class MedusaState:
    """pending [B, 1]; hidden [B, H], the target's last hidden state at the position before, not normed."""

    context: DraftContext
    pending: Tensor
    hidden: Tensor


class MedusaDraft(TrainableDraft):
    one_pass = True
    config_class = MedusaConfig
    base_model_prefix = "draft"
    feature_reach = 1
    heads: Any  # nn.ModuleList of MedusaHead
    confidence_head: ConfidenceHead | None
    target_ids: Tensor | None

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        hidden, rows = config.hidden_size, config.draft_vocab_size or config.vocab_size
        own = rows if config.head == "trained" else None
        self.heads = nn.ModuleList(MedusaHead(hidden, own) for _ in range(config.heads))
        self.confidence_head = ConfidenceHead(hidden, hidden) if config.confidence else None
        ids = torch.arange(config.draft_vocab_size) if config.draft_vocab_size else None
        self.register_buffer("target_ids", ids)
        self.post_init()

    @classmethod
    def from_target(cls, options: MedusaOptions, target: Any, target_ids: Tensor | None) -> "MedusaDraft":
        """A fresh draft: at first every head says what the target says of the pending token."""
        config = MedusaConfig(
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=None if target_ids is None else len(target_ids),
            capture_layers=[target.num_layers - 1],
            heads=options.heads,
            step_weights=options.step_weights,
            step_decay=options.step_decay,
            head=options.head,
            confidence=options.confidence,
        )
        draft = cls(config)
        with torch.no_grad():
            if target_ids is not None and draft.target_ids is not None:
                draft.target_ids.copy_(target_ids)
            if options.head == "trained":
                rows = head_rows(target, target_ids)
                for head in draft.heads:
                    head.lm_head.weight.copy_(rows)
        return draft

    @property
    def default_loss(self) -> dict[str, float]:
        return {"ce": 1.0, **({"confidence": 1.0} if self.confidence_head is not None else {})}

    @property
    def loss_parts(self) -> tuple[str, ...]:
        return WITHOUT_CONFIDENCE if self.confidence_head is None else tuple(PARTS)

    # ------------------------------------------------------------------ training

    def forward(self, batch: DraftBatch) -> DraftLoss:
        """All heads at every supervised anchor; `batch.steps` beyond K are never supervised."""
        target, held = batch.context.target, self.config.heads
        steps = batch.steps or held
        by_anchor = supervised(batch.loss_mask, batch.documents, steps)
        by_anchor[..., held:] = False
        parts = batch.loss_parts or tuple(self.default_loss)
        statistics = StepStatistics(batch, by_anchor, target, self.target_ids, parts)
        weighted = WeightedSteps(statistics, self.config.step_weights, self.config.step_decay)
        anchors = by_anchor[..., 0]
        normed = self._normed(target, batch.features[shift(anchors, 1)])  # an anchor's row is the one before
        for step in range(min(steps, held)):
            valid = by_anchor[..., step]
            hidden = self.heads[step](normed[valid[anchors]])
            previous = shift(batch.tokens, step)[valid]
            logits = partial(self._logits_of, target, step, hidden)
            weighted.add(step, logits, self._confidence(target, hidden, previous))
        return weighted.loss()

    def _normed(self, target: TargetModel, hidden: Tensor) -> Tensor:
        return target.norm(hidden).to(self.dtype)

    def _logits_of(self, target: TargetModel, index: int, hidden: Tensor, rows: slice) -> Tensor:
        return self._logits(target, index, hidden[rows])

    def _logits(self, target: TargetModel, index: int, hidden: Tensor) -> Tensor:
        """h of head `index`, [n, H] → [n, Vd]."""
        head = self.heads[index].lm_head
        return target.head(hidden, self.target_ids) if head is None else head(hidden)

    def _confidence(self, target: TargetModel, hidden: Tensor, previous: Tensor) -> Tensor | None:
        """Raw, [...]. hidden: [..., H]; previous: [...] the tokens before. It teaches the heads nothing."""
        if self.confidence_head is None:
            return None
        return self.confidence_head(hidden.detach(), target.embed(previous).to(hidden.dtype))

    # ------------------------------------------------------------------ decoding

    def begin(self, beginning: Beginning) -> MedusaState:
        return MedusaState(beginning.context, beginning.tokens[:, -1:], beginning.features[:, -1])

    def join(self, state: MedusaState | None, new: MedusaState) -> MedusaState:
        if state is None:
            return new
        state.pending = torch.cat([state.pending, new.pending])
        state.hidden = torch.cat([state.hidden, new.hidden])
        return state

    def propose(self, state: MedusaState, control: Control) -> Proposal:
        """One pass of the heads, then a chain or a tree of what they say."""
        target, count = state.context.target, min(control.max_tokens, self.config.heads)
        normed = self._normed(target, state.hidden)
        hidden = [head(normed)[:, None] for head in self.heads[:count]]
        if self.heads[0].lm_head is None:  # one pass of the target's head for all
            every = self._logits(target, 0, torch.cat(hidden, 1).flatten(0, 1))
            logits = every.unflatten(0, (len(normed), count))
        else:
            logits = torch.stack([self._logits(target, k, hidden[k][:, 0]) for k in range(count)], 1)

        def slot(
            index: int, previous: Tensor, memory: Tensor | None
        ) -> tuple[Tensor, Tensor | None, Tensor | None]:
            nodes = previous.shape[1]
            confidence = self._confidence(target, hidden[index].expand(-1, nodes, -1), previous)
            return logits[:, index, None].expand(-1, nodes, -1), confidence, None

        return propose_from_slots(control, state.pending, count, slot, self.target_ids)

    def update(self, state: MedusaState, committed: Committed) -> None:
        counts = torch.tensor(committed.counts, device=committed.tokens.device)
        rows = torch.arange(len(counts), device=counts.device)
        state.pending = committed.tokens[rows, counts - 1][:, None]
        state.hidden = committed.features[rows, counts - 1]

    def select(self, state: MedusaState, rows: Sequence[int]) -> None:
        state.pending, state.hidden = state.pending[list(rows)], state.hidden[list(rows)]
