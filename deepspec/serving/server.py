"""The server's process: the address first, then the engine, then requests until a signal ends it."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from types import FrameType

import uvicorn
from fastapi import FastAPI

from deepspec.config.schema import Config
from deepspec.data.conversation import BadRow
from deepspec.data.template import ChatTemplate
from deepspec.decoding import Engine, Request
from deepspec.drafts.contract import Drafter
from deepspec.errors import UserError
from deepspec.serving.app import Service, build_app
from deepspec.serving.metrics import Metrics
from deepspec.serving.translate import Translator
from deepspec.serving.worker import Worker
from deepspec.target import Target

KEY = "DEEPSPEC_API_KEY"


def key_from_environment() -> str | None:
    """What clients must show, from $DEEPSPEC_API_KEY; `UserError` where it is set and cannot be a key."""
    key = os.environ.get(KEY)
    if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
        raise UserError(
            f"{KEY} is set and is no key: it is empty, or has blanks or letters beyond ASCII. Set or unset it."
        )
    return key


def bound_socket(host: str, port: int, setting: str) -> socket.socket:
    """The address, taken before anything slow; nobody can connect before the server listens. setting: the group of
    keys that it comes from, for messages."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # By its full name: only then does asyncio send small pieces at once, and no token waits for an acknowledgement.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise UserError(
            f"{host}:{port} cannot be served ({error.strerror or error}). Choose another with {setting}.port=... "
            f"or {setting}.host=..."
        ) from error
    return bound


def new_service(config: Config, target: Target, draft: Drafter | None, key: str | None) -> Service:
    """Everything that answers requests, warmed: the template tried, a hardware-aware schedule's costs measured."""
    serve = config.serve
    if target.tokenizer is None:
        raise UserError(f"{target.name} has no tokenizer: the server cannot read text.")
    if config.decode.exact or config.decode.compile:
        raise UserError(
            "decode.exact and decode.compile need to know the longest request beforehand, which a server does not: "
            "leave them out."
        )

    def decode(tokens: list[int]) -> str:
        return str(
            target.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    engine = Engine.configured(
        target, draft, config.decode, max_batch_size=serve.max_batch_size, detokenise=decode
    )
    template = ChatTemplate(target.tokenizer, target.eos, arguments=config.data.template_args)
    try:
        greeting = template.prompt([{"role": "user", "content": "Hello"}])
    except BadRow as error:
        raise UserError(f"The target's chat template does not take a question: {error}.") from error
    engine.learn_costs([Request(greeting, min(serve.max_new_tokens, config.decode.max_new_tokens))])
    metrics = Metrics(engine.how.longest)
    worker = Worker(engine, serve.queue, metrics)
    name = serve.model or config.name
    translator = Translator(engine, template, name, config.decode, serve.max_new_tokens, worker.capacity)
    about = {"root": target.name, "max_model_len": target.max_positions}
    return Service(worker, translator, decode, metrics, serve.max_body, serve.timeout, key, about)


def serve_until_told(service: Service, bound: socket.socket, grace: float) -> None:
    """Answer requests until SIGTERM or Ctrl-C: then no new ones, and `grace` seconds for those that are here."""
    run_app(build_app(service), bound, grace, service.worker.drain)


def run_app(app: FastAPI, bound: socket.socket, grace: float, told: Callable[[], None]) -> None:
    """Run an application until SIGTERM or Ctrl-C. told: called at that signal, before connections are closed."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=max(int(grace), 1),
        server_header=False,
    )
    with _own_signals():
        _Server(config, told).run(sockets=[bound])


def is_local(host: str) -> bool:
    """Whether only this machine can connect."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


class _Server(uvicorn.Server):
    """Refuses new requests, also on connections that are open, from the signal on."""

    def __init__(self, config: uvicorn.Config, told: Callable[[], None]) -> None:
        super().__init__(config)
        self.told = told

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.told()
        super().handle_exit(sig, frame)


@contextmanager
def _own_signals() -> Iterator[None]:
    """uvicorn raises the signal that stopped it again; a server that was told to stop has ended well."""
    before = {one: signal.signal(one, lambda *_: None) for one in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
