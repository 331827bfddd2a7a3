"""A streaming server on 127.0.0.1 that misbehaves on request, and notes when it wrote what."""

import json
import socket
import time
from collections.abc import Callable
from typing import Any

from tests.data.faulty_server import Fault, FaultyServer, Handler

WORDS = ["Two ", "plus ", "two ", "is ", "four", "."]


class Streaming(Handler):
    """Answers with WORDS, one chunk each."""

    server: "FakeServer"
    disable_nagle_algorithm = True  # or every answer on an open connection waits 40 ms for an acknowledgement

    def do_GET(self) -> None:
        self.server.gets.append(self.path)
        if self.path.endswith("/metrics"):
            page = self.server.metrics()
            self.reply(404 if page is None else 200, (page or "").encode())
            return
        self.reply(self.server.models_status, self.server.models)

    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError("a stream was asked for")

    def reply(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        super().reply(status, content, {"Content-Type": "application/json", **(headers or {})})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        received = time.perf_counter()
        with self.server.lock:
            self.server.requests.append(body)
            self.server.keys.append(self.headers.get("Authorization"))
            number = len(self.server.requests) - 1
        fault = self.server.fault(number, body)
        if fault is not None and fault(self, body):
            return
        self.begin()
        times = []
        for piece in WORDS[: self.server.words]:
            times.append(time.perf_counter() - received)
            self.event(self.chunk(body, {"content": piece}))
        self.event(self.chunk(body, {}, "stop"))
        if self.server.usage and body.get("stream_options"):
            usage = {"prompt_tokens": 7, "completion_tokens": 11, "total_tokens": 18}
            self.event({"model": body["model"], "choices": [], "usage": usage})
        self.data("[DONE]")
        self.wfile.write(b"0\r\n\r\n")
        with self.server.lock:
            self.server.times.append(times)

    def begin(self, kind: str = "text/event-stream") -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def chunk(self, body: dict[str, Any], delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return {"model": self.server.answers_as or body["model"], "choices": [choice]}

    def event(self, content: Any) -> None:
        self.data(json.dumps(content))

    def data(self, text: str) -> None:
        raw = f"data: {text}\n\n".encode()
        self.wfile.write(f"{len(raw):x}\r\n".encode() + raw + b"\r\n")
        self.wfile.flush()


class FakeServer(FaultyServer):
    def __init__(
        self,
        fault: Callable[[int, dict[str, Any]], Fault | None] = lambda number, body: None,
        **settings: Any,
    ) -> None:
        super().__init__(fault)
        self.RequestHandlerClass = Streaming
        self.models: Any = {"data": [{"id": "toy-model"}, {"id": "spare"}]}
        self.models_status, self.words, self.usage, self.answers_as = 200, len(WORDS), True, None
        self.metrics: Callable[[], str | None] = lambda: None
        self.times: list[list[float]] = []
        self.gets: list[str] = []
        for name, value in settings.items():
            setattr(self, name, value)


def half_a_stream(handler: Streaming, body: dict[str, Any]) -> bool:
    handler.begin()
    handler.event(handler.chunk(body, {"content": "Two"}))
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True
    return True


def ends_early(handler: Streaming, body: dict[str, Any]) -> bool:
    handler.begin()
    handler.event(handler.chunk(body, {"content": "Two"}))
    handler.wfile.write(b"0\r\n\r\n")
    return True


def bad_line(handler: Streaming, body: dict[str, Any]) -> bool:
    handler.begin()
    handler.data('{"choices": [')
    handler.wfile.write(b"0\r\n\r\n")
    return True


def error_event(handler: Streaming, body: dict[str, Any]) -> bool:
    handler.begin()
    key = (handler.headers.get("Authorization") or "").removeprefix("Bearer ")
    handler.event({"error": {"message": f"out of memory for {key}"}})
    handler.wfile.write(b"0\r\n\r\n")
    return True


def whole_answer(handler: Streaming, body: dict[str, Any]) -> bool:
    handler.reply(200, {"choices": [{"message": {"content": "Two"}, "finish_reason": "stop"}]})
    return True


def silent(handler: Streaming, body: dict[str, Any]) -> bool:
    """Nothing, until the client goes away."""
    handler.begin()
    handler.connection.recv(1)
    handler.close_connection = True
    return True
