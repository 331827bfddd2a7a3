"""An OpenAI-compatible chat server on 127.0.0.1 that misbehaves on request."""

import json
import socket
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Fault = Callable[["Handler", dict[str, Any]], bool]
"""Answers the request wrongly and returns True, or leaves it alone."""


def answer_to(messages: list[dict[str, Any]]) -> tuple[str, str]:
    """Text and finish reason: a plain function of what was asked, so that any order gives the same."""
    asked = messages[-1]["content"]
    return (f"re {len(messages)} {asked}"[:40], "length" if "cut me" in asked else "stop")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "FaultyServer"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": "toy-model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append(body)
            self.server.keys.append(self.headers.get("Authorization"))
            number = len(self.server.requests) - 1
        fault = self.server.fault(number, body)
        if fault is not None and fault(self, body):
            return
        self.reply(200, self.completion(body))
        with self.server.lock:
            self.server.answered[body["messages"][-1]["content"]] += 1

    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        text, reason = answer_to(body["messages"])
        return {
            "model": body["model"],
            "choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": reason}],
            "usage": {"completion_tokens": len(text.split())},
        }

    def reply(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(raw)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(raw)


def drop(handler: Handler, body: dict[str, Any]) -> bool:
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True
    return True


def half(handler: Handler, body: dict[str, Any]) -> bool:
    raw = json.dumps(handler.completion(body)).encode()
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(raw)))
    handler.end_headers()
    handler.wfile.write(raw[: len(raw) // 2])
    handler.wfile.flush()
    return drop(handler, body)


def garbage(handler: Handler, body: dict[str, Any]) -> bool:
    handler.reply(200, b'{"choices": [')
    return True


def empty(handler: Handler, body: dict[str, Any]) -> bool:
    handler.reply(200, {"choices": []})
    return True


def status(code: int, **headers: str) -> Fault:
    def fault(handler: Handler, body: dict[str, Any]) -> bool:
        handler.reply(
            code, {"error": "no"}, {name.replace("_", "-"): value for name, value in headers.items()}
        )
        return True

    return fault


class FaultyServer(ThreadingHTTPServer):
    """fault: (number of the request, its body) → a fault, or None for a proper answer. Use as a context."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self, fault: Callable[[int, dict[str, Any]], Fault | None] = lambda number, body: None
    ) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.fault = fault
        self.lock = threading.Lock()
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.answered: Counter[str] = Counter()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_: Any) -> None:
        """A client that went away is no news here."""

    def __enter__(self) -> "FaultyServer":
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.shutdown()
        self.server_close()
        self.thread.join()
