"""Regeneration through a real server, `transformers serve` with a tiny local model, against `generate`."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import transformers
from datasets import load_from_disk

from deepspec import prepare
from deepspec.config.schema import Regenerate
from tests.config.processes import ROOT, environment
from tests.data.test_prepare import configuration, save_target

LONGEST = 8


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("real") / "target", "qwen3")


@pytest.fixture(scope="module")
def url(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of a server of `target`, which has answered that it is well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    empty = str(tmp_path_factory.mktemp("hub"))
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "transformers.cli.transformers", "serve", str(target)),
            *("--device", "cpu", "--host", "127.0.0.1", "--port", str(port)),
        ],
        env={**environment(ROOT), "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": empty},
    )
    try:
        with httpx.Client(transport=httpx.HTTPTransport(retries=9), timeout=120) as client:
            assert client.get(f"http://127.0.0.1:{port}/health").status_code == 200
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(20)


def greedy(model: Any, tokenizer: Any, messages: list[dict[str, str]]) -> tuple[str, bool]:
    """The text of the target's own answer, and whether it came to its end."""
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    found = model.generate(**prompt, max_new_tokens=LONGEST, do_sample=False)[0]
    answer = found[prompt["input_ids"].shape[1] :].tolist()
    return tokenizer.decode(answer, skip_special_tokens=True), answer[
        -1
    ] in model.generation_config.eos_token_id


@pytest.mark.slow
def test_answers_of_transformers_serve_are_the_targets_own(target: Path, url: str, tmp_path: Path) -> None:
    config = configuration(
        tmp_path,
        target,
        regenerate=Regenerate.servers,
        servers=[url],
        server_model=str(target),
        concurrency=2,
        timeout=60.0,
    )
    prompts = tmp_path / "prompts.jsonl"
    rows = [[{"role": "user", "content": f"Count from {n} to ten."}] for n in range(6)]
    rows[2] += [{"role": "assistant", "content": "Why?"}, {"role": "user", "content": "Because of it."}]
    prompts.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    config.data.prompts, config.data.held_out_prompts = str(prompts), 1
    folder = prepare.run(config)
    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    kept = [json.loads(line) for line in (folder / "answers" / "servers.jsonl").read_text().splitlines()]
    ends, turns = [], 0
    for row in load_from_disk(str(folder / "conversations")):
        messages = json.loads(row["messages"])
        turns += sum(message["role"] == "assistant" for message in messages)
        for at, message in enumerate(messages):
            if message["role"] == "assistant":
                text, ended = greedy(model, tokenizer, messages[:at])
                assert message["content"] == text
        assert row["truncated"] == (not ended)
        ends.append(ended)
    assert len(ends) == 6 and len(kept) == turns
    assert all(answer["usage"]["completion_tokens"] > 0 for answer in kept)
    assert {answer["finish_reason"] for answer in kept} <= {"stop", "length"}
    again = prepare.run(config)  # complete: nobody is asked
    assert (again / "manifest.json").read_bytes() == (folder / "manifest.json").read_bytes()
