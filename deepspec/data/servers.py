"""A pool of OpenAI-compatible chat servers: retries with back-off, health of each, nothing asked in vain."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import BoundedSemaphore, Event, Lock
from typing import Any

import httpx

from deepspec.data.conversation import Message
from deepspec.data.protocol import (
    FIRST_WAIT,
    KEY,
    LONGEST_WAIT,
    REFUSED,
    back_off,
    base_url,
    key_header,
    may_pass,
    retry_after,
    time_limits,
)
from deepspec.errors import UserError

OURS = ("messages", "model", "stream", "n", "temperature", "top_p", "max_tokens", "seed", "tools")
TOLERATED = 3  # failures in a row before a server is left alone for a while


class Failure(Exception):
    """This prompt has no answer; the text says why."""


class _Again(Exception):
    """Worth another try; `after`: seconds the server asked for."""

    def __init__(self, why: str, after: float | None = None) -> None:
        super().__init__(why)
        self.after = after


@dataclass(frozen=True)
class Reply:
    """One answer. finish_reason: "stop", "length" (cut), or "tool_calls". usage: as the server counts."""

    message: Message
    finish_reason: str
    usage: dict[str, Any]
    model: str


@dataclass
class _Server:
    url: str
    slots: BoundedSemaphore
    in_flight: int = 0
    failures: int = 0
    resting_until: float = 0.0
    served: int = 0


@dataclass(frozen=True)
class Sampling:
    """What every request says beside its messages; `more` goes into the body as it is."""

    temperature: float
    top_p: float
    max_tokens: int
    more: Mapping[str, Any] = field(default_factory=dict)

    def body(self, seed: int) -> dict[str, Any]:
        limit = {} if "max_completion_tokens" in self.more else {"max_tokens": self.max_tokens}
        own = {"temperature": self.temperature, "top_p": self.top_p, "seed": seed % 2**31, "stream": False}
        return {**own, **limit, **self.more}


class Pool:
    """Servers by base URL (`http://host:8000/v1`). The key, if any, comes from the environment alone.

    model: its name there; None: the first the server lists. timeout: seconds without a byte. retries: of one
    request. sleep, clock: for tests. `UserError` if no server can be reached, or one refuses altogether.
    """

    def __init__(
        self,
        urls: Sequence[str],
        sampling: Sampling,
        *,
        model: str | None = None,
        concurrency: int = 32,
        timeout: float = 600.0,
        retries: int = 6,
        sleep: Callable[[float], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        wrong = [name for name in sampling.more if name in OURS]
        if wrong:
            raise UserError(
                f"data.server_args cannot set {wrong[0]!r}: data has a key for it, or it is fixed."
            )
        self.servers = [_Server(base_url(url, "data.servers"), BoundedSemaphore(concurrency)) for url in urls]
        if not self.servers:
            raise UserError("data.regenerate=servers needs data.servers: at least one base URL.")
        self.sampling = sampling
        self.workers = concurrency * len(self.servers)
        self.retries = retries
        self.clock = clock
        self.lock = Lock()
        self.stopped = Event()
        self.sleep = sleep or self.stopped.wait
        self.client = httpx.Client(
            headers=key_header(),
            timeout=time_limits(timeout),
            limits=httpx.Limits(max_connections=None),
        )
        self.model = model or self._first_model()

    def ask(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], seed: int) -> Reply:
        """The answer to `messages`. `Failure` after all retries or for a prompt that is refused."""
        body = {"model": self.model, "messages": [_sent(message) for message in messages]}
        body |= self.sampling.body(seed)
        if tools:
            body["tools"] = list(tools)
        attempt, server = 0, None
        while True:
            server = self._next(avoid=server)
            try:
                with server.slots:
                    reply = self._post(server, body)
                self._worked(server)
                return reply
            except _Again as error:
                problem = error
            finally:
                with self.lock:
                    server.in_flight -= 1
            pause = self._failed(server, attempt, problem.after)
            if attempt == self.retries or self.stopped.is_set():
                raise Failure(f"{problem}, after {attempt + 1} tries") from problem
            attempt += 1
            self.sleep(pause)

    def close(self) -> None:
        """End waiting and running requests; they fail."""
        self.stopped.set()
        self.client.close()

    def _first_model(self) -> str:
        last = ""
        for server in self.servers:
            try:
                response = self.client.get(f"{server.url}/models")
                _check_refused(response, server)
                return str(response.json()["data"][0]["id"])
            except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
                last = f"{server.url}: {error or type(error).__name__}"
        raise UserError(
            f"No server of data.servers lists a model ({last}). Start it, or set data.server_model."
        )

    def _next(self, avoid: _Server | None) -> _Server:
        """The server with the fewest requests, of those not left alone; waits if all are. A request that failed
        goes to another server if there is one."""
        while True:
            with self.lock:
                now = self.clock()
                awake = [server for server in self.servers if server.resting_until <= now]
                if awake:
                    server = min(awake, key=lambda item: (item is avoid, item.in_flight, item.served))
                    server.in_flight += 1
                    return server
                pause = min(server.resting_until for server in self.servers) - now
            if self.stopped.is_set():
                raise Failure("stopped")
            self.sleep(pause)

    def _failed(self, server: _Server, attempt: int, after: float | None) -> float:
        """Note it; how long to wait before the next try."""
        own = back_off(attempt)
        with self.lock:
            server.failures += 1
            rest = after or 0.0
            if server.failures >= TOLERATED:
                rest = max(rest, min(FIRST_WAIT * 2 ** (server.failures - TOLERATED), LONGEST_WAIT))
            server.resting_until = max(server.resting_until, self.clock() + rest)
            others = len(self.servers) > 1
        return own if after is None or others else max(own, after)

    def _worked(self, server: _Server) -> None:
        with self.lock:
            server.failures = 0
            server.served += 1

    def _post(self, server: _Server, body: dict[str, Any]) -> Reply:
        try:
            response = self.client.post(f"{server.url}/chat/completions", json=body)
        except httpx.TimeoutException as error:
            raise _Again("timed out") from error
        except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: the client was closed meanwhile
            raise _Again(f"connection failed ({error or type(error).__name__})") from error
        _check_refused(response, server)
        if may_pass(response.status_code):
            raise _Again(f"status {response.status_code}", retry_after(response.headers))
        if response.status_code != 200:
            raise Failure(f"status {response.status_code}: {response.text[:200]}")
        try:
            return _reply(response.json())
        except (ValueError, LookupError, TypeError) as error:
            raise _Again("not a chat completion") from error


def _sent(message: Message) -> Message:
    """A message as the protocol has it: the arguments of calls are text."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        calls.append({**call, "function": {**function, "arguments": json.dumps(function["arguments"])}})
    return {**message, "tool_calls": calls}


def _check_refused(response: httpx.Response, server: _Server) -> None:
    if response.status_code in REFUSED:
        raise UserError(
            f"{server.url} refuses with status {response.status_code}: check data.servers, data.server_model and "
            f"the key in {KEY}. Finished answers are kept."
        )


def _reply(content: Any) -> Reply:
    """A chat completion's first choice. ValueError, LookupError or TypeError if it is none."""
    choice = content["choices"][0]
    said = choice["message"]
    text = said.get("content")
    if text is not None and not isinstance(text, str):
        raise TypeError("content is not text")
    message: Message = {"role": "assistant", "content": text or ""}
    thought = said.get("reasoning_content") or said.get("reasoning")
    if isinstance(thought, str) and thought:
        message["reasoning_content"] = thought
    if said.get("tool_calls"):
        message["tool_calls"] = said["tool_calls"]
    usage = content.get("usage")
    return Reply(
        message,
        str(choice["finish_reason"]),
        usage if isinstance(usage, dict) else {},
        str(content.get("model", "")),
    )
