"""Training from a feature server: real processes, one of them killed, and the weights of an undisturbed run."""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from deepspec import train as stage
from deepspec.config.schema import Config, FeatureSource
from deepspec.target import Edges
from deepspec.training import remote
from tests.config.processes import ROOT, environment
from tests.training.test_train_stage import change, config, model

__all__ = ["config", "model"]  # fixtures


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").is_success
    except httpx.TransportError:
        return False


@contextmanager
def serving(config: Config, port: int) -> Iterator[subprocess.Popen[str]]:
    """`deepspec.serve_features` in a process of its own, ready to answer."""
    target = config.target
    call = [sys.executable, "-m", "deepspec.serve_features", "target=hf", f"target.name={target.name}"]
    call += [
        f"target.path={target.path}",
        f"target.dtype={target.dtype.value}",
        f"feature_server.port={port}",
    ]
    call += [f"out={config.out}", "name=server"]
    with subprocess.Popen(
        call, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(ROOT)
    ) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("url"):
                break
        else:
            raise AssertionError("".join(said))
        try:
            while not answers(port):
                assert process.poll() is None
            yield process
        finally:
            process.kill()


def weights_of(config: Config, tmp_path: Path, name: str) -> dict[str, torch.Tensor]:
    folder = stage.run(config)
    found = load_file(folder / "model.safetensors")
    for place in ("draft", "checkpoints", "history.jsonl"):
        path = Path(config.out) / place
        if path.exists():
            path.rename(tmp_path / f"{name}-{place}")
    return found


def test_a_server_killed_in_the_middle_changes_nothing(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = weights_of(config, tmp_path, "online")
    port = free_port()
    away = change(
        config,
        features={
            "source": FeatureSource.server,
            "servers": [f"http://127.0.0.1:{port}/v1"],
            "server_seconds": 300.0,
            "prefetch": 1,
        },
    )
    asked: list[Any] = []
    again: list[Any] = []
    real = remote.FromServer._post
    with serving(config, port) as first:

        def post(self: Any, url: str, content: bytes) -> bytes:
            asked.append(type(self.whole))
            if len(asked) == 3:
                first.send_signal(signal.SIGKILL)
                first.wait()
            return real(self, url, content)

        def sleep(seconds: float) -> None:
            if not again:
                again.append(serving(config, port))
                again[0].__enter__()

        monkeypatch.setattr(remote.FromServer, "_post", post)
        monkeypatch.setattr(stage, "FromServer", partial(remote.FromServer, sleep=sleep))
        try:
            found = weights_of(away, tmp_path, "server")
        finally:
            for one in again:
                one.__exit__(None, None, None)
    assert again and set(asked) == {Edges}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-4)


def test_a_server_that_is_told_to_stop_ends_well(config: Config) -> None:
    with serving(config, free_port()) as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert "stopped" in process.stdout.read()
        assert process.wait() == 0
