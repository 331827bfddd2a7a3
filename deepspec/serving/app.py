"""The HTTP side: routes, the key, limits of size and time, and clients that hang up."""

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from deepspec.serving.answers import DONE, Form, event, usage_of
from deepspec.serving.exchange import Decode, Exchange, Piece
from deepspec.serving.metrics import Metrics
from deepspec.serving.refusal import Refusal
from deepspec.serving.translate import Ask, Translator
from deepspec.serving.worker import Worker

log = logging.getLogger("deepspec")
CLIENT_GONE = 499  # as nginx counts them; nobody reads it


@dataclass
class Service:
    """All that answers requests. decode: tokens → the text that clients see. max_body: bytes. timeout: seconds
    from a request's arrival to its end. key: what clients must show, None = nothing. about: of the model, for
    `/v1/models`."""

    worker: Worker
    translator: Translator
    decode: Decode
    metrics: Metrics
    max_body: int
    timeout: float
    key: str | None = None
    about: dict[str, Any] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))


def build_app(service: Service) -> FastAPI:
    """The application; the engine's thread lives as long as it does."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        yield
        await asyncio.to_thread(service.worker.close)

    def authorised(request: Request) -> None:
        """In constant time, so that nobody can guess a key letter by letter."""
        if service.key is None:
            return
        shown = request.headers.get("authorization", "")
        if not hmac.compare_digest(shown.encode(), f"Bearer {service.key}".encode()):
            message = "This server needs a key: send it as `Authorization: Bearer ...`."
            raise Refusal(401, message, kind="authentication_error", code="invalid_api_key")

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    guarded = [Depends(authorised)]

    @app.get("/health")
    async def health() -> Response:
        well = service.worker.thread.is_alive() and not service.worker.draining
        return JSONResponse({"status": "ok" if well else "stopping"}, 200 if well else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models", dependencies=guarded)
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model(service)]})

    @app.get("/v1/models/{name:path}", dependencies=guarded)
    async def model(name: str) -> Response:
        if name != service.translator.name:
            raise Refusal(404, f"The model {name!r} does not exist here.", code="model_not_found")
        return JSONResponse(_model(service))

    @app.post("/v1/chat/completions", dependencies=guarded)
    async def chat(request: Request) -> Response:
        return await _answer(service, request, service.translator.chat, Form(True, service.translator.name))

    @app.post("/v1/completions", dependencies=guarded)
    async def completion(request: Request) -> Response:
        form = Form(False, service.translator.name)
        return await _answer(service, request, service.translator.completion, form)

    @app.exception_handler(Refusal)
    async def refused(request: Request, refusal: Refusal) -> Response:
        if request.method == "POST":
            service.metrics.requests.labels(request.url.path, str(refusal.status)).inc()
        return JSONResponse(refusal.body(), refusal.status, refusal.headers())

    @app.exception_handler(HTTPException)
    async def no_such_path(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}."
        return JSONResponse(Refusal(error.status_code, message).body(), error.status_code)

    @app.exception_handler(Exception)
    async def defect(request: Request, error: Exception) -> Response:
        refusal = Refusal(500, "The server failed on this request; its log says how.", kind="server_error")
        return JSONResponse(refusal.body(), 500)

    return app


def _model(service: Service) -> dict[str, Any]:
    name, created = service.translator.name, service.created
    return {"id": name, "object": "model", "created": created, "owned_by": "deepspec", **service.about}


async def _answer(
    service: Service, request: Request, translate: Callable[[dict[str, Any]], Ask], form: Form
) -> Response:
    """One completion of either kind. What cannot be answered is refused before a stream begins."""
    body = await _body(request, service.max_body, service.timeout)
    ask = await asyncio.to_thread(translate, body)
    exchange = Exchange(service.worker, ask.requests, service.decode, service.timeout)
    exchange.start()
    pieces = exchange.pieces()
    try:
        first = await _unless_gone(request.receive, anext(pieces))
    except BaseException:
        exchange.close()
        raise
    count = service.metrics.requests.labels
    if first is None:
        exchange.close()
        count(request.url.path, str(CLIENT_GONE)).inc()
        return Response(status_code=CLIENT_GONE)
    if ask.stream:
        return _Stream(
            exchange, first, pieces, ask, form, lambda status: count(request.url.path, status).inc()
        )
    try:
        answer = await _unless_gone(request.receive, _collect(first, pieces, len(ask.requests)))
    finally:
        exchange.close()
    if answer is None:
        count(request.url.path, str(CLIENT_GONE)).inc()
        return Response(status_code=CLIENT_GONE)
    count(request.url.path, "200").inc()
    texts, finishes = answer
    return JSONResponse(form.whole(texts, finishes, usage_of(ask.prompt_tokens, exchange.tokens)))


async def _body(request: Request, most: int, seconds: float) -> dict[str, Any]:
    """The request's JSON object; never more of it in memory than allowed."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refusal(415, "Send JSON, with `Content-Type: application/json`.")
    too_long = Refusal(413, f"The request is longer than {most} bytes.", code="request_too_large")
    if int(request.headers.get("content-length") or 0) > most:
        raise too_long
    content = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                content += part
                if len(content) > most:
                    raise too_long
    except TimeoutError as error:
        raise Refusal(408, f"The request was not complete after {seconds:g} s.") from error
    except ClientDisconnect as error:
        raise Refusal(CLIENT_GONE, "The client hung up.") from error
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"The request is not valid JSON ({error}).") from error
    if not isinstance(body, dict):
        raise Refusal(400, "The request is not a JSON object.")
    return body


