"""The server in this process, on a free port, with a draft that can be held up."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn

from deepspec.config.schema import Config, DecodeConfig, ServeConfig, TargetConfig
from deepspec.decoding import Engine, Request
from deepspec.drafts.ngram import NgramDraft
from deepspec.drafts.options import NgramOptions
from deepspec.serving.app import Service, build_app
from deepspec.serving.server import bound_socket, new_service
from tests.talking import talking_target


class Gated(NgramDraft):
    """Prompt lookup whose rounds wait while the gate is closed. entered: a round stands there."""

    def __init__(self) -> None:
        super().__init__(NgramOptions(min_n=1))
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()
        self.fails = False
        self.free = 1 << 30  # rounds until the gate closes by itself

    def close(self, after: int = 0) -> None:
        """Before the next round, or so many rounds later."""
        self.entered.clear()
        self.free = after

    def open(self) -> None:
        self.free = 1 << 30
        self.gate.set()

    def propose(self, state, control):
        self.free -= 1
        if self.free < 0:
            self.gate.clear()
            self.entered.set()
        assert self.gate.wait(30)
        if self.fails:
            self.fails = False
            raise RuntimeError("secret words of a defect")
        return super().propose(state, control)


@dataclass(eq=False)
class Running:
    url: str  # without /v1
    service: Service
    draft: Gated
    server: uvicorn.Server

    @functools.cache  # noqa: B019
    def client(self, key: str = "none", **settings: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, **{"max_retries": 0, "timeout": 30, **settings}
        )

    def metric(self, name: str, **labels: str) -> float:
        return self.service.metrics.registry.get_sample_value(name, labels) or 0.0


def config_of(decode: dict[str, Any] | None = None, **serve: Any) -> Config:
    return Config(
        name="tiny",
        target=TargetConfig(name="tiny", path="tiny"),
        decode=DecodeConfig(**{"k": 3, "max_new_tokens": 24, **(decode or {})}),
        serve=ServeConfig(**{"port": 0, "max_batch_size": 4, **serve}),
        out=str(Path("unused")),
    )


@contextmanager
def running(config: Config, key: str | None = None) -> Iterator[Running]:
    draft = Gated()
    service = new_service(config, talking_target(), None if config.serve.plain else draft, key)
    with bound_socket(config.serve.host, config.serve.port, "serve") as bound:
        port = bound.getsockname()[1]
        server = uvicorn.Server(
            uvicorn.Config(
                build_app(service), log_level="critical", lifespan="on", timeout_graceful_shutdown=5
            )
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{port}"
        try:
            assert (
                httpx.Client(transport=httpx.HTTPTransport(retries=8)).get(f"{url}/health").status_code == 200
            )
            yield Running(url, service, draft, server)
        finally:
            draft.open()
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive() and not service.worker.thread.is_alive()


def alone(request: Request, draft: bool = True) -> str:
    """The text that the engine writes when nobody else is there, cut at its stop strings."""
    target = talking_target()

    def decode(tokens: list[int]) -> str:
        return target.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    engine = Engine(target, NgramDraft(NgramOptions(min_n=1)) if draft else None, k=3, detokenise=decode)
    text = decode([token for token in engine.generate([request])[0].tokens if token not in request.eos])
    return text[: min([text.find(one) for one in request.stop if one in text], default=None)]


def wait_for(condition: Callable[[], object]) -> None:
    """Until it holds; the test's own time limit is 20 s."""
    tick = threading.Event()
    for _ in range(2000):
        if condition():
            return
        tick.wait(0.01)
    raise AssertionError("it never came to hold")
