"""Every number of a summary, from per-prompt records alone (definitions: the docstrings of `result`)."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from deepspec.decoding.request import Round
from deepspec.evaluation.ideal import ideal_seconds
from deepspec.evaluation.result import (
    Acceptance,
    Decoding,
    Equality,
    EvaluationResult,
    Metric,
    PromptRecord,
    Speed,
    StepTimes,
    Summary,
)
from deepspec.evaluation.statistics import Bootstrap, Column, null

NO_ROUNDS = "no rounds: every answer ended with its first token"
NO_TOKENS = "no tokens after the first"
NO_STEPS = "the bare modules' step times were not measured"
NO_PRICE = "evaluate.price_per_hour is not set"
NOT_TOLD = "this decoder does not tell its time split"
NOT_REACHED = "no round verified a token at this position"

Decodings = Callable[[PromptRecord], list[Decoding]]


def summarise_result(result: EvaluationResult) -> tuple[Summary, dict[str, Summary]]:
    """The overall summary and one a category, recomputed from a result's records and settings."""
    conditions = result.conditions
    price, seed = conditions.price_per_hour, conditions.seed

    def of(records: Sequence[PromptRecord]) -> Summary:
        return summarise(
            records, resamples=conditions.resamples, seed=seed, steps=result.step_times, price_per_hour=price
        )

    names = sorted({record.category for record in result.records})
    return of(result.records), {name: of([r for r in result.records if r.category == name]) for name in names}


def summarise(
    records: Sequence[PromptRecord],
    *,
    resamples: int = 2000,
    seed: int = 0,
    steps: StepTimes | None = None,
    price_per_hour: float | None = None,
) -> Summary:
    """All numbers of one group of prompts."""
    boot = Bootstrap(len(records), resamples, seed)
    rounds = [[r for d in record.speculative for r in d.rounds] for record in records]
    number = _column(len(rs) for rs in rounds)
    kept = _column(sum(r.committed for r in rs) for rs in rounds)
    return Summary(
        prompts=len(records),
        rounds=int(number.sum()),
        round_tokens=int(kept.sum()),
        cut_rounds=sum(r.cut for rs in rounds for r in rs),
        tau=boot.ratio(lambda tokens, n: tokens / n, kept, number, reason=NO_ROUNDS),
        speedup=_speedup(boot, records, _fastest, prefill=False),
        speedup_end_to_end=_speedup(boot, records, _fastest, prefill=True),
        speedup_same_loop=same_loop_speedup(boot, records),
        speedup_same_loop_end_to_end=_speedup(boot, records, _plain, prefill=True),
        ideal_speedup=_ideal(boot, records, rounds, steps),
        efficiency=_efficiency(boot, records, rounds, steps),
        acceptance=_acceptance(boot, rounds),
        committed_histogram=_histogram(rounds),
        plain=_speed(boot, records, _plain, price_per_hour),
        speculative=_speed(boot, records, _speculative, price_per_hour),
        fastest=_speed(boot, records, _fastest, price_per_hour),
        equality=_equality(records),
    )


def _plain(record: PromptRecord) -> list[Decoding]:
    return record.plain


def _speculative(record: PromptRecord) -> list[Decoding]:
    return record.speculative


def _fastest(record: PromptRecord) -> list[Decoding]:
    return record.fastest or record.plain


def _column(values: Iterable[float]) -> Column:
    return np.fromiter(values, dtype=np.float64)


def _totals(records: Sequence[PromptRecord], of: Decodings, prefill: bool) -> tuple[Column, Column]:
    """[n] seconds and [n] tokens they produced; without prefill, its token is not counted either."""
    seconds = _column(sum(d.decode_seconds + prefill * d.prefill_seconds for d in of(r)) for r in records)
    tokens = _column(sum(len(d.tokens) - (not prefill) for d in of(r)) for r in records)
    return seconds, np.maximum(tokens, 0)


def seconds_a_token(decodings: Sequence[Decoding]) -> float | None:
    """Decode seconds over the tokens they made, prefill's not among them."""
    tokens = sum(len(d.tokens) - 1 for d in decodings)
    return sum(d.decode_seconds for d in decodings) / tokens if tokens > 0 else None


def _speedup(boot: Bootstrap, records: Sequence[PromptRecord], against: Decodings, prefill: bool) -> Metric:
    """(plain seconds / plain tokens) / (speculative seconds / speculative tokens), totals over prompts."""
    columns = *_totals(records, against, prefill), *_totals(records, _speculative, prefill)
    return boot.ratio(lambda s, t, u, v: (s / t) / (u / v), *columns, reason=NO_TOKENS)


