"""Features over a wire: real servers on this machine, killed, restarted, wrong, slow; the same tensors or none."""

import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
import torch
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspec.errors import UserError
from deepspec.serving.features import FeatureService, build_feature_app
from deepspec.target import Target
from deepspec.target.features.wire import Malformed, answer, question, read_answer, read_question
from deepspec.target.model import Captured
from deepspec.training.batches import RowBatch
from deepspec.training.memory import GIB, FeatureMemory
from deepspec.training.remote import FromServer
from deepspec.training.sources import Online
from tests.models import tiny_model

LAYERS = [0, 2]


def target(family: str = "llama", weights: str = "w") -> Target:
    identity = {"name": family, "weights": weights, "dtype": "float64", "hidden_size": 32}
    return Target(tiny_model(family), None, family, identity)


def batch(rows: int = 3, length: int = 11, seed: int = 0) -> RowBatch:
    """Two documents a row, padding behind."""
    draw = torch.Generator().manual_seed(seed)
    place = torch.arange(length).repeat(rows, 1)
    documents = torch.where(place < 4, 0, torch.where(place < length - 2, 1, -1))
    positions = torch.where(documents == 1, place - 4, place)
    tokens = torch.randint(3, 97, (rows, length), generator=draw)
    return RowBatch(tokens, torch.ones_like(tokens), documents, positions, list(range(rows)), True)


class Running:
    """The real application in a thread, on a port of its own."""

    def __init__(self, service: FeatureService, port: int = 0) -> None:
        self.service = service
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(("127.0.0.1", port))
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = uvicorn.Server(uvicorn.Config(build_feature_app(service), log_level="error"))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True)
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive()

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join()
        self.socket.close()


@contextmanager
def running(service: FeatureService, port: int = 0) -> Iterator[Running]:
    server = Running(service, port)
    try:
        yield server
    finally:
        server.stop()


def service(whole: Target | None = None, **more: Any) -> FeatureService:
    limits = {"queue": 4, "max_body": 1 << 20, "max_tokens": 1 << 12}
    return FeatureService(whole or target(), **{**limits, **more})


def client(urls: Sequence[str], mine: Target | None = None, **more: Any) -> FromServer:
    usual: dict[str, Any] = {"seconds": 30.0, "made_by": "MAKE", "resume": "RESUME", "sleep": lambda _: None}
    return FromServer(mine or target(), LAYERS, urls, **{**usual, **more})


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("size", [None, 2])
def test_a_server_gives_what_the_target_gives_here(family: str, size: int | None) -> None:
    whole = target(family)
    with running(service(whole)) as server:
        source = client([server.url], target(family), batch_size=size)
        for seed in range(2):
            asked = batch(seed=seed)
            (found,), (expected,) = source.captured([asked]), Online(whole, LAYERS).captured([asked])
            real = asked.documents >= 0
            torch.testing.assert_close(found.features[real], expected.features[real], rtol=0, atol=1e-12)
            torch.testing.assert_close(
                found.last_hidden[real], expected.last_hidden[real], rtol=0, atol=1e-12
            )


def test_rows_that_are_kept_are_asked_for_once() -> None:
    whole = target()
    asked = batch(rows=3)
    one_row = 11 * 32 * (len(LAYERS) + 1) * 8  # bytes of a row's features and last hidden state
    with running(service(whole)) as server:
        source = client([server.url], target(), memory=FeatureMemory(2.5 * one_row / GIB))
        (first,), (again,) = source.captured([asked]), source.captured([asked])
        served = server.service.served_tokens
    assert served == 11 * (3 + 1)  # the third row did not fit and is asked for again
    (expected,) = Online(whole, LAYERS).captured([asked])
    real = asked.documents >= 0
    for found in (first, again):
        torch.testing.assert_close(found.features[real], expected.features[real], rtol=0, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(1, 9), st.lists(st.integers(0, 99), max_size=4), st.randoms())
def test_what_is_said_is_understood_and_damage_is_seen(
    rows: int, length: int, layers: list[int], draw: Any
) -> None:
    columns = [torch.randint(-1, 50, (rows, length)) for _ in range(3)]
    content = question(*columns, layers, {"name": "n", "weights": "w"})
    read, asked, _ = read_question(content)
    assert asked == layers
    for name, column in zip(("tokens", "positions", "documents"), columns, strict=True):
        assert torch.equal(read[name], column)
    with pytest.raises(Malformed):
        read_question(content[: draw.randrange(len(content))])
    captured = Captured(torch.randn(rows, length, 8), torch.randn(rows, length, 4))
    reply = answer(captured, {"name": "other", "weights": "w"})
    back = read_answer(reply, rows, length, 2, 4)
    assert torch.equal(back.features, captured.features) and torch.equal(
        back.last_hidden, captured.last_hidden
    )
    for wrong in ((rows + 1, length, 2, 4), (rows, length, 3, 4), (rows, length, 2, 5)):
        with pytest.raises(Malformed):
            read_answer(reply, *wrong)
    captured.features[0, 0, 0] = float("nan")
    with pytest.raises(Malformed, match="not finite"):
        read_answer(answer(captured, {}), rows, length, 2, 4)


