"""Step by step, from a draft's logits at supervised anchors to a `DraftLoss`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspec.drafts import losses
from deepspec.drafts.contract import DraftBatch, DraftLoss, TargetModel
from deepspec.drafts.losses import SumAndWeight, Teacher, draft_ids, overlap, prob_of, teacher_on_vocab
from deepspec.drafts.unrolled import shift


@dataclass
class _Step:
    """What a loss part may look at, at n anchors. Shapes as in `losses`; text: [n] target ids."""

    logits: Tensor
    log_probs: Tensor
    kept_mass: Tensor
    text: Tensor
    vocab: Tensor | None
    weight: Tensor | float
    confidence: Tensor | None


def _confidence(step: _Step) -> SumAndWeight:
    if step.confidence is None:
        raise ValueError("The loss part `confidence` needs a draft with a confidence head.")
    return losses.confidence_bce(step.confidence, step.logits, step.log_probs, step.weight)


PARTS: dict[str, Callable[[_Step], SumAndWeight]] = {
    "soft_ce": lambda s: losses.soft_cross_entropy(s.logits, s.log_probs, s.kept_mass, s.weight),
    "kl": lambda s: losses.kl(s.logits, s.log_probs, s.kept_mass, s.weight),
    "reverse_kl": lambda s: losses.reverse_kl(s.logits, s.log_probs, s.kept_mass, s.weight),
    "ce": lambda s: losses.hard_cross_entropy(s.logits, draft_ids(s.text, s.vocab), s.weight),
    "tv": lambda s: losses.total_variation(s.logits, s.log_probs, s.weight),
    "acceptance": lambda s: losses.acceptance(s.logits, s.log_probs, s.weight),
    "confidence": _confidence,
}
WITHOUT_CONFIDENCE = tuple(name for name in PARTS if name != "confidence")


class StepStatistics:
    """Collects the K steps that a draft takes from every anchor of packed rows, for any family.

    From anchor a (the pending token is t_a), step k = 1..K (index k−1) predicts t_{a+k} and is taught by
    P(a+k−1), the target's distribution of it. The teacher is computed once, for the positions that some step
    needs, and only on the draft's vocabulary.

    valid: [B, T, K] bool by anchor, as from `unrolled.supervised`. vocab: [Vd] or None. parts: names in
    `PARTS`, or of parts that the draft itself adds by `add_part`.
    """

    def __init__(
        self,
        batch: DraftBatch,
        valid: Tensor,
        target: TargetModel,
        vocab: Tensor | None,
        parts: Sequence[str],
    ) -> None:
        self.valid, self.vocab, self.parts = valid, vocab, parts
        self.next_tokens = shift(batch.tokens, 1)
        needed = torch.zeros_like(batch.loss_mask)
        for index in range(valid.shape[-1]):
            needed[:, index:] |= valid[:, : valid.shape[1] - index, index]
        self.row_of = torch.cumsum(needed.flatten(), 0).view_as(batch.tokens) - 1
        # The target's own arithmetic, whatever the draft's training runs in.
        with torch.autocast(batch.last_hidden.device.type, enabled=False):
            self.teacher: Teacher = teacher_on_vocab(
                target.logits, batch.last_hidden[needed], vocab, text=self.next_tokens[needed]
            )
        zero = batch.features.new_zeros((), dtype=torch.float32)
        self.sums, self.weights = dict.fromkeys(parts, zero), dict.fromkeys(parts, zero)
        shape, device = valid.shape, valid.device
        self.hits = torch.zeros(shape, dtype=torch.bool, device=device)
        self.match = torch.zeros(shape, dtype=torch.bool, device=device)
        self.overlap = torch.zeros(shape, dtype=torch.float32, device=device)
        self.q_text = torch.zeros(shape, dtype=torch.float32, device=device)
        self.p_text = torch.zeros(shape, dtype=torch.float32, device=device)

    def add(
        self, step: int, logits: Tensor, weight: Tensor | float = 1.0, confidence: Tensor | None = None
    ) -> None:
        """Step `step` = 0..K−1 at the n anchors where valid[..., step], in row-major order.

        logits: [n, Vd]. weight: a number or [n]. confidence: [n] raw, of a draft that has a confidence head.
        """
        rows = self.valid[..., step]
        index = shift(self.row_of, step)[rows]
        log_probs, kept = self.teacher.log_probs[index], self.teacher.kept_mass[index]
        text = shift(self.next_tokens, step)[rows]
        seen = _Step(logits, log_probs, kept, text, self.vocab, weight, confidence)
        for name in self.parts:
            if name in PARTS:
                self.add_part(name, PARTS[name](seen))
        with torch.no_grad():
            self._measure(step, rows, index, seen)

    def add_part(self, name: str, part: SumAndWeight) -> None:
        """Add to a part of the loss, if it is wanted."""
        if name in self.sums:
            self.sums[name] = self.sums[name] + part[0].to(torch.float32)
            self.weights[name] = self.weights[name] + part[1].to(torch.float32)

    @torch.no_grad()
    def overlap_of(self, step: int, logits: Tensor) -> Tensor:
        """Σ_v min(p, q) [n] of step `step` at the n anchors, before it is added."""
        index = shift(self.row_of, step)[self.valid[..., step]]
        return overlap(logits, self.teacher.log_probs[index])

    def _measure(self, step: int, rows: Tensor, index: Tensor, seen: _Step) -> None:
        best = seen.logits.argmax(-1)
        best = best if self.vocab is None else self.vocab[best]
        q = seen.logits.log_softmax(-1, dtype=torch.float32)
        self.hits[..., step][rows] = best == seen.text
        self.match[..., step][rows] = best == self.teacher.argmax[index]
        self.overlap[..., step][rows] = overlap(seen.logits, seen.log_probs).float()
        self.q_text[..., step][rows] = prob_of(q, draft_ids(seen.text, self.vocab)).float()
        if self.teacher.text_prob is not None:
            self.p_text[..., step][rows] = self.teacher.text_prob[index].float()

    def loss(self) -> DraftLoss:
        """The sums and weights of every part, and the statistics by anchor."""
        return DraftLoss(
            sums=self.sums,
            weights=self.weights,
            valid=self.valid,
            hits=self.hits,
            match=self.match,
            overlap=self.overlap,
            q_text=self.q_text,
            p_text=self.p_text,
        )
