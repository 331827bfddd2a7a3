"""One server as its client sees it: the list of models, streamed answers with their times, its metrics page."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from deepspec.data.conversation import Message
from deepspec.data.protocol import back_off, base_url, key_header, may_pass, retry_after, time_limits
from deepspec.endpoints.connect import SAMPLES, unreachable
from deepspec.endpoints.result import Answer
from deepspec.errors import UserError

MOST_BYTES = 64 << 20  # of one answer
LONGEST_LINE = 1 << 20
METRICS_SECONDS = 10.0
SHOWN = 200  # letters of what a server says
NO_USAGE = "stream_options"  # what a server that cannot give the usage complains of
Count = Callable[[str], int]


class Failed(Exception):
    """This request has no answer; the text says why."""


class _Again(Exception):
    """Worth another try. after: seconds that the server asked for. limited: it was 429."""

    def __init__(self, why: str, after: float | None = None, limited: bool = False) -> None:
        super().__init__(why)
        self.after, self.limited = after, limited


@dataclass
class Client:
    """Asks one server. setting: the configuration's name of its URL, for messages. variable: of the environment, with
    the key. body: what every request says beside model and messages. count: text → tokens, where the server gives no
    usage.

    401, 403, 404 and an address that nobody answers at raise `UserError`: they are wrong for every request.
    """

    url: str
    model: str | None
    setting: str
    variable: str
    body: Mapping[str, Any]
    timeout: float
    retries: int
    connections: int
    count: Count | None = None
    ask_usage: bool = True
    models: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.url = base_url(self.url, self.setting, self.variable)
        self.header = key_header(self.variable)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self.connections)
        self.http = httpx.AsyncClient(headers=self.header, timeout=time_limits(self.timeout), limits=limits)

    async def close(self) -> None:
        await self.http.aclose()

    async def first_contact(self) -> list[str]:
        """Find the model's name and check it; warnings. `UserError` where the server has it not."""
        try:
            response = await self.http.get(f"{self.url}/models")
        except httpx.TimeoutException as error:
            raise UserError(f"{self.url} does not answer within {self.timeout:g} s.") from error
        except httpx.HTTPError as error:
            raise UserError(unreachable(self.url, error)) from error
        if response.status_code in (401, 403):
            raise self._refused(response.status_code)
        try:
            response.raise_for_status()
            self.models = [str(one["id"]) for one in response.json()["data"]]
        except (httpx.HTTPStatusError, ValueError, LookupError, TypeError) as error:
            if self.model is None:
                raise UserError(
                    f"{self.url} does not list its models: name one, {self._model_key}=..."
                ) from error
            return [f"{self.url} does not list its models (status {response.status_code})"]
        if self.model is None:
            if not self.models:
                raise UserError(f"{self.url} lists no model: name one, {self._model_key}=...")
            self.model = self.models[0]
        if (
            self.model not in self.models
        ):  # some servers load what they are asked for, others answer to any name
            return [f"it does not list {self.model!r}, but {', '.join(self.models[:10]) or 'nothing'}"]
        return []

    async def request_times(self) -> list[float]:
        """Seconds of requests for the list of models, one after the other on one connection; none where they fail."""
        found = []
        for _ in range(SAMPLES + 1):
            begun = time.perf_counter()
            try:
                (await self.http.get(f"{self.url}/models")).raise_for_status()
            except httpx.HTTPError:
                return []
            found.append(time.perf_counter() - begun)
        return found[1:]  # the first one may have had to connect

    async def open_connections(self, count: int) -> None:
        """So many at once, kept for the requests that follow: a connect is no part of a TTFT."""
        gets = [self.http.get(f"{self.url}/models") for _ in range(count)]
        await asyncio.gather(*gets, return_exceptions=True)

    async def metrics_page(self) -> str | None:
        """The server's /metrics, None if there is none."""
        place = httpx.URL(self.url)
        root = place.copy_with(path=place.path.removesuffix("/v1") + "/metrics")
        try:
            response = await self.http.get(root, timeout=METRICS_SECONDS)
        except httpx.HTTPError:
            return None
        return response.text if response.status_code == 200 else None

    async def ask(self, name: str, messages: Sequence[Message]) -> Answer:
        """One answer, after as many tries as are allowed; a failed one has `error`."""
        answer, begun = Answer(name), time.perf_counter()
        while True:
            answer.waited = time.perf_counter() - begun
            try:
                await self._try(messages, answer)
                return answer
            except _Again as problem:
                answer.rate_limited += problem.limited
                if answer.retried >= self.retries:
                    answer.error = f"{problem}, after {answer.retried + 1} tries"
                    return answer
                pause = max(back_off(answer.retried), problem.after or 0.0)
                answer.retried += 1
                await asyncio.sleep(pause)
            except Failed as error:
                answer.error = str(error)
                return answer

    # ------------------------------------------------------------------ one try

    async def _try(self, messages: Sequence[Message], answer: Answer) -> None:
        body: dict[str, Any] = {"model": self.model, "messages": list(messages), **self.body, "stream": True}
        if self.ask_usage:
            body["stream_options"] = {"include_usage": True}
        begun = time.perf_counter()
        try:
            async with (
                asyncio.timeout(self.timeout),
                self.http.stream("POST", f"{self.url}/chat/completions", json=body) as response,
            ):
                await self._check(response)
                await self._read(response, answer, begun)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise Failed(f"no complete answer within {self.timeout:g} s") from error
        except httpx.ConnectError as error:
            raise _Again(f"the connection failed ({str(error) or type(error).__name__})") from error
        except httpx.HTTPError as error:
            if answer.chunks:
                raise Failed(f"the stream broke off after {answer.chunks} chunks") from error
            raise _Again(f"the connection broke ({str(error) or type(error).__name__})") from error

    async def _check(self, response: httpx.Response) -> None:
        status = response.status_code
        if status == 200:
            kind = response.headers.get("content-type", "").partition(";")[0]
            if kind != "text/event-stream":
                raise Failed(f"the server does not stream: it answered with {kind or 'no content type'}")
            return
        if status in (401, 403):
            raise self._refused(status)
        said = self._said((await response.aread())[: 16 * SHOWN])
        if status == 404:
            raise self._no_model(said)
        if may_pass(status):
            raise _Again(f"status {status}: {said}", retry_after(response.headers), status == 429)
        if self.ask_usage and status in (400, 422) and NO_USAGE in said:
            self.ask_usage = False
            raise _Again(f"status {status}: {said}", 0.0)
        raise Failed(f"status {status}: {said}")

    async def _read(self, response: httpx.Response, answer: Answer, begun: float) -> None:
        """Times and text of a stream. `Failed` for half of one, or what is none."""
        text: list[str] = []
        usage = None
        answer.chunks, answer.finish = 0, None
        async for line in _lines(response):
            now = time.perf_counter() - begun
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                break
            chunk = self._parsed(data)
            answer.model = answer.model or str(chunk.get("model") or "")
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices") or ():
                piece = _text_of(choice)
                if piece:
                    answer.first = now if not text else answer.first
                    answer.last = now
                    answer.chunks += 1
                    text.append(piece)
                answer.finish = choice.get("finish_reason") or answer.finish
        else:
            if answer.finish is None:
                raise Failed(f"the stream ended in the middle, after {answer.chunks} chunks")
        answer.seconds = time.perf_counter() - begun
        self._count(answer, "".join(text), usage)

    def _parsed(self, data: str) -> dict[str, Any]:
        try:
            chunk = json.loads(data)
            if not isinstance(chunk, dict):
                raise ValueError("no object")
            bad = [one for one in chunk.get("choices") or () if not isinstance(one, dict)]
            if bad:
                raise ValueError("a choice that is no object")
        except (ValueError, RecursionError, TypeError) as error:
            raise Failed(
                f"the stream has a line that is not a JSON object: {self._said(data.encode())}"
            ) from error
        if chunk.get("error"):
            raise Failed(f"the server reports: {self._said(json.dumps(chunk['error']).encode())}")
        return chunk

    def _count(self, answer: Answer, text: str, usage: Any) -> None:
        if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
            answer.tokens, answer.counted = usage["completion_tokens"], "usage"
            prompt = usage.get("prompt_tokens")
            answer.prompt_tokens = prompt if isinstance(prompt, int) else None
        elif self.count is not None:
            answer.tokens, answer.counted = self.count(text), "tokenizer"
        else:
            answer.tokens, answer.counted = answer.chunks, "chunks"

    # ------------------------------------------------------------------ sentences

    def _refused(self, status: int) -> UserError:
        how = (
            f"the key was read from {self.variable}"
            if self.header
            else f"no key was sent: {self.variable} is not set"
        )
        return UserError(f"{self.url} refuses with status {status}; {how}.")

    def _no_model(self, said: str = "") -> UserError:
        if self.model in self.models:
            return UserError(
                f"{self.url}/chat/completions is not there (status 404): {said or 'no reason given'}"
            )
        listed = f"it has {', '.join(self.models[:10])}" if self.models else said or "it lists none"
        return UserError(f"{self.url} has no model {self.model!r}: {listed}. Set {self._model_key}=...")

    @property
    def _model_key(self) -> str:
        return "other_model" if self.setting == "other_url" else "model"

    def _said(self, content: bytes) -> str:
        """A server's words on one line, without the key that it may repeat."""
        text = " ".join(content.decode("utf-8", "replace").split())
        for key in (value.removeprefix("Bearer ") for value in self.header.values()):
            text = text.replace(key, "***")
        return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _text_of(choice: dict[str, Any]) -> str:
    """What a chunk adds to the answer: text, thoughts, or the arguments of a call."""
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return ""
    found = [delta.get(name) for name in ("content", "reasoning_content", "reasoning")]
    calls = delta.get("tool_calls")
    return "".join(one for one in found if isinstance(one, str)) + (json.dumps(calls) if calls else "")


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """Lines as they arrive; `Failed` rather than more memory than an answer takes."""
    held, total = b"", 0
    async for part in response.aiter_bytes():
        total += len(part)
        if total > MOST_BYTES or len(held) > LONGEST_LINE:
            raise Failed(f"the stream is no answer: {total >> 20} MiB, or a line of {len(held) >> 20} MiB")
        *whole, held = (held + part).split(b"\n")
        for line in whole:
            yield line.decode("utf-8", "replace").rstrip("\r")
    if held:
        yield held.decode("utf-8", "replace")
