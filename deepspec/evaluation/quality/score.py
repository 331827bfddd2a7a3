"""Score every answer, both ways, and put the two ways side by side."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from deepspec.evaluation.quality.answers import is_right
from deepspec.evaluation.quality.code import isolation, passes
from deepspec.evaluation.quality.findings import Quality, QualityRow
from deepspec.evaluation.quality.metrics import LoadedMetric, compute, load_metric, metric_path
from deepspec.evaluation.quality.repetition import repetition_rate
from deepspec.evaluation.quality.two_sample import two_sample
from deepspec.evaluation.result import Decoding, PromptRecord
from deepspec.evaluation.statistics import Bootstrap, Column
from deepspec.evaluation.tasks.item import Check

SOLVED, REPETITION = "solved", "repetition"
ALL = "all prompts"
NO_SCORE = "no answer has this score"


@dataclass(frozen=True)
class QualityPlan:
    """metrics: names or paths. allow_code: run what the model wrote; code_seconds: at most so long an answer."""

    metrics: Sequence[str] = ()
    allow_code: bool = False
    code_seconds: float = 10.0
    resamples: int = 2000
    seed: int = 0


@dataclass
class _Scorer:
    """Scores of single answers; equal texts are scored once."""

    plan: QualityPlan
    metrics: dict[str, LoadedMetric]
    known: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)
    timeouts: int = 0
    programs: int = 0
    not_run: set[str] = field(default_factory=set)

    def __call__(self, record: PromptRecord, decoding: Decoding, check: Check | None) -> dict[str, float]:
        key = (record.id, decoding.text)
        if key not in self.known:
            self.known[key] = self._of(record, decoding.text, check)
        repeated = repetition_rate(decoding.tokens)
        return self.known[key] | ({} if repeated is None else {REPETITION: repeated})

    def _of(self, record: PromptRecord, text: str, check: Check | None) -> dict[str, float]:
        scores: dict[str, float] = {}
        if check is not None and check.kind != "code":
            scores[SOLVED] = float(is_right(text, check.expected, check.kind))
        elif check is not None and self.plan.allow_code:
            outcome = passes(text, check, self.plan.code_seconds).outcome
            self.programs += 1
            self.timeouts += outcome == "timeout"
            scores[SOLVED] = float(outcome == "passed")
        elif check is not None:
            self.not_run.add(record.id)
        if record.references:
            for name, metric in self.metrics.items():
                scores |= compute(name, metric, [text], [record.references])
        return scores


def check_metrics(names: Sequence[str]) -> None:
    """UserError, before any work, for a metric that does not exist."""
    for name in names:
        metric_path(name)


def judge(
    records: Sequence[PromptRecord], checks: Mapping[str, Check], plan: QualityPlan, sampled: bool
) -> Quality:
    """Fill `scores` of every plain and speculative answer and compare the two ways.

    checks: of prompts by id, where an answer is right or wrong. sampled: answers of one prompt differ by
    chance; whether their distribution is the same is then tested (`two_sample`).
    """
    wanted = plan.metrics if any(record.references for record in records) else ()
    scorer = _Scorer(plan, {name: load_metric(name) for name in wanted})
    for record in records:
        for decoding in [*record.plain, *record.speculative]:
            decoding.scores = scorer(record, decoding, checks.get(record.id))
    quality = Quality(
        rows=_rows(records, scorer, plan),
        identical=sum(
            [d.text for d in record.plain] == [d.text for d in record.speculative] for record in records
        ),
        compared=len(records),
        timeouts=scorer.timeouts,
        isolation=isolation() if scorer.programs else None,
        notes=_notes(records, scorer, plan),
    )
    if sampled and records:
        quality.two_sample = two_sample(
            [[d.tokens for d in record.plain] for record in records],
            [[d.tokens for d in record.speculative] for record in records],
            seed=plan.seed,
        )
    return quality


def _notes(records: Sequence[PromptRecord], scorer: _Scorer, plan: QualityPlan) -> list[str]:
    notes = []
    if plan.metrics and not scorer.metrics:
        notes.append(f"{', '.join(plan.metrics)}: not computed, no prompt has a reference.")
    elif plan.metrics and not all(record.references for record in records):
        have = sum(bool(record.references) for record in records)
        notes.append(f"{', '.join(plan.metrics)}: on the {have} prompts that have a reference.")
    if scorer.not_run:
        notes.append(
            f"Programs of {len(scorer.not_run)} prompts were not run (evaluate.allow_code_execution=false)."
        )
    return notes


def _rows(records: Sequence[PromptRecord], scorer: _Scorer, plan: QualityPlan) -> list[QualityRow]:
    tasks = sorted({record.category for record in records})
    groups = {ALL: list(records)}
    if len(tasks) > 1:
        groups |= {name: [r for r in records if r.category == name] for name in tasks}
    rows = []
    for task, members in groups.items():
        names = dict.fromkeys(name for r in members for d in r.plain for name in d.scores)
        corpus = _corpus(members, scorer)
        for name in names:
            rows.append(_row(name, task, members, plan, corpus.get(name)))
    return rows


def _row(
    name: str,
    task: str,
    records: Sequence[PromptRecord],
    plan: QualityPlan,
    corpus: tuple[float, float] | None,
) -> QualityRow:
    boot = Bootstrap(len(records), plan.resamples, plan.seed)
    plain, present = _means(records, name, lambda record: record.plain)
    speculative, _ = _means(records, name, lambda record: record.speculative)
    one, other = corpus or (None, None)
    return QualityRow(
        metric=name,
        task=task,
        plain=boot.ratio(lambda s, n: s / n, plain, present, reason=NO_SCORE, lowest=-np.inf),
        speculative=boot.ratio(lambda s, n: s / n, speculative, present, reason=NO_SCORE, lowest=-np.inf),
        difference=boot.ratio(
            lambda s, t, n: (s - t) / n, speculative, plain, present, reason=NO_SCORE, lowest=-np.inf
        ),
        corpus_plain=one,
        corpus_speculative=other,
    )


def _means(
    records: Sequence[PromptRecord], name: str, of: Callable[[PromptRecord], Iterable[Decoding]]
) -> tuple[Column, Column]:
    """[n] a prompt's mean score over its repeats (0 where it has none), [n] 1 where it has one both ways."""
    values, present = np.zeros(len(records)), np.zeros(len(records))
    for number, record in enumerate(records):
        if not all(name in d.scores for d in [*record.plain, *record.speculative]):
            continue
        scores = [d.scores[name] for d in of(record)]
        values[number], present[number] = float(np.mean(scores)), 1.0
    return values, present


def _corpus(records: Sequence[PromptRecord], scorer: _Scorer) -> dict[str, tuple[float, float]]:
    """Each metric of all answers at once: plain, speculative."""
    having = [record for record in records if record.references]
    if not having:
        return {}
    found: dict[str, tuple[float, float]] = {}
    for name, metric in scorer.metrics.items():
        plain, speculative = (
            compute(
                name,
                metric,
                [d.text for record in having for d in of(record)],
                [record.references for record in having for _ in of(record)],
            )
            for of in (lambda record: record.plain, lambda record: record.speculative)
        )
        found |= {key: (plain[key], speculative[key]) for key in plain.keys() & speculative.keys()}
    return found
