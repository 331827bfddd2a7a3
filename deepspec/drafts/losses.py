"""Loss functions of drafts: sums and weights, never means.

Each returns `(sum, weight)`, two scalars in float32 (float64 where the inputs are, so that tests can be
exact); the training loop alone divides, by the weight of the whole optimiser step. Shapes: n positions,
V target vocabulary, Vd draft vocabulary, H hidden size.

Where the draft's vocabulary is smaller than the target's, cross-entropies and KLs compare with the target
restricted to Vd and renormalised, a position weighing as much as the target's mass that was kept; overlap and
total variation compare with the target as it is, the draft being 0 outside Vd (so that 1 − total variation
stays the chance of acceptance).
All take `Teacher.log_probs` as it comes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

SumAndWeight = tuple[Tensor, Tensor]
LOG_PROB_FLOOR = -100.0  # e^-100 is 0 in float32: keeps log 0 out of products without changing any value


@dataclass
class Teacher:
    """The target's next-token distributions p at n positions, seen from the draft's vocabulary.

    log_probs: [n, Vd] log p of each draft token, *not* renormalised: exp sums to `kept_mass`.
    kept_mass: [n] p of all of Vd. argmax: [n] target id of the most probable token of all V.
    text_prob: [n] p of the text's next token, inside Vd or not; None if no text was given.
    """

    log_probs: Tensor
    kept_mass: Tensor
    argmax: Tensor
    text_prob: Tensor | None = None


@torch.no_grad()
def teacher_on_vocab(
    target_logits: Callable[[Tensor], Tensor],
    hidden: Tensor,
    vocab: Tensor | None = None,
    text: Tensor | None = None,
    chunk: int = 256,
) -> Teacher:
    """Run the target's head over n positions; at most `chunk` rows of full logits exist at a time.

    target_logits: [m, H] → [m, V]. hidden: [n, H]. vocab: [Vd] target ids, None = all of V. text: [n] target
    ids of the tokens that follow.
    """
    rows = max(1, chunk)
    texts = text.split(rows) if text is not None else [None] * len(hidden.split(rows))
    parts = [
        _teacher_chunk(target_logits(h), vocab, t) for h, t in zip(hidden.split(rows), texts, strict=True)
    ]
    return Teacher(
        log_probs=torch.cat([part.log_probs for part in parts]),
        kept_mass=torch.cat([part.kept_mass for part in parts]),
        argmax=torch.cat([part.argmax for part in parts]),
        text_prob=torch.cat([part.text_prob for part in parts if part.text_prob is not None])
        if text is not None
        else None,
    )


def _teacher_chunk(full: Tensor, vocab: Tensor | None, text: Tensor | None) -> Teacher:
    full = _wide(full)
    total = full.logsumexp(-1, keepdim=True)
    kept = full if vocab is None else full.index_select(-1, vocab)
    log_probs = kept - total
    return Teacher(
        log_probs=log_probs,
        kept_mass=log_probs.exp().sum(-1),
        argmax=full.argmax(-1),
        text_prob=(full.gather(-1, text[:, None]) - total).exp()[:, 0] if text is not None else None,
    )


def draft_ids(tokens: Tensor, vocab: Tensor | None) -> Tensor:
    """Target ids [...] → ids in the draft's vocabulary [...], −1 where it lacks the token.

    vocab: [Vd] target ids, ascending; None = the draft has the target's vocabulary.
    """
    if vocab is None:
        return tokens
    index = torch.searchsorted(vocab, tokens).clamp(max=len(vocab) - 1)
    return torch.where(vocab[index] == tokens, index, -1)


def prob_of(log_probs: Tensor, ids: Tensor) -> Tensor:
    """Probabilities [n] of the draft ids [n] under `log_probs` [n, Vd]; 0 where the id is −1."""
    found = log_probs.gather(-1, ids.clamp(min=0)[:, None])[:, 0].exp()
    return torch.where(ids >= 0, found, 0.0)


def overlap(logits: Tensor, teacher_log_probs: Tensor) -> Tensor:
    """Σ_v min(p, q), [n]: how often a drafted token passes the rejection test, on average over draws.

    logits: [n, Vd] of the draft. teacher_log_probs: [n, Vd], full p.
    """
    return torch.minimum(_wide(logits).softmax(-1), _wide(teacher_log_probs).exp()).sum(-1)


def soft_cross_entropy(
    logits: Tensor, teacher_logits: Tensor, kept_mass: Tensor | float = 1.0, weight: Tensor | float = 1.0
) -> SumAndWeight:
    """Σ w·m·(−Σ_v p̃ log q) and Σ w·m, p̃ = softmax(teacher_logits).

    logits, teacher_logits: [n, Vd], the latter up to a constant a row.
    kept_mass m, weight w: [n] or a number.
    """
    teacher = _wide(teacher_logits).softmax(-1)
    each = -(teacher * _wide(logits).log_softmax(-1)).sum(-1)
    return _reduce(each, weight, kept_mass)


def kl(
    logits: Tensor, teacher_logits: Tensor, kept_mass: Tensor | float = 1.0, weight: Tensor | float = 1.0
) -> SumAndWeight:
    """Σ w·m·KL(p̃ ‖ q) and Σ w·m: `soft_cross_entropy` less the teacher's entropy, with the same gradient."""
    teacher = _floored_log_softmax(teacher_logits)
    each = (teacher.exp() * (teacher - _wide(logits).log_softmax(-1))).sum(-1)
    return _reduce(each, weight, kept_mass)