def test_another_target_is_refused_by_what_differs() -> None:
    with (
        running(service(target(weights="theirs"))) as server,
        pytest.raises(UserError, match=r"runs another target: its weights is theirs, here it is w"),
    ):
        client([server.url])


def test_the_server_refuses_what_it_cannot_answer() -> None:
    whole = target()
    identity = whole.identity()
    asked = batch()
    columns = (asked.tokens, asked.positions, asked.documents)
    with running(service(whole, max_body=4000, max_tokens=40, key="k")) as server:
        path = f"{server.url}/v1/features"
        with httpx.Client(headers={"Authorization": "Bearer k"}) as http:

            def told(content: bytes) -> tuple[int, str]:
                reply = http.post(path, content=content)
                return reply.status_code, reply.json()["error"]["message"]

            assert http.post(path, content=question(*columns, LAYERS, identity)).status_code == 200
            assert told(question(*columns, [9], identity))[0] == 400
            assert "Layer 9 does not exist" in told(question(*columns, [9], identity))[1]
            assert told(question(*columns, LAYERS, {"weights": "x"}))[0] == 409
            assert told(b"rubbish" * 20)[0] == 400
            assert told(b"")[0] == 400
            assert told(question(asked.tokens + 500, *columns[1:], LAYERS, identity))[0] == 400
            wide = batch(4, 11)
            assert told(question(wide.tokens, wide.positions, wide.documents, LAYERS, identity))[0] == 413
            assert told(bytes(5000))[0] == 413
            assert http.get(path).json()["num_layers"] == 4
            assert "deepspec_feature_tokens_total 33" in http.get(f"{server.url}/metrics").text
        assert httpx.post(path, content=b"").status_code == 401
        with pytest.raises(UserError, match="refuses the key"):
            client([server.url])


def test_a_full_queue_says_when_to_come_again() -> None:
    whole = service(queue=1)
    whole.waiting = 1
    with running(whole) as server:
        reply = httpx.post(f"{server.url}/v1/features", content=b"x")
        assert (reply.status_code, reply.headers["Retry-After"]) == (429, "1")
        pauses: list[float] = []

        def sleep(seconds: float) -> None:
            pauses.append(seconds)
            whole.waiting = 0

        source = client([server.url], sleep=sleep)
        source.captured([batch()])
        assert pauses == [1.0]


def test_a_server_that_comes_back_is_asked_again() -> None:
    first = Running(service())
    source = client([first.url])
    expected = source.captured([batch()])[0]
    first.stop()
    back: list[Running] = []
    source.sleep = lambda _: back or back.append(Running(service(), first.port))
    found = source.captured([batch()])[0]
    back[0].stop()
    assert torch.equal(found.features, expected.features)


def test_one_of_two_servers_is_enough() -> None:
    gone = Running(service())
    with running(service()) as server:
        source = client([gone.url, server.url])
        gone.stop()
        for seed in range(3):
            expected = Online(target(), LAYERS).captured([batch(seed=seed)])[0]
            found = source.captured([batch(seed=seed)])[0]
            torch.testing.assert_close(found.last_hidden[:, :9], expected.last_hidden[:, :9])


def test_servers_that_stay_away_end_training_with_the_way_on() -> None:
    gone = Running(service())
    now = [0.0]
    source = client(
        [gone.url], seconds=5.0, clock=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s)
    )
    gone.stop()
    with pytest.raises(UserError, match=r"has answered for 5 s .* \(MAKE\).*RESUME"):
        source.captured([batch()])
    with pytest.raises(UserError, match=r"No feature server can be reached .*MAKE"):
        client([gone.url])
    with pytest.raises(UserError, match=r"features\.servers"):
        client([])


def fake(replies: Callable[[int], tuple[int, bytes]]) -> Iterator[str]:
    """A server that answers questions with what it is told to."""
    about = {"target": {"weights": "w", "dtype": "float64", "hidden_size": 32}}
    about["fingerprint"] = service().about()["fingerprint"]
    count = [0]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._say(200, json.dumps(about).encode())

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            count[0] += 1
            self._say(*replies(count[0]))

        def _say(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_damaged_answers_are_no_answers() -> None:
    whole, asked = target(), batch()
    right = answer(Online(whole, LAYERS).captured([asked])[0], whole.identity())
    told = [(200, right[:-40]), (200, b""), (500, b"{}"), (200, b"{}"), (503, b""), (200, right)]
    for url in fake(lambda number: told[number - 1]):
        found = client([url]).captured([asked])[0]
    expected = Online(whole, LAYERS).captured([asked])[0]
    assert torch.equal(found.features, expected.features)


def test_what_is_no_feature_server_is_said() -> None:
    for url in fake(lambda number: (400, b"no")):
        with pytest.raises(UserError, match="refuses to give features: 400"):
            client([url]).captured([batch()])