def same_loop_speedup(boot: Bootstrap, records: Sequence[PromptRecord]) -> Metric:
    """Decode-only speedup against plain decoding by the same loop."""
    return _speedup(boot, records, _plain, prefill=False)


def _ideal_columns(rounds: list[list[Round]], steps: StepTimes) -> tuple[Column, Column]:
    """[n] what the tokens of the rounds cost at one target step each, [n] what the rounds cost at best."""
    pairs = [ideal_seconds(rs, steps) for rs in rounds]
    return _column(plain for plain, _ in pairs), _column(best for _, best in pairs)


def _ideal(
    boot: Bootstrap, records: Sequence[PromptRecord], rounds: list[list[Round]], steps: StepTimes | None
) -> Metric:
    if steps is None:
        return null(NO_STEPS)
    return boot.ratio(lambda plain, best: plain / best, *_ideal_columns(rounds, steps), reason=NO_ROUNDS)


def _efficiency(
    boot: Bootstrap, records: Sequence[PromptRecord], rounds: list[list[Round]], steps: StepTimes | None
) -> Metric:
    if steps is None:
        return null(NO_STEPS)
    columns = *_totals(records, _plain, False), *_totals(records, _speculative, False)
    return boot.ratio(
        lambda s, t, u, v, plain, best: (s / t) / (u / v) / (plain / best),
        *columns,
        *_ideal_columns(rounds, steps),
        reason=NO_ROUNDS,
    )


def _acceptance(boot: Bootstrap, rounds: list[list[Round]]) -> list[Acceptance]:
    deepest = max((r.verified for rs in rounds for r in rs), default=0)
    table = []
    for k in range(1, deepest + 1):
        verified = [[r for r in rs if r.verified >= k] for rs in rounds]
        hits = _column(sum(r.accepted >= k for r in rs) for rs in verified)
        tried = _column(sum(r.accepted >= k - 1 for r in rs) for rs in verified)
        every = _column(len(rs) for rs in verified)
        table.append(
            Acceptance(
                position=k,
                conditional=boot.ratio(lambda h, n: h / n, hits, tried, reason=NOT_REACHED, highest=1.0),
                unconditional=boot.ratio(lambda h, n: h / n, hits, every, reason=NOT_REACHED, highest=1.0),
            )
        )
    return table


def _histogram(rounds: list[list[Round]]) -> list[int]:
    committed = [r.committed for rs in rounds for r in rs]
    return np.bincount(committed, minlength=1)[1:].tolist() if committed else []


def _speed(boot: Bootstrap, records: Sequence[PromptRecord], of: Decodings, price: float | None) -> Speed:
    seconds, tokens = _totals(records, of, prefill=False)
    all_seconds, all_tokens = _totals(records, of, prefill=True)
    ttft = _column(_mean([d.prefill_seconds for d in of(r)]) for r in records)
    tpot = _column(
        _mean([d.decode_seconds / (len(d.tokens) - 1) for d in of(r) if len(d.tokens) > 1]) for r in records
    )
    whole = _column(_mean([d.prefill_seconds + d.decode_seconds for d in of(r)]) for r in records)
    cost = null(NO_PRICE)
    if price is not None:
        cost = boot.ratio(lambda s, t: s / t * price / 3600 * 1e6, all_seconds, all_tokens)
    return Speed(
        tokens_per_second=boot.ratio(lambda t, s: t / s, tokens, seconds, where=tokens, reason=NO_TOKENS),
        tokens_per_second_end_to_end=boot.ratio(lambda t, s: t / s, all_tokens, all_seconds),
        ttft=boot.latency(ttft),
        tpot=boot.latency(tpot),
        end_to_end=boot.latency(whole),
        draft_seconds=_split(boot, records, of, "draft_seconds", tokens),
        verify_seconds=_split(boot, records, of, "verify_seconds", tokens),
        rest_seconds=_split(boot, records, of, "rest_seconds", tokens),
        cost_per_million=cost,
    )


def _split(
    boot: Bootstrap, records: Sequence[PromptRecord], of: Decodings, part: str, tokens: Column
) -> Metric:
    values = [[getattr(d, part) for d in of(record)] for record in records]
    if any(value is None for row in values for value in row):
        return null(NOT_TOLD)
    return boot.ratio(lambda s, t: s / t, _column(sum(row) for row in values), tokens, reason=NO_TOKENS)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _equality(records: Sequence[PromptRecord]) -> Equality:
    compared = [r for r in records if r.equal is not None]
    differing = [r for r in compared if not r.equal]
    proven = sum(r.tie is not None and r.tie.proven for r in differing)
    equal = len(compared) - len(differing)
    return Equality(len(compared), equal, proven, len(differing) - proven)
