"""Offline acceptance length: the engine's rounds replayed on text the target has already written.

Drafting from every anchor of a text at once says what the engine would have proposed after each prefix, so
the rounds it would have gone through can be followed without decoding: start with an answer's first token
pending, accept n drafted tokens, commit them and the target's own next one, go on from there. For greedy text
this is the engine round for round; for text drawn from the target, accepting the text's token x with
min(1, q(x)/p(x)) is the law of token rejection: min(p, q)(x) / p(x) is the chance that x came from the draft,
given that x came (Leviathan et al. 2023). On text of another origin it is an estimate only.

The draft's statistics hold q and p at temperature 1. Text drawn at another temperature above 0 was drawn from
another p and must not be walked with them: the result would be the acceptance length of no decoding at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepspec.drafts.contract import DraftLoss


@dataclass(frozen=True)
class Walk:
    """Counts of the rounds walked; `+` joins those of other rows or ranks.

    rounds; committed: tokens kept in them; cut: rounds in which the answer ended among the accepted tokens,
    so that there was no token of the target's own; answers. By drafted position k = 1.. (index k−1):
    verified, rounds in which the answer had a token there; reached, those that accepted the k−1 before;
    accepted.
    """

    rounds: int
    committed: int
    cut: int
    answers: int
    verified: tuple[int, ...]
    reached: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def tau(self) -> float | None:
        """Tokens a round, the target's own included; None without a round."""
        return self.committed / self.rounds if self.rounds else None

    @property
    def conditional(self) -> list[float | None]:
        """Acceptance at k given that the positions before it were accepted; None without a sample."""
        return [_ratio(a, b) for a, b in zip(self.accepted, self.reached, strict=True)]

    @property
    def unconditional(self) -> list[float | None]:
        """Share of the rounds with a k-th position that accepted it; None without a sample."""
        return [_ratio(a, b) for a, b in zip(self.accepted, self.verified, strict=True)]

    def counts(self) -> list[int]:
        """All counts in a fixed order, for summing over ranks; `from_counts` reads them back."""
        totals = [self.rounds, self.committed, self.cut, self.answers]
        return [*totals, *self.verified, *self.reached, *self.accepted]

    @classmethod
    def from_counts(cls, counts: Sequence[int]) -> "Walk":
        rounds, committed, cut, answers, *by_position = [int(count) for count in counts]
        k = len(by_position) // 3
        verified, reached, accepted = (tuple(by_position[i * k : (i + 1) * k]) for i in range(3))
        return cls(rounds, committed, cut, answers, verified, reached, accepted)

    def __add__(self, other: "Walk") -> "Walk":
        return Walk.from_counts([a + b for a, b in zip(self.counts(), other.counts(), strict=True)])


def greedy_accepts(loss: DraftLoss) -> Tensor:
    """[B, T, K] bool: the drafted argmax is the text's token."""
    if loss.hits is None:
        raise ValueError("The draft's forward gave no `hits`.")
    return loss.hits


def sampled_accepts(loss: DraftLoss, uniforms: Tensor) -> Tensor:
    """[B, T, K] bool: u < min(1, q/p) of the text's token.

    uniforms: [B, T] in [0, 1), one for every token of the text. Step k from anchor a takes that of token a+k,
    which a walk judges at most once.
    """
    if loss.q_text is None or loss.p_text is None:
        raise ValueError("The draft's forward gave no `q_text` and `p_text`.")
    q, p = loss.q_text.double(), loss.p_text.double()
    steps, length = q.shape[-1], q.shape[-2]
    judged = torch.arange(length)[:, None] + torch.arange(1, steps + 1)
    u = uniforms.to(q)[:, judged.clamp(max=length - 1).to(q.device)]
    return (q >= p) | (u * p < q)


def keyed_uniforms(seed: int, row_ids: Sequence[int], length: int) -> Tensor:
    """[len(row_ids), length] float64 in [0, 1); each value depends on (seed, row id, position) alone."""
    keys = [np.array([seed % 2**64, row % 2**64], dtype=np.uint64) for row in row_ids]
    drawn = [np.random.Generator(np.random.Philox(key=key)).random(length) for key in keys]
    return torch.from_numpy(np.array(drawn, dtype=np.float64).reshape(len(row_ids), length))


def walk(accepts: Tensor, valid: Tensor, loss_mask: Tensor, documents: Tensor) -> Walk:
    """Walk every answer of packed rows with K = accepts.shape[-1] drafted tokens a round.

    accepts, valid: [B, T, K] bool by anchor, as in `DraftLoss`. loss_mask: [B, T]; documents: [B, T], −1 =
    padding. An answer is a run of supervised tokens in one document; its first anchor that can draft is the
    first pending token (the one that a prefill gives).
    """
    n_accepted = (accepts & valid).int().cumprod(-1).sum(-1).tolist()
    n_drafted = valid.sum(-1).tolist()  # fewer than K where the answer ends or the draft sees less far ahead
    k = accepts.shape[-1]
    total = Walk(0, 0, 0, 0, *((0,) * k,) * 3)
    for row, (mask, document) in enumerate(zip(loss_mask.bool().tolist(), documents.tolist(), strict=True)):
        for start, end in _answers(mask, document):
            total += _walk_answer(n_accepted[row], n_drafted[row], start, end, k)
    return total


def _answers(mask: list[bool], document: list[int]) -> list[tuple[int, int]]:
    """First and last position of every run of supervised tokens."""
    found: list[tuple[int, int]] = []
    for at, supervised in enumerate(mask):
        if not supervised or document[at] < 0:
            continue
        if at and mask[at - 1] and document[at - 1] == document[at]:
            found[-1] = (found[-1][0], at)
        else:
            found.append((at, at))
    return found


def _walk_answer(n_accepted: list[int], n_drafted: list[int], start: int, end: int, k: int) -> Walk:
    pending = start
    while pending < end and not n_drafted[pending]:
        pending += 1
    rounds = committed = cut = 0
    verified, reached, accepted = [0] * k, [0] * k, [0] * k
    walked = pending < end
    while pending < end:
        left = min(n_drafted[pending], end - pending)
        n = min(n_accepted[pending], left)
        ends_inside = pending + n == end
        for at in range(left):
            verified[at] += 1
            reached[at] += at <= n
            accepted[at] += at < n
        rounds += 1
        cut += ends_inside
        kept = n if ends_inside else n + 1
        committed += kept
        pending += kept
    return Walk(rounds, committed, cut, int(walked), tuple(verified), tuple(reached), tuple(accepted))


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