async def _unless_gone(receive: Receive, work: Any) -> Any:
    """What `work` gives, or None as soon as the client hangs up."""
    answer = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        return answer.result() if answer.done() else None
    finally:
        for task in (answer, gone):
            if not task.done():
                task.cancel()
        await asyncio.gather(answer, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _collect(
    first: Piece, pieces: AsyncIterator[Piece], choices: int
) -> tuple[list[str], list[str | None]]:
    """Each choice's whole text and finish."""
    texts = [""] * choices
    finishes: list[str | None] = [None] * choices
    texts[first.choice], finishes[first.choice] = first.text, first.finish
    async for piece in pieces:
        texts[piece.choice] += piece.text
        finishes[piece.choice] = piece.finish
    return texts, finishes


class _Stream(Response):
    """Server-sent events until the end, an error (an event of its own), or the client is gone."""

    def __init__(
        self,
        exchange: Exchange,
        first: Piece,
        pieces: AsyncIterator[Piece],
        ask: Ask,
        form: Form,
        count: Callable[[str], None],
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.raw_headers[[name for name, _ in self.raw_headers].index(b"content-length")]
        self.exchange, self.first, self.pieces = exchange, first, pieces
        self.ask, self.form, self.count = ask, form, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            status = await _unless_gone(receive, self._send(send))
            self.count(str(CLIENT_GONE if status is None else status))
        except OSError:  # the connection broke while being written to
            self.count(str(CLIENT_GONE))
        finally:
            self.exchange.close()

    async def _send(self, send: Send) -> int:
        async def say(content: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": content, "more_body": more})

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        status = 200
        for chunk in [*self.form.opening(len(self.ask.requests)), *self.form.chunks(self.first)]:
            await say(event(chunk))
        try:
            async for piece in self.pieces:
                await say(b"".join(event(chunk) for chunk in self.form.chunks(piece)))
        except Refusal as refusal:
            await say(event(refusal.body()))
            status = refusal.status
        else:
            if self.ask.include_usage:
                usage = usage_of(self.ask.prompt_tokens, self.exchange.tokens)
                await say(event(self.form.usage_chunk(usage)))
            await say(DONE)
        await say(b"", more=False)
        return status
