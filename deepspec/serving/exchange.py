"""One HTTP request on its way: its choices' tokens from the engine's thread, made into text."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from deepspec.decoding import Request
from deepspec.decoding.text import StopCut, TextStream
from deepspec.serving.refusal import Refusal
from deepspec.serving.worker import Job, Worker

FINISH = {"eos": "stop", "stop": "stop", "length": "length"}
Decode = Callable[[list[int]], str]
Event = tuple[int, list[int], str | None, str]
"""Choice, tokens, finish and error, as the engine's thread delivers them."""


@dataclass
class Piece:
    """Text that a choice goes on with. finish: the protocol's word, where it is the last."""

    choice: int
    text: str
    finish: str | None


@dataclass
class _Choice:
    job: Job
    stream: TextStream
    cut: StopCut
    tokens: int = 0
    done: bool = False

    def take(self, tokens: Sequence[int], finish: str | None, eos: Sequence[int]) -> tuple[str, str | None]:
        """The text that these tokens complete, and the protocol's finish once there is one."""
        shown = ""
        for token in tokens:
            self.tokens += 1
            if token not in eos:
                shown += self.cut.add(self.stream.add(token))
            if self.cut.stopped:
                self.done = True
                return shown, "stop"
        if finish is None:
            return shown, None
        self.done = True
        shown += self.cut.add(self.stream.rest())
        stopped = self.cut.stopped
        return shown + self.cut.rest(), "stop" if stopped else FINISH[finish]


@dataclass
class Exchange:
    """Asks the engine for all choices at once; `pieces` gives their text as it comes. `close` in any case.

    seconds: from the arrival to the last piece, else a `Refusal`: 503 from the queue, 504 from the batch.
    """

    worker: Worker
    requests: Sequence[Request]
    decode: Decode
    seconds: float
    choices: list[_Choice] = field(default_factory=list)

    def start(self) -> None:
        """`Refusal` where there is no room."""
        loop = asyncio.get_running_loop()
        self.events: asyncio.Queue[Event] = asyncio.Queue()

        def deliver_to(choice: int) -> Callable[..., None]:
            def deliver(tokens: list[int], finish: str | None, error: str = "") -> None:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(self.events.put_nowait, (choice, tokens, finish, error))

            return deliver

        for index, request in enumerate(self.requests):
            job = Job(request, deliver_to(index))
            self.choices.append(_Choice(job, TextStream(self.decode), StopCut(request.stop)))
        self.deadline = time.perf_counter() + self.seconds
        self.worker.submit([choice.job for choice in self.choices])

    async def pieces(self) -> AsyncIterator[Piece]:
        """Until every choice has its last piece. `Refusal` where the engine fails or time is up."""
        while not all(choice.done for choice in self.choices):
            index, tokens, finish, error = await self._next()
            choice = self.choices[index]
            if choice.done:
                continue
            if error:
                raise Refusal(500, error, kind="server_error")
            text, word = choice.take(tokens, finish, choice.job.request.eos)
            if word is not None and finish is None:  # the text has a stop string that the engine did not see
                self.worker.cancel([choice.job])
            yield Piece(index, text, word)

    async def _next(self) -> Event:
        try:
            async with asyncio.timeout(max(self.deadline - time.perf_counter(), 0)):
                return await self.events.get()
        except TimeoutError:
            if all(choice.job.row is None for choice in self.choices):
                message = f"The request waited {self.seconds:g} s for a place in the batch."
                raise Refusal(503, message, kind="server_error", code="timeout", after=30) from None
            message = f"The answer took longer than {self.seconds:g} s."
            raise Refusal(504, message, kind="server_error", code="timeout") from None

    @property
    def tokens(self) -> int:
        """Of all answers so far, end tokens included."""
        return sum(choice.tokens for choice in self.choices)

    def close(self) -> None:
        """Free what is still in the engine."""
        self.worker.cancel([choice.job for choice in self.choices if not choice.done])
