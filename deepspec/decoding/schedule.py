"""How many drafted tokens a round verifies: pure functions of confidences, survivals and seconds.

confidence c_k: probability that the k-th drafted token is accepted given that those before it were;
survival a_k = Π_{i≤k} c_i. R rows (requests), K drafted tokens a row.

**Non-anticipation.** Whether position k of row r is verified may depend on the context, on the row's drafted
tokens *before* k, on the other rows and on earlier rounds, never on the row's token k or a later one: a token
that is verified only when it looks likely is committed too often. Every function here keeps to it, provided that
c_k is computed before token k is drawn: each stops at the first position that does not pay and looks at no
position behind it. (The best of all lengths after drawing, or a threshold on q(x_k), is not lossless.) Where
nothing is random, greedy decoding or a deterministic draft, any rule may be used.
"""

import itertools
import math
from collections.abc import Callable, Sequence


def survival(confidence: Sequence[float]) -> list[float]:
    """[K] confidences → [K] probabilities that the token and all before it are accepted."""
    return list(itertools.accumulate(confidence, lambda before, c: before * c))


def tempered(confidence: float, temperature: float) -> float:
    """σ(logit(c) / T): a confidence with the temperature that calibration found for its position."""
    inside = min(max(confidence, 1e-6), 1 - 1e-6)
    return 1 / (1 + math.exp(-math.log(inside / (1 - inside)) / temperature))


def first_fall(confidence: Sequence[float], threshold: float, max_candidates: int | None = None) -> int:
    """How many tokens to verify: all before the first confidence below `threshold`, `max_candidates` at most."""
    limited = confidence if max_candidates is None else confidence[:max_candidates]
    return next((k for k, c in enumerate(limited) if c < threshold), len(limited))


def admit_levels(survivals: Sequence[Sequence[float]], seconds: Sequence[float]) -> int:
    """The common number of drafted tokens N for an engine that pads its rows: one level of all rows at a time.

    Level n is admitted while the expected tokens a second, (R + Σ_r Σ_{j≤n} a_rj) / seconds[n], strictly rise;
    the first that does not raise them ends the search. With one row this is the rule of a single stream.

    survivals: R lists, a row that can take no more tokens has a shorter one. seconds: of a round that verifies
    0, 1, …, K drafted tokens a row, draft included.
    """
    admission = LevelAdmission(len(survivals), seconds)
    for level in range(max(map(len, survivals), default=0)):
        if not admission.admit(sum(row[level] for row in survivals if level < len(row))):
            break
    return admission.levels


class LevelAdmission:
    """`admit_levels`, asked level by level: the answer to each is known before the next token is drawn."""

    def __init__(self, rows: int, seconds: Sequence[float]) -> None:
        self.seconds = seconds
        self.levels = 0
        self.tokens = float(rows)
        self.open = rows > 0

    def admit(self, survivors: float) -> bool:
        """survivors: Σ_r a_r of the next level. Once False, always False."""
        level = self.levels + 1
        best = self.tokens / self.seconds[self.levels]
        self.open = self.open and level < len(self.seconds)
        self.open = self.open and (self.tokens + survivors) / self.seconds[level] > best
        if self.open:
            self.levels, self.tokens = level, self.tokens + survivors
        return self.open


class RoundPlan:
    """One round's decisions, level by level. With nothing to decide everything drafted is verified.

    room: drafted tokens that each row can still keep. threshold: least confidence. seconds: of a round with
    0, 1, … drafted tokens a row (hardware). temperatures: of the draft's confidences, by level.
    """

    def __init__(
        self,
        room: Sequence[int],
        limit: int,
        threshold: float | None,
        seconds: Sequence[float] | None,
        temperatures: Sequence[float] = (),
    ) -> None:
        self.temperatures, self.level = temperatures, 0
        self.room, self.limit, self.threshold = room, limit, threshold
        self.admission = None if seconds is None else LevelAdmission(len(room), seconds)
        self.survival = [1.0] * len(room)
        self.going = [True] * len(room)
        self.lengths = [0] * len(room)

    def go_on(self, confidence: Sequence[float]) -> list[bool]:
        """Each row's confidence in the next token → whether it is to be drafted and verified."""
        self.level += 1
        going = [
            on and length < min(room, self.limit) and (self.threshold is None or c >= self.threshold)
            for on, length, room, c in zip(self.going, self.lengths, self.room, confidence, strict=True)
        ]
        self.survival = [a * c for a, c in zip(self.survival, confidence, strict=True)]
        if self.admission is not None:
            survivors = sum(a for a, on in zip(self.survival, going, strict=True) if on)
            admitted = self.admission.admit(survivors)
            going = [on and admitted for on in going]
        self.going = going
        self.lengths = [length + on for length, on in zip(self.lengths, going, strict=True)]
        return going

    def told(self, confidence: Sequence[float]) -> list[bool]:
        """`go_on` with what the draft says, calibrated; what past rounds say needs no temperature."""
        if self.level >= len(self.temperatures):
            return self.go_on(confidence)
        temperature = self.temperatures[self.level]
        return self.go_on([tempered(c, temperature) for c in confidence])

    def through(self, confidences: Sequence[Sequence[float]], told: bool = False) -> list[int]:
        """The lengths, of confidences [B][N] that are all known beforehand: no level is looked at behind the first
        that no row enters. told: by the draft."""
        ask = self.told if told else self.go_on
        for level in range(len(confidences[0]) if confidences else 0):
            if not any(ask([row[level] for row in confidences])):
                break
        return self.lengths


def admit_tokens(survivals: Sequence[Sequence[float]], steps_per_second: Callable[[int], float]) -> list[int]:
    """How many drafted tokens of each row to verify, for an engine that flattens its rows into one pass.

    The hardware-aware scheduler of DSpark (Cheng et al. 2026, arXiv 2607.05147): from B = R tokens (the pending
    ones) take single tokens by descending survival (ties: the smaller position, then the earlier row) while
    (τ + a)·SPS(B + 1) rises, τ the tokens expected so far; the first that does not raise it ends the search.

    survivals: R non-increasing lists. steps_per_second: SPS(B) of a forward over B tokens, non-increasing in B.
    """
    rows = len(survivals)
    admitted = [0] * rows
    if rows == 0:
        return admitted
    tokens, width = float(rows), rows
    best = tokens * steps_per_second(width)
    candidates = [(-a, level, row) for row, levels in enumerate(survivals) for level, a in enumerate(levels)]
    for minus_a, level, row in sorted(candidates):
        rate = (tokens - minus_a) * steps_per_second(width + 1)
        if rate <= best:
            break
        tokens, width, best = tokens - minus_a, width + 1, rate
        admitted[row] = level + 1
    return admitted
