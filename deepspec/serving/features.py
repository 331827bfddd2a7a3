"""The feature server: a target that runs texts for others who train drafts, one batch after the other."""

import asyncio
import hmac
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response

from deepspec.artifacts import fingerprint
from deepspec.errors import UserError
from deepspec.serving.engine import EngineTarget
from deepspec.serving.refusal import Refusal
from deepspec.target import Target
from deepspec.target.features.wire import (
    COLUMNS,
    MEDIA_TYPE,
    PATH,
    PROTOCOL,
    Malformed,
    answer,
    identity_of,
    read_question,
)

RETRY_SECONDS = 1


@dataclass
class FeatureService:
    """queue: batches that may wait for the target; more are refused with 429, which tells clients to come later.
    max_body: bytes of a question. max_tokens: of a batch. key: what clients must show; None = nothing."""

    target: Target | EngineTarget
    queue: int
    max_body: int
    max_tokens: int
    key: str | None = None
    waiting: int = 0
    served_tokens: int = 0
    stopping: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def stop(self) -> None:
        """Say so to whoever asks how it is; questions that are here are answered."""
        self.stopping = True

    def about(self) -> dict[str, Any]:
        """What a client must know before it asks."""
        return {
            "protocol": PROTOCOL,
            "target": identity_of(self.target.identity()),
            "fingerprint": fingerprint(identity_of(self.target.identity())),
            "name": self.target.name,
            "hidden_size": self.target.hidden_size,
            "num_layers": self.target.num_layers,
            "max_tokens": self.max_tokens,
        }

    def features(self, content: bytes) -> bytes:
        """The answer to a question; one at a time. `Refusal` for what cannot be answered."""
        try:
            columns, layers, asked = read_question(content)
        except Malformed as error:
            raise Refusal(400, f"This is no question for features: {error}.") from error
        if asked != self.about()["fingerprint"]:
            raise Refusal(
                409,
                f"This server runs another target ({self.about()['fingerprint']}, asked for was {asked or 'none'}); "
                f"GET {PATH} says which.",
                code="another_target",
            )
        tokens = columns["tokens"]
        if tokens.numel() > self.max_tokens:
            raise Refusal(
                413, f"{tokens.numel()} tokens are more than the {self.max_tokens} that fit into a batch."
            )
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.target.vocab_size:
            raise Refusal(400, f"Token ids lie between 0 and {self.target.vocab_size - 1}.", param="tokens")
        try:
            self.target.check_layers(layers)
        except UserError as error:
            raise Refusal(400, str(error), param="layers") from error
        with self.lock:
            tokens, positions, documents = (columns[name].to(self.target.device) for name in COLUMNS)
            captured = self.target.capture(tokens, positions, documents, layers)
            content = answer(captured, self.target.identity())
        self.served_tokens += tokens.numel()
        return content


def build_feature_app(service: FeatureService) -> FastAPI:
    """`GET /v1/features` says whose features these are, `POST` answers a question, `/health` and `/metrics` as usual."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    def authorised(request: Request) -> None:
        """In constant time, so that nobody can guess a key letter by letter."""
        shown = request.headers.get("authorization", "")
        if service.key is not None and not hmac.compare_digest(
            shown.encode(), f"Bearer {service.key}".encode()
        ):
            raise Refusal(
                401, "This server needs a key.", kind="authentication_error", code="invalid_api_key"
            )

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse(
            {"status": "stopping" if service.stopping else "ok"}, 503 if service.stopping else 200
        )

    @app.get("/metrics")
    async def metrics() -> Response:
        text = f"deepspec_feature_tokens_total {service.served_tokens}\ndeepspec_feature_waiting {service.waiting}\n"
        return Response(text, media_type="text/plain; version=0.0.4")

    @app.get(PATH, dependencies=[Depends(authorised)])
    async def about() -> Response:
        return JSONResponse(service.about())

    @app.post(PATH, dependencies=[Depends(authorised)])
    async def features(request: Request) -> Response:
        if service.waiting >= service.queue:
            raise Refusal(429, "All places in the queue are taken.", kind="server_error", after=RETRY_SECONDS)
        service.waiting += 1
        try:
            content = await _body(request, service.max_body)
            made = await asyncio.to_thread(service.features, content)
        finally:
            service.waiting -= 1
        return Response(made, media_type=MEDIA_TYPE)

    @app.exception_handler(Refusal)
    async def refused(request: Request, refusal: Refusal) -> Response:
        return JSONResponse(refusal.body(), refusal.status, refusal.headers())

    @app.exception_handler(torch.OutOfMemoryError)
    async def too_large(request: Request, error: torch.OutOfMemoryError) -> Response:
        message = "This batch does not fit into the device's memory: send fewer rows (features.batch_size)."
        return JSONResponse(Refusal(413, message).body(), 413)

    @app.exception_handler(Exception)
    async def defect(request: Request, error: Exception) -> Response:
        return JSONResponse(Refusal(500, "The server failed on this batch; its log says how.").body(), 500)

    return app


async def _body(request: Request, most: int) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise Refusal(413, f"A question may have {most} bytes.")
        parts.append(part)
    return b"".join(parts)
