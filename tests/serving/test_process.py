"""`python -m deepspec.serve` as a process: what it says, how it ends, and what it refuses before anything is loaded."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from deepspec import serve
from deepspec.errors import UserError
from deepspec.serving.server import KEY, bound_socket, is_local, key_from_environment
from tests.config.processes import ROOT, environment
from tests.talking import talking_run, talking_target


def test_a_signal_ends_it_after_the_running_answer(tmp_path: Path) -> None:
    target = talking_target()
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hello"}\n')
    words = [
        "name=served",
        "target=hf",
        f"target.path={tmp_path / 'target'}",
        "target.name=tiny",
        "target.dtype=float64",
    ]
    words += ["draft=ngram", f"evaluate.prompts={tmp_path / 'prompts.jsonl'}", "serve.port=0", "decode.k=3"]
    process = subprocess.Popen(
        [sys.executable, "-m", "deepspec.serve", *words],
        cwd=tmp_path,
        env={**environment(ROOT), KEY: "process-key"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(3)]
        assert "serving tiny with NgramDraft as 'served'" in said[1], process.communicate(timeout=5)
        url = said[2].split()[1]
        body = {"model": "served", "prompt": "Hello", "max_tokens": 240, "stream": True, "ignore_eos": True}
        header = {"Authorization": "Bearer process-key"}
        transport = httpx.HTTPTransport(retries=8)
        with (
            httpx.Client(transport=transport, headers=header, timeout=60) as client,
            client.stream("POST", f"{url}/completions", json={**body, "max_tokens": 200}) as response,
        ):
            lines = response.iter_lines()
            first = next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert first.startswith("data: ") and rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out.strip(), err.strip()) == (0, "stopped", "")
    finally:
        process.kill()


def test_a_missing_package_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = talking_run(tmp_path, monkeypatch)
    monkeypatch.setattr(serve, "NEEDED", ("fastapi", "no_such_package"))
    with pytest.raises(UserError, match=r"pip install no_such_package"):
        serve.run(config)


def test_an_address_that_is_taken_is_a_sentence() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(UserError, match=r"cannot be served \(Address already in use\)"):
            bound_socket("127.0.0.1", other.getsockname()[1], "serve")
    with pytest.raises(UserError, match="cannot be served"):
        bound_socket("203.0.113.7", 0, "serve")


def test_small_pieces_are_sent_at_once() -> None:
    """asyncio sets TCP_NODELAY on connections of such a socket only; without it every token may wait for 40 ms."""
    connections: list[int] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted = writer.get_extra_info("socket")
        connections.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    async def connect() -> None:
        with bound_socket("127.0.0.1", 0, "serve") as bound:
            async with await asyncio.start_server(answer, sock=bound):
                reader, writer = await asyncio.open_connection(*bound.getsockname())
                await reader.read()
                writer.close()

    asyncio.run(connect())
    assert connections and all(connections)


@pytest.mark.parametrize("key", ["", "two words", "schlüssel", "line\n"])
def test_a_key_that_is_none_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv(KEY, key)
    with pytest.raises(UserError, match=KEY) as caught:
        key_from_environment()
    assert not key or key.strip() not in str(caught.value)
    monkeypatch.delenv(KEY)
    assert key_from_environment() is None


def test_what_only_this_machine_reaches() -> None:
    assert [is_local(host) for host in ("127.0.0.1", "localhost", "::1")] == [True] * 3
    assert [is_local(host) for host in ("0.0.0.0", "192.168.1.2", "::", "example.org")] == [False] * 4