def reverse_kl(
    logits: Tensor, teacher_logits: Tensor, kept_mass: Tensor | float = 1.0, weight: Tensor | float = 1.0
) -> SumAndWeight:
    """Σ w·m·KL(q ‖ p̃) and Σ w·m: the draft is punished for what the teacher would not say."""
    draft = _wide(logits).log_softmax(-1)
    each = (draft.exp() * (draft - _floored_log_softmax(teacher_logits))).sum(-1)
    return _reduce(each, weight, kept_mass)


def hard_cross_entropy(logits: Tensor, labels: Tensor, weight: Tensor | float = 1.0) -> SumAndWeight:
    """Σ w·(−log q(label)) and Σ w over the positions whose label the draft has.

    labels: [n] draft ids as from `draft_ids`; −1 (outside Vd) counts neither in the sum nor in the weight.
    """
    inside = labels >= 0
    each = functional.cross_entropy(_wide(logits), labels.clamp(min=0), reduction="none")
    return _reduce(torch.where(inside, each, 0.0), weight, inside.to(each.dtype))


def total_variation(logits: Tensor, teacher_log_probs: Tensor, weight: Tensor | float = 1.0) -> SumAndWeight:
    """Σ w·½‖q − p‖₁ and Σ w, over all of V; ½‖q − p‖₁ = 1 − Σ min(p, q), the chance of a rejection.

    teacher_log_probs: [n, Vd], full p (Leviathan et al. 2023, corollary 3.6).
    """
    return _reduce(1 - overlap(logits, teacher_log_probs), weight)


def acceptance(logits: Tensor, teacher_log_probs: Tensor, weight: Tensor | float = 1.0) -> SumAndWeight:
    """Σ w·(−log Σ_v min(p, q)) and Σ w: the logarithm of the chance of acceptance, whose gradient does not
    fade where that chance is small. teacher_log_probs: [n, Vd], full p.
    """
    floor = torch.finfo(torch.float32).tiny  # no overlap at all gives a large loss and no gradient, never inf
    return _reduce(-overlap(logits, teacher_log_probs).clamp(min=floor).log(), weight)


def confidence_bce(
    confidence: Tensor, logits: Tensor, teacher_log_probs: Tensor, weight: Tensor | float = 1.0
) -> SumAndWeight:
    """Σ w·BCE(σ(confidence), c*) and Σ w; c* = Σ_v min(p, q), not differentiated (DSpark, Cheng et al. 2026).

    confidence: [n] raw. logits, teacher_log_probs: [n, Vd], full p.
    """
    goal = overlap(logits, teacher_log_probs).detach().clamp(0, 1)
    each = functional.binary_cross_entropy_with_logits(
        _wide(confidence), goal.to(_wide(confidence).dtype), reduction="none"
    )
    return _reduce(each, weight)


def smooth_l1(
    prediction: Tensor, goal: Tensor, weight: Tensor | float = 1.0, beta: float = 1.0
) -> SumAndWeight:
    """Σ w·(Huber loss with threshold `beta`, averaged over H) and Σ w, on hidden states [n, H] (EAGLE)."""
    each = functional.smooth_l1_loss(_wide(prediction), _wide(goal), reduction="none", beta=beta).mean(-1)
    return _reduce(each, weight)


def _reduce(each: Tensor, weight: Tensor | float, kept_mass: Tensor | float = 1.0) -> SumAndWeight:
    """`each` [n] under weight·kept_mass; a position of weight 0 gives 0, whatever its loss."""
    weights = torch.ones_like(each) * weight * kept_mass
    return torch.where(weights == 0, 0.0, each * weights).sum(), weights.sum().detach()


def _floored_log_softmax(logits: Tensor) -> Tensor:
    return _wide(logits).log_softmax(-1).clamp(min=LOG_PROB_FLOOR)


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()
