"""How many drafted tokens a round verifies: pure functions of confidences, survivals and seconds.

confidence c_k: probability that the k-th drafted token is accepted given that those before it were;
survival a_k = Π_{i≤k} c_i. R rows (requests), K drafted tokens a row.

**Non-anticipation.** Whether position k of row r is verified may depend on the context, on the row's drafted
tokens *before* k, on the other rows and on earlier rounds, never on the row's token k or a later one: a token
that is verified only when it looks likely is committed too often. What stands here keeps to it, provided that
c_k is computed before token k is drawn: each stops at the first position that does not pay and looks at no
position behind it. (The best of all lengths after drawing, or a threshold on q(x_k), is not lossless.) Where
nothing is random, greedy decoding or a deterministic draft, any rule may be used.
"""

import math
from collections.abc import Sequence


def tempered(confidence: float, temperature: float) -> float:
    """σ(logit(c) / T): a confidence with the temperature that calibration found for its position."""
    inside = min(max(confidence, 1e-6), 1 - 1e-6)
    return 1 / (1 + math.exp(-math.log(inside / (1 - inside)) / temperature))


class LevelAdmission:
    """The common number of drafted tokens N for an engine that pads its rows, asked level by level: the answer to
    each is known before the next token is drawn (DSpark's scheduler, Cheng et al. 2026, arXiv 2607.05147, in the
    form for a padded engine).

    Level n is admitted while the expected tokens a second, (R + Σ_r Σ_{j≤n} a_rj) / seconds[n], strictly rise;
    the first that does not raise them ends the search. With one row this is the rule of a single stream.

    seconds: of a round that verifies 0, 1, …, K drafted tokens a row, draft included.
    """

    def __init__(self, rows: int, seconds: Sequence[float]) -> None:
        self.seconds = seconds
        self.levels = 0
        self.tokens = float(rows)
        self.open = rows > 0

    def admit(self, survivors: float) -> bool:
        """survivors: Σ_r a_r of the next level, over the rows that can still take a token. Once False, always False."""
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
