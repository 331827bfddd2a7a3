"""Acceptance in detail, from the records alone (definitions: `deepspec.evaluation.findings.Detail`)."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from deepspec.decoding.request import Round
from deepspec.evaluation.findings import Detail, Group, TokenGroup
from deepspec.evaluation.metric import Metric
from deepspec.evaluation.result import Decoding, PromptRecord
from deepspec.evaluation.statistics import Bootstrap, Column
from deepspec.evaluation.summary import NO_ROUNDS, same_loop_speedup

BUCKETS = ((256, "below 256 tokens"), (1025, "256 to 1,024 tokens"))
LONGEST = "above 1,024 tokens"
NOT_TRIED = "no drafted token was verified here"
DECILES = 10


def bucket(tokens: int) -> str:
    """The name of the length bucket."""
    return next((name for end, name in BUCKETS if tokens < end), LONGEST)


def acceptance_detail(records: Sequence[PromptRecord], resamples: int = 2000, seed: int = 0) -> Detail:
    """All of it, with intervals over prompts."""
    boot = Bootstrap(len(records), resamples, seed)
    rounds = [[r for d in record.speculative for r in d.rounds] for record in records]
    every = [r for many in rounds for r in many]
    verified = _column(sum(r.verified for r in many) for many in rounds)
    accepted = _column(sum(r.accepted for r in many) for many in rounds)
    judged = _column(sum(r.verified > 0 for r in many) for many in rounds)
    rejected = _column(sum(r.accepted < r.verified for r in many) for many in rounds)
    counts = np.bincount([r.accepted for r in every]).tolist() if every else []

    def share(hits: Column, of: Column) -> Metric:
        return boot.ratio(lambda h, n: h / n, hits, of, reason=NOT_TRIED, highest=1.0)

    return Detail(
        drafted=sum(r.drafted for r in every),
        verified=int(verified.sum()),
        accepted=int(accepted.sum()),
        hit_rate=share(accepted, verified),
        rejection_rate=share(rejected, judged),
        accepted_histogram=counts,
        groups=[*_prompt_groups(records, resamples, seed), *_context_groups(records, boot)],
        frequency=_by_frequency(records, boot),
        vocabulary=_by_vocabulary(records, boot),
    )


def tries(decoding: Decoding) -> Iterator[tuple[int, bool]]:
    """Every drafted token whose fate the target decided: (index in the answer, accepted).

    The target's own token stands at that index either way: the drafted one where it was accepted, the one that
    replaced it where it was rejected.
    """
    for start, r in starts(decoding):
        for place in range(r.accepted):
            yield start + place, True
        if r.accepted < r.verified and start + r.accepted < len(decoding.tokens):
            yield start + r.accepted, False


def starts(decoding: Decoding) -> Iterator[tuple[int, Round]]:
    """Every round with the index of its first token in the answer (token 0 is the prefill's)."""
    start = 1
    for r in decoding.rounds:
        yield start, r
        start += r.committed


def _prompt_groups(records: Sequence[PromptRecord], resamples: int, seed: int) -> list[Group]:
    """By task, turn and prompt length; a division into one group only says nothing new, but lengths stay apart
    always."""
    found = []
    divisions: tuple[tuple[str, Callable[[PromptRecord], str]], ...] = (
        ("task", lambda record: record.category),
        ("turn", lambda record: f"turn {record.turn}"),
        ("prompt length", lambda record: bucket(record.prompt_tokens)),
    )
    for kind, of in divisions:
        names = sorted({of(record) for record in records}, key=_order)
        if len(names) < 2 and kind != "prompt length":
            continue
        for name in names:
            members = [record for record in records if of(record) == name]
            boot = Bootstrap(len(members), resamples, seed)
            rounds = [[r for d in record.speculative for r in d.rounds] for record in members]
            found.append(_group(kind, name, rounds, boot, members))
    return found


def _context_groups(records: Sequence[PromptRecord], boot: Bootstrap) -> list[Group]:
    """Rounds by the text before them, prompt and answer so far."""
    by_name: dict[str, list[list[Round]]] = {}
    for number, record in enumerate(records):
        for decoding in record.speculative:
            for start, r in starts(decoding):
                name = bucket(record.prompt_tokens + start)
                by_name.setdefault(name, [[] for _ in records])[number].append(r)
    return [
        _group("context", name, rounds, boot)
        for name, rounds in sorted(by_name.items(), key=lambda p: _order(p[0]))
    ]


def _group(
    kind: str,
    name: str,
    rounds: list[list[Round]],
    boot: Bootstrap,
    records: Sequence[PromptRecord] | None = None,
) -> Group:
    number = _column(len(many) for many in rounds)
    committed = _column(sum(r.committed for r in many) for many in rounds)
    return Group(
        kind,
        name,
        prompts=int(np.count_nonzero(number)) if records is None else len(records),
        rounds=int(number.sum()),
        tau=boot.ratio(lambda tokens, n: tokens / n, committed, number, reason=NO_ROUNDS),
        speedup=None if records is None else same_loop_speedup(boot, records),
    )


def _order(name: str) -> tuple[int, str]:
    names = [*(name for _, name in BUCKETS), LONGEST]
    return (names.index(name) if name in names else -1, name)


def _by_frequency(records: Sequence[PromptRecord], boot: Bootstrap) -> list[TokenGroup]:
    """In tenths of all tokens of the plain answers, the most frequent tokens first."""
    counts = Counter(token for record in records for decoding in record.plain for token in decoding.tokens)
    total, before = sum(counts.values()), 0
    decile: dict[int, int] = {}
    for token, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])):
        decile[token] = before * DECILES // total
        before += count

    def of(decoding: Decoding, index: int) -> int:
        return decile.get(decoding.tokens[index], DECILES - 1)

    return _token_groups(records, boot, of, {n: f"tenth {n + 1}" for n in range(DECILES)})


def _by_vocabulary(records: Sequence[PromptRecord], boot: Bootstrap) -> list[TokenGroup]:
    if any(d.outside is None for record in records for d in record.speculative):
        return []
    names = {0: "inside the draft vocabulary", 1: "outside the draft vocabulary"}
    return _token_groups(records, boot, lambda d, index: int(index in (d.outside or ())), names)


def _token_groups(
    records: Sequence[PromptRecord],
    boot: Bootstrap,
    of: Callable[[Decoding, int], int],
    names: dict[int, str],
) -> list[TokenGroup]:
    tried, hits = np.zeros((len(names), len(records))), np.zeros((len(names), len(records)))
    for number, record in enumerate(records):
        for decoding in record.speculative:
            for index, accepted in tries(decoding):
                group = of(decoding, index)
                tried[group, number] += 1
                hits[group, number] += accepted
    return [
        TokenGroup(
            name,
            int(tried[group].sum()),
            boot.ratio(lambda h, n: h / n, hits[group], tried[group], reason=NOT_TRIED, highest=1.0),
        )
        for group, name in names.items()
        if tried[group].any()
    ]


def _column(values: Iterable[float]) -> Column:
    return np.fromiter(values, dtype=np.float64)
