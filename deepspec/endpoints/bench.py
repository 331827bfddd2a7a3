"""The measurement: how far, then level by level, two servers in turns, everything kept as it comes."""

import asyncio
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from deepspec.data.conversation import Message
from deepspec.endpoints.client import Client
from deepspec.endpoints.connect import connect_times, median
from deepspec.endpoints.counters import acceptance_between
from deepspec.endpoints.result import Answer, Connection, Endpoint, EndpointResult, Level
from deepspec.endpoints.summary import summarise
from deepspec.errors import UserError
from deepspec.evaluation.statistics import null

TURNS = 4  # blocks into which a level is cut at most where two servers take turns
REFILLS = 2  # a block has so many questions for each that is asked at a time, lest the level's concurrency be never met
TOLERATED = 3  # failures in a row beyond one a connection: then nothing more is asked
Say = Callable[[str], None]


@dataclass(frozen=True)
class Question:
    """A prompt and what it is called."""

    name: str
    messages: Sequence[Message]


@dataclass(frozen=True)
class Plan:
    """questions: each is asked once before any is asked again. requests: at each level, of each server."""

    questions: Sequence[Question]
    requests: int
    concurrency: Sequence[int]
    warmup: int


async def measure(clients: Sequence[Client], plan: Plan, result: EndpointResult, say: Say) -> None:
    """Fill `result`, which holds what is finished at any moment. `UserError` where a server cannot be measured."""
    try:
        for client in clients:
            result.endpoints.append(await _meet(client))
            about = result.endpoints[-1]
            say(f"{about.url}: {about.model!r}, a small request takes {_ms(about.connection.request.value)}")
        questions = cycle(plan.questions)
        for client in clients:
            for question in islice(questions, plan.warmup):
                answer = await client.ask(question.name, question.messages)
                if answer.error:
                    raise UserError(f"{client.url} does not answer: {answer.error}.")
        for concurrency in plan.concurrency:
            asked = list(islice(questions, plan.requests))
            levels = [Level(index, concurrency) for index in range(len(clients))]
            result.levels += levels
            await _level(clients, levels, asked)
            for level in levels:
                say(_line(result.endpoints[level.endpoint], level))
    finally:
        _note(result)
        for client in clients:
            await client.close()


async def _meet(client: Client) -> Endpoint:
    warnings = await client.first_contact()
    tcp, tls = await asyncio.to_thread(connect_times, client.url, client.timeout)
    times = await client.request_times()
    request = median(times) if times else null("the server has no list of models")
    connection = Connection(tcp, tls, request)
    key = client.variable if client.header else None
    return Endpoint(client.url, str(client.model), key, client.models, connection, warnings)


async def _level(clients: Sequence[Client], levels: Sequence[Level], asked: Sequence[Question]) -> None:
    """One concurrency; of two servers only one is at work at a time, and they take turns at going first."""
    before = [await client.metrics_page() for client in clients]
    turns = min(TURNS, max(1, len(asked) // (REFILLS * levels[0].concurrency))) if len(clients) > 1 else 1
    for turn in range(turns):
        block = asked[len(asked) * turn // turns : len(asked) * (turn + 1) // turns]
        order = range(len(clients)) if turn % 2 == 0 else reversed(range(len(clients)))
        for index in order:
            await clients[index].open_connections(min(levels[index].concurrency, len(block)))
            await _block(clients[index], levels[index], block)
    for client, level, page in zip(clients, levels, before, strict=True):
        level.acceptance, level.no_acceptance = acceptance_between(page, await client.metrics_page())


async def _block(client: Client, level: Level, block: Sequence[Question]) -> None:
    """All questions of a block, `level.concurrency` at a time."""
    loop = asyncio.get_running_loop()
    begun, left = loop.time(), iter(block)
    workers = [
        asyncio.create_task(_worker(client, level, left)) for _ in range(min(level.concurrency, len(block)))
    ]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        level.seconds += loop.time() - begun


async def _worker(client: Client, level: Level, left: Iterator[Question]) -> None:
    for question in left:
        level.answers.append(await client.ask(question.name, question.messages))
        last = level.answers[-(TOLERATED + level.concurrency) :]
        if len(last) == TOLERATED + level.concurrency and all(answer.error for answer in last):
            raise UserError(
                f"{client.url}: {len(last)} requests in a row failed, the last one thus: {last[-1].error}."
            )


def _note(result: EndpointResult) -> None:
    """The numbers of what there is, and what a reader must know of them."""
    result.summary = [summarise(level) for level in result.levels if level.answers]
    for index, endpoint in enumerate(result.endpoints):
        answers = [answer for level in result.levels if level.endpoint == index for answer in level.answers]
        endpoint.warnings += _warnings(endpoint, answers)
        few = [one for one in result.levels if one.endpoint == index and len(one.answers) < one.concurrency]
        endpoint.warnings += [
            f"only {len(one.answers)} requests were made at a concurrency of {one.concurrency}, which they never filled; "
            "endpoint.requests=... makes more"
            for one in few
        ]


def _warnings(endpoint: Endpoint, answers: Sequence[Answer]) -> list[str]:
    found = []
    others = sorted({answer.model for answer in answers if answer.model} - {endpoint.model})
    if others:
        found.append(f"the answers name another model than was asked for: {', '.join(others[:3])}")
    limited = sum(answer.rate_limited for answer in answers)
    if limited:
        found.append(
            f"the server limited the rate ({limited} times 429): tokens a second are what it allowed, not what it can do"
        )
    chunks = sum(answer.counted == "chunks" for answer in answers)
    if chunks:
        found.append(
            f"{chunks} answers came without usage and there is no tokenizer: their chunks are counted as tokens, of "
            "which a chunk may hold several; endpoint.tokenizer=... counts them"
        )
    empty = sum(answer.error is None and answer.first is None for answer in answers)
    if empty:
        found.append(f"{empty} answers had no text: they have no TTFT")
    return found


def _line(endpoint: Endpoint, level: Level) -> str:
    summary = summarise(level)
    rate = summary.tokens_per_second.value
    words = [
        f"{endpoint.url} at {level.concurrency}: {'no' if rate is None else f'{rate:.1f}'} tokens/s",
        f"TTFT {_ms(summary.ttft.p50.value)}",
        f"TPOT {_ms(summary.tpot.p50.value)}",
    ]
    words += [f"τ {summary.tau:.2f}"] if summary.tau is not None else []
    words += [f"{summary.failed} of {summary.requests} failed"] if summary.failed else []
    return ", ".join(words)


def _ms(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1000:.1f} ms"


def client_machine() -> str:
    """Where the questions come from."""
    return f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
