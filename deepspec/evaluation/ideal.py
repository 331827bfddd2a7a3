"""How fast decoding could be if only the modules cost time: bare step times, measured outside the engine."""

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from deepspec.decoding.request import Round
from deepspec.evaluation.result import StepTimes

Step = Callable[[], None]

MOST_LENGTHS = 8  # of rounds that are timed; the times of those between are interpolated
MOST_PROMPTS = 16  # at whose text steps are timed
LEAST_SAMPLES = 12  # of each step, over all prompts


class StepClock:
    """Times bare steps in turns with the decodings of a run, a few after each prompt: what the machine is like
    then, it is like for both, and their ratio does not depend on it.

    k: most drafted tokens of a round. prompts: how many the run has. whole: a round drafts and reads all k or
    none, as of a tree.
    """

    def __init__(
        self, k: int, prompts: int, clock: Callable[[], float] = time.perf_counter, whole: bool = False
    ) -> None:
        self.k, self.clock = k, clock
        self.every = max(1, -(-prompts // MOST_PROMPTS))
        self.samples = max(1, -(-LEAST_SAMPLES // max(1, prompts // self.every)))
        self.contexts: list[int] = []
        self.verified: dict[int, list[float]] = {n: [] for n in ([1, k + 1] if whole else lengths(k + 1))}
        self.drafted: dict[int, list[float]] = {j: [] for j in ([k] if whole else lengths(k))}

    def wants(self, number: int) -> bool:
        """Whether steps are timed after prompt `number` (0-based)."""
        return number % self.every == 0

    def take(self, verify: Callable[[int], Step], draft: Callable[[int], Step], context: int) -> None:
        """Time every step `samples` times, forwards and backwards, after once uncounted.

        verify(n): a step in which the target reads n tokens on top of `context` cached ones, and forgets them.
        draft(j): a step in which the draft proposes j tokens after a text of `context` tokens. A step returns
        when its work is done (it synchronises its device).
        """
        steps = [(verify(n), taken) for n, taken in self.verified.items()]
        steps += [(draft(j), taken) for j, taken in self.drafted.items()]
        for step, _ in steps:
            step()
        for turn in range(self.samples):
            for step, taken in reversed(steps) if turn % 2 else steps:
                start = self.clock()
                step()
                taken.append(self.clock() - start)
        self.contexts.append(context)

    def result(self) -> StepTimes | None:
        """Medians; None if nothing was timed."""
        if not self.contexts:
            return None
        return StepTimes(
            context=round(sum(self.contexts) / len(self.contexts)),
            verify=_between(self.verified, self.k + 1),
            draft=_between(self.drafted, self.k),
            repeats=self.samples * len(self.contexts),
        )


def lengths(longest: int) -> list[int]:
    """1 … longest, or where that is more than `MOST_LENGTHS`, so many of them at growing distances."""
    if longest <= MOST_LENGTHS:
        return list(range(1, longest + 1))
    return sorted({round(n) for n in np.geomspace(1, longest, MOST_LENGTHS)})


def _between(taken: dict[int, list[float]], longest: int) -> list[float]:
    """Seconds of 1 … longest: medians, and straight lines between them."""
    medians = [statistics.median(seconds) for seconds in taken.values()]
    return np.interp(range(1, longest + 1), list(taken), medians).tolist()


def ideal_seconds(rounds: Sequence[Round], steps: StepTimes) -> tuple[float, float]:
    """What these rounds' tokens cost plainly, Σ tokens·T(1), and at best, Σ (T_draft + T_verify(K_r+1)).

    K_r is the number of drafted tokens that the target read in that round; a round that drafted nothing pays no
    draft. Records of before trees do not tell it: what was verified, or, cut by an end token, all that was drafted.
    """
    plain = sum(r.committed for r in rounds) * steps.verify[0]
    read = [r.scheduled if r.scheduled is not None else (r.drafted if r.cut else r.verified) for r in rounds]
    best = sum(steps.verify[n] for n in read) + sum(steps.draft[r.drafted - 1] for r in rounds if r.drafted)
    return plain, best
