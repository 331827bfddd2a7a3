"""How fast decoding could be if only the modules cost time: bare step times, measured outside the engine."""

from collections.abc import Callable, Sequence

from deepspec.decoding.request import Round
from deepspec.decoding.steps import time_steps
from deepspec.evaluation.result import StepTimes


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

    K_r is the number of drafted tokens that the target read in that round; a round that drafted nothing pays no
    draft. Records of before trees do not tell it: what was verified, or, cut by an end token, all that was drafted.
    """
    plain = sum(r.committed for r in rounds) * steps.verify[0]
    read = [r.scheduled if r.scheduled is not None else (r.drafted if r.cut else r.verified) for r in rounds]
    best = sum(steps.verify[n] for n in read) + sum(steps.draft[r.drafted - 1] for r in rounds if r.drafted)
    return plain, best
