"""Two results side by side: is one draft or setting better, by how much, and how many prompts would it take to know?

Only what can be compared is: the same target, prompts and sampling. The unit is the prompt, and both results see
the same ones, so every difference is taken prompt by prompt and its interval is the paired bootstrap's.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from deepspec.evaluation.metric import Metric
from deepspec.evaluation.result import EvaluationResult, PromptRecord
from deepspec.evaluation.statistics import Bootstrap, Column

SMALLEST = 0.01  # the relative difference that "how many prompts" asks for
POWER = 0.8


@dataclass
class Difference:
    """One number of both results. ratio: b ÷ a. prompts_for_1_percent: how many prompts of this kind would show
    a difference of 1% in 4 of 5 cases; null where there is no spread to judge by."""

    name: str
    a: Metric
    b: Metric
    ratio: Metric
    prompts_for_1_percent: int | None
    note: str = ""

    @property
    def verdict(self) -> str:
        """In words: which is higher, or that it cannot be told."""
        if self.ratio.low is None or self.ratio.high is None or self.ratio.value is None:
            return "cannot be told"
        if self.ratio.low > 1:
            return "B is higher"
        return "A is higher" if self.ratio.high < 1 else "no difference can be told"


def incomparable(a: EvaluationResult, b: EvaluationResult) -> list[str]:
    """Why these two cannot be compared, a sentence each; empty where they can."""
    reasons = []
    for what, of in (
        ("target", lambda r: r.target.get("name")),
        ("target's weights", lambda r: r.target.get("weights")),
        ("temperature", lambda r: r.conditions.temperature),
        (
            "sampling",
            lambda r: [r.settings.get("decode", {}).get(key) for key in ("top_k", "top_p", "min_p")],
        ),
        ("longest answer", lambda r: r.conditions.max_new_tokens),
        ("number of repeats", lambda r: r.conditions.repeats),
    ):
        if of(a) != of(b):
            reasons.append(f"another {what}: {of(a)} and {of(b)}")
    mine, theirs = ({(r.id, r.prompt) for r in result.records} for result in (a, b))
    if mine != theirs:
        reasons.append(
            f"other prompts: {len(mine & theirs)} are in both, {len(mine - theirs)} only in the first, "
            f"{len(theirs - mine)} only in the second"
        )
    return reasons


def time_incomparable(a: EvaluationResult, b: EvaluationResult) -> list[str]:
    """Why their times cannot be compared although their acceptance can."""
    reasons = []
    for what, of in (
        ("machine", lambda r: (r.conditions.machine.cpu, r.conditions.machine.device)),
        ("number of threads", lambda r: r.conditions.machine.threads),
        ("number format", lambda r: r.conditions.dtype),
    ):
        if of(a) != of(b):
            reasons.append(f"another {what}: {of(a)} and {of(b)}")
    return reasons


def compare(
    a: EvaluationResult, b: EvaluationResult, resamples: int = 4000, seed: int = 0
) -> list[Difference]:
    """τ, the first position's acceptance, and (on one machine) the speedup and seconds a token of both.

    ValueError where `incomparable` has a reason.
    """
    if reasons := incomparable(a, b):
        raise ValueError("; ".join(reasons))
    order = {(r.id, r.prompt): number for number, r in enumerate(a.records)}
    theirs = sorted(b.records, key=lambda r: order[r.id, r.prompt])
    pairs = _Pairs(a.records, theirs, Bootstrap(len(a.records), resamples, seed))
    found = [
        pairs.difference("tokens a round (τ)", _committed, _rounds),
        pairs.difference("acceptance at position 1", _first_hits, _first_tries),
    ]
    if time_incomparable(a, b):
        return found
    # Each result's own plain decoding stands under its speed, so that a machine that was slower one day does
    # not decide; the plain seconds themselves say whether it was.
    return [
        *found,
        pairs.speedup(),
        pairs.difference("speculative seconds a token", _seconds(_speculative), _tokens(_speculative)),
        pairs.difference(
            "plain seconds a token",
            _seconds(_plain),
            _tokens(_plain),
            note="of one decoder: a difference is the machine's, not the draft's",
        ),
    ]


@dataclass
class _Pairs:
    a: Sequence[PromptRecord]
    b: Sequence[PromptRecord]
    boot: Bootstrap

    def difference(self, name: str, top: "Of", bottom: "Of", note: str = "") -> Difference:
        """Of a ratio of totals, top ÷ bottom."""
        columns = [_column(of, side) for side in (self.a, self.b) for of in (top, bottom)]
        return self._made(name, lambda s, t: s / t, columns[:2], columns[2:], note)

    def speedup(self) -> Difference:
        """Against plain decoding by the same loop, each result's own."""
        parts = (_seconds(_plain), _tokens(_plain), _seconds(_speculative), _tokens(_speculative))
        columns = [[_column(of, side) for of in parts] for side in (self.a, self.b)]
        return self._made(
            "speedup, same loop", lambda s, t, u, v: (s / t) / (u / v), columns[0], columns[1], ""
        )

    def _made(
        self, name: str, formula: Callable[..., Column], a: list[Column], b: list[Column], note: str
    ) -> Difference:
        half = len(a)
        ratio = self.boot.ratio(lambda *c: formula(*c[half:]) / formula(*c[:half]), *a, *b)
        return Difference(
            name,
            self.boot.ratio(formula, *a),
            self.boot.ratio(formula, *b),
            ratio,
            prompts_needed(ratio),
            note,
        )


def prompts_needed(ratio: Metric, smallest: float = SMALLEST, power: float = POWER) -> int | None:
    """How many prompts it would take to see a relative difference of `smallest` at 5%, two-sided.

    The standard error is read from the ratio's 95% interval and shrinks with the root of the prompts.
    """
    if ratio.low is None or ratio.high is None:
        return None
    normal = NormalDist()
    error = (ratio.high - ratio.low) / (2 * normal.inv_cdf(0.975))
    if error == 0:
        return None
    wanted = smallest / (normal.inv_cdf(0.975) + normal.inv_cdf(power))
    return max(2, math.ceil(ratio.prompts * (error / wanted) ** 2))


Of = Callable[[PromptRecord], float]


def _column(of: Of, records: Sequence[PromptRecord]) -> Column:
    return np.array([of(record) for record in records], dtype=np.float64)


def _rounds(record: PromptRecord) -> float:
    return sum(len(d.rounds) for d in record.speculative)


def _committed(record: PromptRecord) -> float:
    return sum(r.committed for d in record.speculative for r in d.rounds)


def _first_tries(record: PromptRecord) -> float:
    return sum(r.verified >= 1 for d in record.speculative for r in d.rounds)


def _first_hits(record: PromptRecord) -> float:
    return sum(r.accepted >= 1 for d in record.speculative for r in d.rounds)


def _plain(record: PromptRecord) -> list:
    return record.plain


def _speculative(record: PromptRecord) -> list:
    return record.speculative


def _seconds(of: Callable[[PromptRecord], list]) -> Of:
    return lambda record: sum(d.decode_seconds for d in of(record))


def _tokens(of: Callable[[PromptRecord], list]) -> Of:
    return lambda record: sum(max(len(d.tokens) - 1, 0) for d in of(record))
