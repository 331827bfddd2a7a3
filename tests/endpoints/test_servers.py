"""Against servers of others and our own: what is measured is what they did."""

import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from deepspec import bench_endpoint
from deepspec.endpoints.result import load_result
from tests.config.processes import ROOT, environment
from tests.endpoints.test_bench import config_of
from tests.serving.running import config_of as server_config
from tests.serving.running import running
from tests.talking import talking_target


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def test_our_own_server_with_and_without_the_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "ours")
    with running(server_config(), key="ours") as ours, running(server_config(plain=True)) as plain:
        config = config_of(tmp_path, ours.url, other_url=plain.url, requests=4, concurrency=[1, 4], warmup=0)
        bench_endpoint.run(config)
        result = load_result(Path(config.out) / "endpoints.json")
        drafts = ours.metric("deepspec_drafts_total")
        accepted = ours.metric("deepspec_accepted_tokens_total")
        generated = ours.metric("deepspec_generated_tokens_total")
    assert result.complete and not any(endpoint.warnings for endpoint in result.endpoints)
    mine = [level for level in result.levels if level.endpoint == 0]
    assert sum(level.acceptance.drafts for level in mine) == drafts > 0
    assert sum(level.acceptance.accepted for level in mine) == accepted
    assert sum(answer.tokens for level in mine for answer in level.answers) == generated
    assert {answer.counted for level in result.levels for answer in level.answers} == {"usage"}
    rows = {(row.endpoint, row.concurrency): row for row in result.summary}
    assert rows[0, 1].tau >= 1 and rows[1, 1].tau is None
    assert rows[1, 4].no_acceptance == "the server drafted nothing"
    # The same answers both ways, and so as many tokens.
    for one, other in zip(mine, (level for level in result.levels if level.endpoint == 1), strict=True):
        tokens = [{answer.prompt: answer.tokens for answer in level.answers} for level in (one, other)]
        assert tokens[0] == tokens[1]


@pytest.mark.slow
def test_transformers_serve(tmp_path: Path) -> None:
    target = talking_target()
    target.model.float().save_pretrained(tmp_path / "target")
    target.model.double()
    target.tokenizer.save_pretrained(tmp_path / "target")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(tmp_path / "target")]
    process = subprocess.Popen(
        [*command, "--device", "cpu", "--port", str(port)],
        env={**environment(ROOT), "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)},
    )
    try:
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(transport=httpx.HTTPTransport(retries=9), timeout=120) as client:
            assert client.get(f"{url}/health").status_code == 200
        config = config_of(tmp_path, url, model=str(tmp_path / "target"), concurrency=[1, 2], timeout=60.0)
        config.endpoint.tokenizer = str(tmp_path / "target")
        bench_endpoint.run(config)
    finally:
        process.terminate()
        process.wait(20)
    result = load_result(Path(config.out) / "endpoints.json")
    assert result.complete and [row.failed for row in result.summary] == [0, 0]
    for level in result.levels:
        for answer in level.answers:
            assert answer.tokens and answer.first <= answer.last <= answer.seconds
