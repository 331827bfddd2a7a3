"""How fast decoding could be if only the modules cost time: bare step times, measured outside the engine."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from deepspec.decoding.request import Round
from deepspec.evaluation.result import StepTimes


def time_steps(
    steps: Mapping[int, Callable[[], None]],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[int, float]:
    """Median seconds of each step.

    Every step runs once uncounted; then all run in turn, `repeats` times, forwards and backwards, so that a
    drift of the machine meets them alike. A step returns when its work is done (it synchronises its device).
    """
    for step in steps.values():
        step()
    taken: dict[int, list[float]] = {n: [] for n in steps}
    for turn in range(repeats):
        for n in sorted(steps, reverse=turn % 2 == 1):
            start = clock()
            steps[n]()
            taken[n].append(clock() - start)
    return {n: statistics.median(seconds) for n, seconds in taken.items()}


def measure_steps(
    verify: Callable[[int], Callable[[], None]],
    draft: Callable[[int], Callable[[], None]],
    k: int,
    context: int,
    repeats: int = 7,
) -> StepTimes:
    """Step times for rounds of up to k drafted tokens.

    verify(n): a step in which the target reads n tokens on top of `context` cached ones, and forgets them.
    draft(j): a step in which the draft proposes j tokens after a text of `context` tokens.
    """
    verified = time_steps({n: verify(n) for n in range(1, k + 2)}, repeats)
    drafted = time_steps({j: draft(j) for j in range(1, k + 1)}, repeats)
    return StepTimes(
        context=context,
        verify=[verified[n] for n in range(1, k + 2)],
        draft=[drafted[j] for j in range(1, k + 1)],
        repeats=repeats,
    )


def ideal_seconds(rounds: Sequence[Round], steps: StepTimes) -> tuple[float, float]:
    """What these rounds' tokens cost plainly, Σ tokens·T(1), and at best, Σ (T_draft + T_verify(K_r+1)).

    K_r is the number of tokens that round verified; a round that drafted nothing pays no draft. A round cut by
    an end token records fewer than the target read: it pays for all that were drafted.
    """
    plain = sum(r.committed for r in rounds) * steps.verify[0]
    read = [r.drafted if r.cut else r.verified for r in rounds]
    best = sum(steps.verify[n] for n in read) + sum(steps.draft[r.drafted - 1] for r in rounds if r.drafted)
    return plain, best
