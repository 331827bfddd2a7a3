"""The engine's own thread: requests join and leave the running batch, everybody gets an end."""

import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Condition, Thread
from typing import Protocol

from deepspec.decoding import Engine, Request
from deepspec.decoding.batch import Batch
from deepspec.decoding.estimate import DecayedMean
from deepspec.decoding.row import Row
from deepspec.errors import UserError
from deepspec.serving.metrics import Metrics
from deepspec.serving.refusal import Refusal, stopping

log = logging.getLogger("deepspec")
DEFECT = "The engine failed on this request; the server's log says how."
STOPPED = "The server was stopped before the answer was complete."
LONGEST_AFTER = 600  # seconds


class Deliver(Protocol):
    """Called on the engine's thread: must neither wait nor fail. finish: of `Result`, None while it goes on."""

    def __call__(self, tokens: list[int], finish: str | None, error: str = "") -> None: ...


@dataclass(eq=False)
class Job:
    """One answer to decode. row: once it is in the batch."""

    request: Request
    deliver: Deliver
    arrived: float = field(default_factory=time.perf_counter)
    cancelled: bool = False
    row: Row | None = None
    first: float = 0.0  # when its first token came


class Worker:
    """Lets jobs into the engine's batch in the order of their arrival, up to `engine.max_batch_size` at once.

    queue: jobs that may wait. An error ends the jobs of the batch it happened in, each with a message, and no
    other; the thread goes on with a new batch. `close` ends what is left.
    """

    def __init__(self, engine: Engine, queue: int, metrics: Metrics) -> None:
        self.engine, self.queue, self.metrics = engine, queue, metrics
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.changed = Condition()
        self.draining = self.closed = False
        self.seconds = DecayedMean()  # that an answer took in the batch
        self.thread = Thread(target=self._work, name="engine", daemon=True)

    def start(self) -> None:
        self.thread.start()

    @property
    def capacity(self) -> int:
        """Jobs that there can be at all."""
        return self.engine.max_batch_size + self.queue

    def submit(self, jobs: Sequence[Job]) -> None:
        """Take all of them or, with a `Refusal` (429, or 503 while stopping), none."""
        with self.changed:
            if self.draining or not self.thread.is_alive():
                raise stopping()
            there = len(self.waiting) + len(self.running)
            if there + len(jobs) > self.capacity:
                raise Refusal(
                    429,
                    f"The server is full: {len(self.running)} answers are being written and {len(self.waiting)} wait.",
                    kind="rate_limit_error",
                    code="queue_full",
                    after=self._after(len(self.waiting) + len(jobs)),
                )
            self.waiting.extend(jobs)
            self._gauges()
            self.changed.notify()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Nobody wants these any more; their places are free before the next round."""
        with self.changed:
            for job in jobs:
                job.cancelled = True
                if job in self.waiting:
                    self.waiting.remove(job)
            self._gauges()
            self.changed.notify()

    def drain(self) -> None:
        """Take no more; what is here is finished. Safe in a signal's handler."""
        self.draining = True

    def close(self) -> None:
        """End the thread; jobs that are left are told so."""
        self.draining = True
        with self.changed:
            self.closed = True
            self.changed.notify()
        self.thread.join()

    # ------------------------------------------------------------------ the engine's thread

    def _work(self) -> None:
        batch = self.engine.running()
        while self._wait():
            try:
                self._let_in_and_out(batch)
                if batch.rows:
                    self._round(batch)
            except Exception as error:  # the server outlives whatever a request meets in the engine
                if not isinstance(error, UserError):
                    log.exception("The engine failed; its %d requests end here.", len(self.running))
                self._end_all(str(error) if isinstance(error, UserError) else DEFECT)
                batch = self.engine.running()
        self._end_all(STOPPED)

    def _wait(self) -> bool:
        """Until there is something to do; False: to end."""
        with self.changed:
            while not (self.closed or self.waiting or self.running):
                self.changed.wait()
            return not self.closed

    def _let_in_and_out(self, batch: Batch) -> None:
        for job in [job for job in self.running if job.cancelled]:
            if job.row is not None and job.row.finish is None:
                batch.drop(job.row)
            self._gone(job)
        while len(batch.rows) < self.engine.max_batch_size:
            with self.changed:
                if not self.waiting or self.closed:
                    return
                job = self.waiting.popleft()
                self.running.append(job)
                self._gauges()
            row = job.row = batch.admit(job.request, self.engine.limit(job.request))
            job.first = time.perf_counter()
            self.metrics.prompt_tokens.inc(len(job.request.tokens))
            self.metrics.ttft.observe(job.first - job.arrived)
            self.metrics.generated.inc(len(row.tokens))
            self._deliver(job, list(row.tokens))

    def _round(self, batch: Batch) -> None:
        moved = batch.step()
        self.metrics.round([row.rounds[-1] for row, _ in moved if not row.error])
        jobs = {id(job.row): job for job in self.running}
        for row, tokens in moved:
            self._deliver(jobs[id(row)], tokens)

    def _deliver(self, job: Job, tokens: list[int]) -> None:
        row = job.row
        assert row is not None
        if row.finish is not None:
            taken = time.perf_counter() - job.first
            self.seconds.add(taken)
            if len(row.tokens) > 1:
                self.metrics.tpot.observe(taken / (len(row.tokens) - 1))
            self._gone(job)
        if not job.cancelled:
            job.deliver(tokens, row.finish, row.error)

    def _gone(self, job: Job) -> None:
        with self.changed:
            self.running.remove(job)
            self._gauges()

    def _end_all(self, why: str) -> None:
        """Of the batch; and of the queue, when the server stops."""
        with self.changed:
            ended = [*self.running, *(self.waiting if self.closed else ())]
            self.running = []
            if self.closed:
                self.waiting.clear()
            self._gauges()
        for job in ended:
            job.deliver([], "error", why)

    def _gauges(self) -> None:
        self.metrics.running.set(len(self.running))
        self.metrics.waiting.set(len(self.waiting))

    def _after(self, ahead: int) -> int:
        """Seconds until about so many have found a place, by what answers took lately."""
        seconds = (self.seconds.value or 1.0) * ahead / self.engine.max_batch_size
        return min(max(math.ceil(seconds), 1), LONGEST_AFTER)
