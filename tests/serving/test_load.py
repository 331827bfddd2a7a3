"""Many clients at once, of every kind: nothing is lost, and nobody reads what another one asked for."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from deepspec.config.schema import ScheduleKind
from deepspec.decoding import Request, Sampling
from tests.serving.running import Running, alone, config_of, running, wait_for
from tests.serving.test_openai_client import ask, prompt_of
from tests.talking import QUESTIONS, talking_target

CLIENTS = 48


@dataclass(frozen=True)
class Visit:
    """What one client asks, and how it behaves."""

    number: int
    question: str
    tokens: int
    temperature: float
    stop: str | None
    stream: bool
    leaves: bool

    def request(self) -> Request:
        """The same for the engine alone."""
        sampling = Sampling(temperature=self.temperature, top_p=0.95)
        stop = (self.stop,) if self.stop else ()
        eos = talking_target().eos
        return Request(prompt_of(self.question), self.tokens, sampling, self.number, eos, stop=stop)


def visits() -> list[Visit]:
    dice = random.Random(0)
    return [
        Visit(
            number,
            f"{dice.choice(QUESTIONS)} {number}",
            dice.randint(1, 30),
            dice.choice([0.0, 0.0, 0.8, 1.2]),
            dice.choice([None, None, "a", "th"]),
            dice.random() < 0.5,
            dice.random() < 0.15,
        )
        for number in range(CLIENTS)
    ]


def visit(server: Running, one: Visit) -> str | None:
    """The text, None where the client left before it."""
    settings = {"max_tokens": one.tokens, "temperature": one.temperature, "top_p": 0.95, "seed": one.number}
    body = ask(one.question, **settings, stop=one.stop, stream=one.stream)
    if one.leaves:
        with httpx.Client(timeout=60) as client:
            status = 429
            while status == 429:
                with client.stream(
                    "POST", f"{server.url}/v1/chat/completions", json={**body, "stream": True}
                ) as got:
                    status = got.status_code
                    next(got.iter_lines())
        return None
    create = server.client(max_retries=20, timeout=60).chat.completions.create
    if not one.stream:
        return create(**body).choices[0].message.content
    return "".join(chunk.choices[0].delta.content or "" for chunk in create(**body))


@pytest.mark.parametrize(("queue", "schedule"), [(64, "fixed"), (6, "threshold"), (6, "hardware")])
def test_everybody_gets_his_own_answer(
    queue: int, schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for all; and with too little, where clients come again when they are told to.

    What a schedule learns of others moves the rounds, and so which sampled text is drawn: there all are greedy.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # measured costs
    everybody = [one if schedule == "fixed" else replace(one, temperature=0.0) for one in visits()]
    config = config_of({"schedule": ScheduleKind(schedule)}, max_batch_size=5, queue=queue)
    with running(config) as server, ThreadPoolExecutor(CLIENTS if queue > 6 else 14) as pool:
        answers = list(pool.map(lambda one: visit(server, one), everybody))
        for one, answer in zip(everybody, answers, strict=True):
            assert one.leaves == (answer is None)
            assert answer is None or answer == alone(one.request()), one
        rows = [
            float(sample.labels["rows"])
            for metric in server.service.metrics.rounds.collect()
            for sample in metric.samples
            if sample.name == "deepspec_rounds_total"
        ]
        assert max(rows) == 5  # they did share rounds
        path = "/v1/chat/completions"
        stayed = sum(not one.leaves for one in everybody)

        def ended(status: str) -> float:
            return server.metric("deepspec_requests_total", path=path, status=status)

        wait_for(lambda: ended("200") + ended("499") == CLIENTS)
        assert ended("200") >= stayed  # short answers may be complete before anyone left
        wait_for(lambda: server.metric("deepspec_running") == server.metric("deepspec_waiting") == 0)
        assert server.metric("deepspec_accepted_tokens_total") > 0 < server.metric("deepspec_drafts_total")
        assert server.metric("deepspec_time_to_first_token_seconds_count") >= stayed
