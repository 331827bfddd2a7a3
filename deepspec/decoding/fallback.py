"""When speculation loses: back to plain rounds, and a look now and then whether it would win again.

Decisions depend on earlier rounds alone, so sampled text keeps its distribution. They depend on measured times:
greedy text does not change with them, but which sampled text is drawn may differ from one run to the next.
"""

from collections import deque
from dataclasses import dataclass, field

from deepspec.decoding.estimate import DecayedMean

TRIAL = 4  # timed speculative rounds before plain ones are tried
PLAIN_PROBE = 2  # plain rounds timed at a time while speculation wins,
PLAIN_EVERY = 128  # after so many speculative ones
PROBE = (
    4  # speculative rounds tried at a time while speculation loses; the first pays for what the draft missed
)
FIRST_WAIT, LONGEST_WAIT = 16, 512  # plain rounds before such a trial; doubled with every one that fails


@dataclass
class _Times:
    """Seconds of past rounds with one number of rows."""

    plain: DecayedMean = field(default_factory=DecayedMean)
    speculative: DecayedMean = field(default_factory=DecayedMean)
    since_plain: int = 0


class Fallback:
    """Decides before each round of an engine whether to speculate in it.

    A round is worth its expected tokens over its seconds, both decayed means over past rounds, the seconds over
    those with as many rows.
    """

    def __init__(self) -> None:
        self.times: dict[int, _Times] = {}
        self.ahead: deque[bool] = deque()  # what was decided for the next rounds
        self.wait, self.waited = FIRST_WAIT, 0
        self.after_speculative = False

    def speculate(self, expected: float, rows: int) -> bool:
        """expected: tokens that a speculative round would commit, all rows together."""
        if not self.ahead:
            self.ahead.extend(self._decide(expected, rows))
        return self.ahead.popleft()

    def record(self, speculative: bool, rows: int, seconds: float) -> None:
        """What the round took. A speculative round that follows none is not timed: its draft catches up."""
        times = self._times(rows)
        if not speculative:
            times.plain.add(seconds)
            times.since_plain = 0
            self.waited += 1
        else:
            times.since_plain += 1
            if self.after_speculative:
                times.speculative.add(seconds)
        self.after_speculative = speculative

    def _decide(self, expected: float, rows: int) -> list[bool]:
        times = self._times(rows)
        plain, speculative = times.plain.value, times.speculative.value
        if speculative is None or (plain is None and times.since_plain <= TRIAL):
            return [True]
        if plain is None or times.since_plain >= PLAIN_EVERY:
            return [False] * PLAIN_PROBE
        if expected / speculative > rows / plain:
            self.wait, self.waited = FIRST_WAIT, 0
            return [True]
        if self.waited < self.wait:
            return [False]
        self.wait, self.waited = min(2 * self.wait, LONGEST_WAIT), 0
        return [True] * PROBE

    def _times(self, rows: int) -> _Times:
        return self.times.setdefault(rows, _Times())
