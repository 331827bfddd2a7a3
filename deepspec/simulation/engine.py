"""The engine's loop with costs in place of models: what it drafts, verifies and commits, and when."""

from collections.abc import Callable
from dataclasses import dataclass, field

from deepspec.decoding.cost import CostTable
from deepspec.decoding.request import Round
from deepspec.decoding.scheduler import Past, Scheduler
from deepspec.simulation.trace import RecordedRequest, RecordedRound


@dataclass(frozen=True)
class Costs:
    """Seconds. table: of the target's and the draft's steps. prefill: of a prompt of so many tokens, alone.
    overhead: of a round beside both."""

    table: CostTable
    prefill: Callable[[int], float]
    overhead: float = 0.0


@dataclass
class SimulatedRow:
    """A request being answered. arrived, first, finished: on the simulated clock, first: its first token."""

    request: RecordedRequest
    arrived: float
    past: Past | None = None
    tokens: int = 0
    at: int = 0  # of its recorded rounds, which start over when an answer needs more of them
    first: float = 0.0
    finished: float = 0.0

    @property
    def room(self) -> int:
        """Drafted tokens that it can still keep, with the target's own behind them."""
        return max(0, self.request.answer - self.tokens - 1)

    @property
    def recorded(self) -> RecordedRound:
        return self.request.rounds[self.at % len(self.request.rounds)]


@dataclass
class Tally:
    """Sums over a simulation. row_rounds: rounds times their rows. scheduled: drafted tokens that were verified."""

    rounds: int = 0
    row_rounds: int = 0
    speculated: int = 0
    scheduled: int = 0
    committed: int = 0

    def since(self, earlier: "Tally") -> "Tally":
        return Tally(*(a - b for a, b in zip(vars(self).values(), vars(earlier).values(), strict=True)))


@dataclass
class SimulatedEngine:
    """`decoding.batch.Batch` in numbers. k: drafted tokens a round, 0 = plain decoding. scheduler: None = all of them
    are verified. told: the recorded confidences are the draft's own, which it tells before each draw."""

    costs: Costs
    k: int
    scheduler: Scheduler | None = None
    told: bool = False
    clock: float = 0.0
    rows: list[SimulatedRow] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        if self.scheduler is not None:
            self.scheduler.gives_confidence = self.told

    def admit(self, row: SimulatedRow) -> None:
        """Prefill alone, which the other rows wait for."""
        self.clock += self.costs.prefill(row.request.prompt)
        row.tokens, row.first = 1, self.clock
        if self.scheduler is not None:
            row.past = self.scheduler.new_past()
        if row.request.answer <= 1:
            row.finished = self.clock
        else:
            self.rows.append(row)

    def step(self) -> list[SimulatedRow]:
        """One round of all rows; those that it finished."""
        lengths, drafted, speculated = self._plan()
        rows, verify = len(self.rows), self.costs.table.verify.at(len(self.rows), max(lengths) + 1)
        draft = self.costs.table.draft.at(rows, drafted) if drafted else 0.0
        self.clock += draft + verify + self.costs.overhead
        rounds = [
            self._advance(row, length, draft, verify) for row, length in zip(self.rows, lengths, strict=True)
        ]
        if self.scheduler is not None:
            self.scheduler.record([row.past for row in self.rows if row.past], rounds, speculated)
        self._count(rounds, drafted)
        finished = [row for row in self.rows if row.tokens >= row.request.answer]
        for row in finished:
            row.finished = self.clock
        self.rows = [row for row in self.rows if row.tokens < row.request.answer]
        return finished

    def _plan(self) -> tuple[list[int], int, bool | None]:
        """Each row's verified tokens, how many are drafted, and whether the round speculates (None: no choice)."""
        room, scheduler = [row.room for row in self.rows], self.scheduler
        nothing = [0] * len(room)
        count = min(self.k, max(room))
        if count < 1:
            return nothing, 0, None
        if scheduler is None:
            return [min(count, one) for one in room], count, None
        pasts = [row.past for row in self.rows if row.past is not None]
        if not scheduler.speculates(pasts):
            return nothing, 0, False
        plan = scheduler.plan(room)
        if plan is None:
            return [min(count, one) for one in room], count, True
        if self.told:
            lengths = plan.through([list(row.recorded.confidence[:count]) for row in self.rows], told=True)
            return list(lengths), max(1, *lengths), True
        lengths = [min(one, count) for one in plan.through(scheduler.expected(pasts))]
        return lengths, max(lengths), True

    def _advance(self, row: SimulatedRow, length: int, draft: float, verify: float) -> Round:
        accepted = 0
        if length:
            accepted = min(row.recorded.accepted, length)
            row.at += 1
        committed = min(accepted + 1, row.request.answer - row.tokens)
        row.tokens += committed
        return Round(
            drafted=length,
            verified=length,
            accepted=accepted,
            committed=committed,
            cut=False,
            draft_seconds=draft,
            verify_seconds=verify,
            rest_seconds=self.costs.overhead,
            scheduled=length,
        )

    def _count(self, rounds: list[Round], drafted: int) -> None:
        tally = self.tally
        tally.rounds += 1
        tally.row_rounds += len(rounds)
        tally.speculated += len(rounds) if drafted else 0
        tally.scheduled += sum(one.verified for one in rounds)
        tally.committed += sum(one.committed for one in rounds)
