"""Step by step, from a draft's logits at supervised rows to a `DraftLoss`."""

import torch
from torch import Tensor

from deepspec.drafts.contract import DraftBatch, DraftLoss, TargetModel
from deepspec.drafts.losses import Teacher, draft_ids, overlap, prob_of, soft_cross_entropy, teacher_on_vocab
from deepspec.drafts.unrolled import shift


class StepStatistics:
    """Collects an EAGLE-like draft's steps over packed rows.

    Row i at step k (index k−1) predicts t_{i+1+k} and is taught by P(i+k), the target's distribution there.
    The teacher is computed once, for the positions some step needs, and only on the draft's vocabulary.

    valid: [B, T, K], as from `unrolled.supervised`. vocab: [Vd] or None.
    """

    def __init__(self, batch: DraftBatch, valid: Tensor, target: TargetModel, vocab: Tensor | None) -> None:
        self.valid, self.vocab = valid, vocab
        self.next_tokens = shift(batch.tokens, 1)
        # P(j) is needed where t_j and t_{j+1} are the assistant's, of one document.
        needed = torch.zeros_like(batch.loss_mask)
        for index in range(valid.shape[-1]):
            needed[:, index + 1 :] |= valid[:, : valid.shape[1] - index - 1, index]
        self.row_of = torch.cumsum(needed.flatten(), 0).view_as(batch.tokens) - 1
        # The target's own arithmetic, whatever the draft's training runs in.
        with torch.autocast(batch.last_hidden.device.type, enabled=False):
            self.teacher: Teacher = teacher_on_vocab(
                target.logits, batch.last_hidden[needed], vocab, text=self.next_tokens[needed]
            )
        self.sum = batch.features.new_zeros((), dtype=torch.float32)
        self.weight = torch.zeros_like(self.sum)
        shape, device = valid.shape, valid.device
        self.hits = torch.zeros(shape, dtype=torch.bool, device=device)
        self.match = torch.zeros(shape, dtype=torch.bool, device=device)
        self.overlap = torch.zeros(shape, dtype=torch.float32, device=device)
        self.q_text = torch.zeros(shape, dtype=torch.float32, device=device)
        self.p_text = torch.zeros(shape, dtype=torch.float32, device=device)

    def add(self, step: int, logits: Tensor, weight: float) -> None:
        """Step `step` = 0..K−1: logits [n, Vd] at the n rows where valid[..., step]."""
        rows = self.valid[..., step]
        index = shift(self.row_of, step + 1)[rows]
        log_probs, kept = self.teacher.log_probs[index], self.teacher.kept_mass[index]
        total, count = soft_cross_entropy(logits, log_probs, kept, weight)
        self.sum, self.weight = self.sum + total.to(self.sum.dtype), self.weight + count.to(self.sum.dtype)
        with torch.no_grad():
            self._measure(step, rows, index, logits, log_probs)

    def _measure(self, step: int, rows: Tensor, index: Tensor, logits: Tensor, log_probs: Tensor) -> None:
        text = shift(self.next_tokens, step + 1)[rows]
        best = logits.argmax(-1)
        best = best if self.vocab is None else self.vocab[best]
        q = logits.log_softmax(-1, dtype=torch.float32)
        self.hits[..., step][rows] = best == text
        self.match[..., step][rows] = best == self.teacher.argmax[index]
        self.overlap[..., step][rows] = overlap(logits, log_probs).float()
        self.q_text[..., step][rows] = prob_of(q, draft_ids(text, self.vocab)).float()
        if self.teacher.text_prob is not None:
            self.p_text[..., step][rows] = self.teacher.text_prob[index].float()

    def loss(self) -> DraftLoss:
        """The sums, and the statistics moved from row i to its anchor a = i + 1."""
        return DraftLoss(
            sums={"soft_ce": self.sum},
            weights={"soft_ce": self.weight},
            valid=_to_anchor(self.valid),
            hits=_to_anchor(self.hits),
            match=_to_anchor(self.match),
            overlap=_to_anchor(self.overlap),
            q_text=_to_anchor(self.q_text),
            p_text=_to_anchor(self.p_text),
        )


def _to_anchor(x: Tensor) -> Tensor:
    moved = torch.zeros_like(x)
    moved[:, 1:] = x[:, :-1]
    return moved
