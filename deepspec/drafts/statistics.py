"""Step by step, from a draft's logits at supervised anchors to a `DraftLoss`.

Memory: the logits of all steps, and what the loss keeps of each for the backward pass, are several arrays of
(positions × steps × draft vocabulary), and the teacher's are one of (positions × draft vocabulary). Where the former are
too much, a step is taken in pieces whose logits are computed again in the backward pass; where the latter is, the
teacher's too. No array of such a size exists then, at the price of the heads' forward once more.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from deepspec.drafts import losses
from deepspec.drafts.contract import DraftBatch, DraftLoss, TargetModel
from deepspec.drafts.losses import SumAndWeight, Teacher, draft_ids, overlap, prob_of, teacher_on_vocab
from deepspec.drafts.unrolled import shift

# elements of logits, over all steps, that may be kept for the backward pass: 1 GiB in float32
AT_ONCE = 1 << 28
TEACHER_AT_ONCE = (
    1 << 28
)  # elements of the teacher's distributions that are kept: 1 GiB; else they are made twice a step
PIECE = 1 << 24  # elements of logits that exist at a time where those would be more

LogitsOf = Callable[[slice], Tensor]  # of a step's n anchors these → [m, Vd]


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


@dataclass
class _Anchors:
    """One step's n anchors. rows: [B, T] bool, where they are; index: [n] into the positions that a teacher is
    needed for; text: [n] target ids of the tokens that follow. measured: first anchors of the pieces that have been."""

    step: int
    rows: Tensor
    index: Tensor
    text: Tensor
    logits: LogitsOf
    weight: Tensor | float
    confidence: Tensor | None
    measured: set[int] = field(default_factory=set)


class StepStatistics:
    """Collects the K steps that a draft takes from every anchor of packed rows, for any family.

    From anchor a (the pending token is t_a), step k = 1..K (index k−1) predicts t_{a+k} and is taught by
    P(a+k−1), the target's distribution of it. The teacher is computed only for the positions that some step needs,
    only on the draft's vocabulary, and once if it can be kept.

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
        self.valid, self.vocab, self.parts, self.target = valid, vocab, parts, target
        self.next_tokens = shift(batch.tokens, 1)
        needed = torch.zeros_like(batch.loss_mask)
        for index in range(valid.shape[-1]):
            needed[:, index:] |= valid[:, : valid.shape[1] - index, index]
        self.row_of = torch.cumsum(needed.flatten(), 0).view_as(batch.tokens) - 1
        self.hidden, self.text = batch.last_hidden[needed], self.next_tokens[needed]
        self.width = target.vocab_size if vocab is None else len(vocab)
        self.in_pieces = int(valid.sum()) * self.width > AT_ONCE
        many = self.in_pieces and len(self.text) * self.width > TEACHER_AT_ONCE
        self.teacher = None if many else self._taught(slice(None))
        zero = batch.features.new_zeros((), dtype=torch.float32)
        self.sums, self.weights = dict.fromkeys(parts, zero), dict.fromkeys(parts, zero)
        shape, device = valid.shape, valid.device
        self.hits = torch.zeros(shape, dtype=torch.bool, device=device)
        self.match = torch.zeros(shape, dtype=torch.bool, device=device)
        self.overlap = torch.zeros(shape, dtype=torch.float32, device=device)
        self.q_text = torch.zeros(shape, dtype=torch.float32, device=device)
        self.p_text = torch.zeros(shape, dtype=torch.float32, device=device)

    def add(
        self, step: int, logits: LogitsOf, weight: Tensor | float = 1.0, confidence: Tensor | None = None
    ) -> None:
        """Step `step` = 0..K−1 at the n anchors where valid[..., step], in row-major order.

        weight: a number or [n]. confidence: [n] raw, of a draft that has a confidence head.
        """
        rows = self.valid[..., step]
        index, text = shift(self.row_of, step)[rows], shift(self.next_tokens, step)[rows]
        anchors = _Anchors(step, rows, index, text, logits, weight, confidence)
        for piece in self._pieces(len(index)):
            again = self.in_pieces and torch.is_grad_enabled()
            found = (
                checkpoint(self._piece, anchors, piece, use_reentrant=False)
                if again
                else self._piece(anchors, piece)
            )
            for name, part in found.items():
                self.add_part(name, part)

    def add_part(self, name: str, part: SumAndWeight) -> None:
        """Add to a part of the loss, if it is wanted."""
        if name in self.sums:
            self.sums[name] = self.sums[name] + part[0].to(torch.float32)
            self.weights[name] = self.weights[name] + part[1].to(torch.float32)

    @torch.no_grad()
    def overlap_of(self, step: int, logits: LogitsOf) -> Tensor:
        """Σ_v min(p, q) [n] of step `step` at the n anchors, before it is added."""
        index = shift(self.row_of, step)[self.valid[..., step]]
        return torch.cat(
            [
                overlap(logits(piece), self._teacher(index[piece]).log_probs)
                for piece in self._pieces(len(index))
            ]
        )

    def _pieces(self, count: int) -> Iterator[slice]:
        """Of a step's anchors; one, possibly of none, where all may be kept."""
        width = max(1, PIECE // self.width) if self.in_pieces else max(1, count)
        for first in range(0, max(1, count), width):
            yield slice(first, min(first + width, count))

    def _piece(self, anchors: _Anchors, piece: slice) -> dict[str, SumAndWeight]:
        logits, teacher = anchors.logits(piece), self._teacher(anchors.index[piece])
        weight, confidence = anchors.weight, anchors.confidence
        seen = _Step(
            logits=logits,
            log_probs=teacher.log_probs,
            kept_mass=teacher.kept_mass,
            text=anchors.text[piece],
            vocab=self.vocab,
            weight=weight[piece] if isinstance(weight, Tensor) else weight,
            confidence=None if confidence is None else confidence[piece],
        )
        if piece.start not in anchors.measured:  # not once more in the backward pass
            anchors.measured.add(piece.start)
            with torch.no_grad():
                self._measure(anchors, piece, seen, teacher)
        return {name: PARTS[name](seen) for name in self.parts if name in PARTS}

    def _teacher(self, index: Tensor) -> Teacher:
        """Of these positions among those that need one."""
        held = self.teacher
        if held is None:
            return self._taught(index)
        text = None if held.text_prob is None else held.text_prob[index]
        return Teacher(held.log_probs[index], held.kept_mass[index], held.argmax[index], text)

    def _taught(self, index: Tensor | slice) -> Teacher:
        # The target's own arithmetic, whatever the draft's training runs in.
        with torch.autocast(self.hidden.device.type, enabled=False):
            return teacher_on_vocab(self.target.logits, self.hidden[index], self.vocab, text=self.text[index])

    def _measure(self, anchors: _Anchors, piece: slice, seen: _Step, teacher: Teacher) -> None:
        best = seen.logits.argmax(-1)
        best = best if self.vocab is None else self.vocab[best]
        q = seen.logits.log_softmax(-1, dtype=torch.float32)
        batch, place = (x[piece] for x in anchors.rows.nonzero(as_tuple=True))
        at = batch, place, anchors.step
        self.hits[at] = best == seen.text
        self.match[at] = best == teacher.argmax
        self.overlap[at] = overlap(seen.logits, seen.log_probs).float()
        self.q_text[at] = prob_of(q, draft_ids(seen.text, self.vocab)).float()
        if teacher.text_prob is not None:
            self.p_text[at] = teacher.text_prob.float()

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
