"""An engine's schedule at work: what each round drafts and verifies, from confidences, costs and past rounds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from deepspec.decoding.cost import CostTable
from deepspec.decoding.estimate import PRIOR_ACCEPTANCE, Acceptance, DecayedMean
from deepspec.decoding.fallback import Fallback
from deepspec.decoding.request import Round
from deepspec.decoding.schedule import RoundPlan
from deepspec.errors import UserError

KINDS = ("fixed", "threshold", "hardware")


@dataclass(frozen=True)
class Schedule:
    """kind: "fixed" verifies what was drafted; "threshold" all before the first confidence below
    `confidence_threshold`; "hardware" as many as raise the expected tokens a second (`schedule.LevelAdmission`).
    For a draft without confidences, acceptance at each position over past rounds stands in for them
    (`estimate.Acceptance`, which begins at 0.9): K then follows what was accepted lately.
    max_candidates: the most that the last two verify. fallback: plain rounds while speculation loses.
    utilization_threshold: while the device is busier than this (0..1), "threshold" whatever the kind.
    temperatures: of the draft's confidences by position, as calibration found them; none = taken as they are.
    """

    kind: str = "fixed"
    confidence_threshold: float = 0.5
    max_candidates: int | None = None
    fallback: bool = False
    utilization_threshold: float | None = None
    temperatures: tuple[float, ...] = ()

    def check(self, tree: bool) -> None:
        """UserError for settings that cannot be followed. tree: the engine proposes trees."""
        if self.kind not in KINDS:
            raise UserError(f"decode.schedule is {self.kind!r}; it must be one of {', '.join(KINDS)}.")
        if not 0 <= self.confidence_threshold <= 1:
            raise UserError(
                f"decode.confidence_threshold is {self.confidence_threshold}; it is between 0 and 1."
            )
        if self.max_candidates is not None and self.max_candidates < 1:
            raise UserError(f"decode.max_candidates is {self.max_candidates}; it must be 1 or more, or null.")
        if tree and self.cuts:
            raise UserError(
                f"decode.schedule={self.kind} and decode.utilization_threshold cut chains; a tree is verified whole. "
                "Use decode.schedule=fixed with a smaller tree, or decode.tree=none."
            )

    @property
    def cuts(self) -> bool:
        return self.kind != "fixed" or self.utilization_threshold is not None


@dataclass
class Past:
    """What one request's, or the whole engine's, rounds came to."""

    acceptance: Acceptance
    committed: DecayedMean = field(default_factory=DecayedMean)

    def add(self, round_: Round) -> None:
        self.acceptance.add(round_.verified, round_.accepted)
        if round_.drafted and not round_.cut:
            self.committed.add(round_.committed)


class Scheduler:
    """Follows a `Schedule` through an engine's rounds; every decision depends on earlier rounds, the context and
    confidences alone (see `schedule`).

    k: the longest path. costs: needed by "hardware". utilization: a reading in 0..1.
    """

    def __init__(
        self,
        schedule: Schedule,
        k: int,
        costs: CostTable | None = None,
        utilization: Callable[[], float] | None = None,
    ) -> None:
        self.schedule, self.k, self.costs, self.utilization = schedule, k, costs, utilization
        self.past = self.new_past()
        self.fallback = Fallback() if schedule.fallback else None
        self.gives_confidence: bool | None = None  # the draft does; None: not known yet

    def new_past(self) -> Past:
        """Of a request that enters."""
        return Past(Acceptance(self.k))

    def speculates(self, pasts: Sequence[Past]) -> bool:
        """Whether the next round of these rows is to draft at all."""
        if self.fallback is None:
            return True
        mean = self.past.committed.towards(1 + PRIOR_ACCEPTANCE)
        return self.fallback.speculate(sum(past.committed.towards(mean) for past in pasts), len(pasts))

    def plan(self, room: Sequence[int]) -> RoundPlan | None:
        """The next round's decisions; None: verify what is drafted."""
        chosen = self.schedule
        busy = (
            chosen.utilization_threshold is not None
            and self.utilization is not None
            and self.utilization() > chosen.utilization_threshold
        )
        if chosen.kind == "fixed" and not busy:
            return None
        limit = min(self.k, chosen.max_candidates or self.k)
        if busy or chosen.kind == "threshold":
            return RoundPlan(room, limit, chosen.confidence_threshold, None, chosen.temperatures)
        assert self.costs is not None
        seconds = self.costs.round_seconds(len(room), limit)
        return RoundPlan(room, limit, None, seconds, chosen.temperatures)

    def expected(self, pasts: Sequence[Past]) -> list[list[float]]:
        """[B][K] acceptance at each position over past rounds, which stands in for a draft's confidence."""
        means = self.past.acceptance.at_positions()
        return [past.acceptance.at_positions(means) for past in pasts]

    def record(self, pasts: Sequence[Past], rounds: Sequence[Round], speculated: bool | None) -> None:
        """What a round came to. speculated: None where the answers' ends left no choice."""
        for past, round_ in zip(pasts, rounds, strict=True):
            past.add(round_)
            self.past.add(round_)
        if self.fallback is not None and speculated is not None and rounds:
            first = rounds[0]
            seconds = first.draft_seconds + first.verify_seconds + first.rest_seconds
            self.fallback.record(speculated, len(rounds), seconds)
