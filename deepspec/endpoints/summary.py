"""From single requests to a level's numbers."""

from collections import Counter
from collections.abc import Callable

import numpy as np

from deepspec.endpoints.result import Answer, Level, LevelSummary, Tail
from deepspec.evaluation.metric import Metric
from deepspec.evaluation.statistics import Bootstrap, null

RESAMPLES = 2000
LEAST = {50: 1, 95: 20, 99: 100}  # answers below which a percentile says nothing
ONE_RUN = "one run of this level: no interval"


def summarise(level: Level) -> LevelSummary:
    """Percentiles over its answers, with intervals over them, and the tokens a second of all together."""
    good = [answer for answer in level.answers if answer.error is None]
    tokens = sum(answer.tokens or 0 for answer in good)
    rate = null("no answer")
    if good and level.seconds > 0:
        rate = Metric(tokens / level.seconds, None, None, len(good), ONE_RUN)
    acceptance = level.acceptance
    return LevelSummary(
        endpoint=level.endpoint,
        concurrency=level.concurrency,
        requests=len(level.answers),
        failed=len(level.answers) - len(good),
        rate_limited=sum(answer.rate_limited for answer in level.answers),
        tokens=tokens,
        counted=dict(Counter(str(answer.counted) for answer in good)),
        tokens_per_second=rate,
        ttft=_tail(good, lambda answer: answer.first),
        tpot=_tail(good, tpot),
        seconds=_tail(good, lambda answer: answer.seconds),
        tau=acceptance.tau if acceptance else None,
        budget=acceptance.budget if acceptance else None,
        no_acceptance=level.no_acceptance,
        errors=dict(Counter(answer.error for answer in level.answers if answer.error)),
    )


def tpot(answer: Answer) -> float | None:
    """Seconds a token after the first; None for answers that have no second one."""
    if answer.first is None or answer.last is None or (answer.tokens or 0) < 2 or answer.chunks < 2:
        return None
    return (answer.last - answer.first) / ((answer.tokens or 0) - 1)


def _tail(answers: list[Answer], of: Callable[[Answer], float | None]) -> Tail:
    values = np.array(
        [np.nan if (value := of(answer)) is None else value for answer in answers], dtype=np.float64
    )
    bootstrap = Bootstrap(len(values), RESAMPLES)
    return Tail(*(bootstrap.percentile(values, q, least) for q, least in LEAST.items()))
