"""Regeneration through servers that fail in every usual way: nothing lost, nothing asked twice, nothing leaked."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from deepspec.config.schema import DataConfig, Regenerate
from deepspec.data import build, gather, work_folder
from deepspec.data.servers import Failure, Pool, Sampling
from deepspec.errors import UserError
from tests.data.faulty_server import Fault, FaultyServer, answer_to, drop, empty, garbage, half, status
from tests.data.test_build_data import conversations, supervised, tree
from tests.data.toy_target import END, ToyAnswers, toy_facts

FACTS = toy_facts()
QUESTION = [{"role": "user", "content": "Hello?"}]


class Waits(list[float]):
    """Stands for sleeping: notes how long, and moves a clock instead."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.append(seconds)
        self.now += seconds

    def clock(self) -> float:
        return self.now


def pool(*servers: FaultyServer, waits: Waits | None = None, **options: Any) -> Pool:
    waits = waits if waits is not None else Waits()
    sampling = options.pop("sampling", Sampling(0.7, 0.9, 50, {"top_k": 20}))
    urls = [server.url for server in servers]
    return Pool(urls, sampling, timeout=5.0, sleep=waits.sleep, clock=waits.clock, **options)


@pytest.mark.parametrize(
    "fault",
    [drop, half, garbage, empty, status(500), status(503), status(429), status(408)],
    ids=["drop", "half", "garbage", "empty", "500", "503", "429", "408"],
)
def test_a_passing_fault_is_tried_again(fault: Fault) -> None:
    waits = Waits()
    with FaultyServer(lambda number, body: fault if number < 2 else None) as server:
        found = pool(server, waits=waits)
        reply = found.ask(QUESTION, [], seed=3)
        found.close()
    assert (reply.message["content"], reply.finish_reason) == answer_to(QUESTION)
    assert reply.usage == {"completion_tokens": 3} and len(server.requests) == 3
    assert 0.25 <= waits[0] <= 0.5 and 0.5 <= waits[1] <= 1.0  # doubling, with jitter
    assert len({json.dumps(body) for body in server.requests}) == 1


def test_retry_after_is_honoured() -> None:
    for value, least in (("7", 7.0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0), ("nonsense", 0.0)):
        waits = Waits()
        answer = status(429, Retry_After=value)
        with FaultyServer(lambda number, body, answer=answer: answer if number == 0 else None) as server:
            found = pool(server, waits=waits)
            found.ask(QUESTION, [], seed=3)
            found.close()
        assert least <= sum(waits) <= least + 1.0


def test_retries_end_and_a_refused_prompt_is_not_retried() -> None:
    with FaultyServer(lambda number, body: drop) as server:
        found = pool(server, retries=3)
        with pytest.raises(Failure, match="after 4 tries"):
            found.ask(QUESTION, [], seed=3)
        assert len(server.requests) == 4
    with FaultyServer(lambda number, body: status(400)) as server:
        with pytest.raises(Failure, match="status 400"):
            pool(server).ask(QUESTION, [], seed=3)
        assert len(server.requests) == 1


def test_a_wrong_key_stops_everything_and_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    with FaultyServer(lambda number, body: status(401)) as server:
        with pytest.raises(UserError, match=r"refuses with status 401.*OPENAI_API_KEY") as error:
            pool(server).ask(QUESTION, [], seed=3)
        assert server.keys == ["Bearer sk-very-secret"] and "very-secret" not in str(error.value)


def test_the_request_has_the_right_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    call = {"type": "function", "id": "c", "function": {"name": "f", "arguments": {"a": 1}}}
    history = [
        *QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "x"},
    ]
    with FaultyServer() as server:
        pool(server).ask(history, [{"type": "function", "function": {"name": "f"}}], seed=2**40 + 5)
        limited = Sampling(0.0, 1.0, 50, {"max_completion_tokens": 60})
        pool(server, sampling=limited, model="mine").ask(QUESTION, [], seed=1)
    first, second = server.requests
    sent = first["messages"][1]["tool_calls"][0]["function"]
    assert json.loads(sent["arguments"]) == {"a": 1}
    del first["messages"]
    assert first == {
        **{"model": "toy-model", "temperature": 0.7, "top_p": 0.9, "max_tokens": 50, "top_k": 20, "seed": 5},
        **{"stream": False, "tools": [{"type": "function", "function": {"name": "f"}}]},
    }
    assert "max_tokens" not in second and second["max_completion_tokens"] == 60 and second["model"] == "mine"
    assert server.keys == [None, None]


@pytest.mark.parametrize(
    ("urls", "more", "message"),
    [
        ([], {}, "needs data.servers"),
        (["localhost:8000"], {}, "is not a URL"),
        (["http://me:key@host/v1"], {}, "no passwords or keys in URLs"),
        (["http://host/v1?api_key=x"], {}, "no passwords or keys in URLs"),
        (["http://127.0.0.1:9/v1"], {}, "No server of data.servers lists a model"),
        (["http://host/v1"], {"temperature": 1}, "cannot set 'temperature'"),
    ],
)
def test_settings_that_cannot_work(urls: list[str], more: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Pool(urls, Sampling(0.0, 1.0, 10, more), timeout=1.0)


def test_a_dead_server_is_left_alone_and_the_others_do_its_work() -> None:
    waits = Waits()
    with FaultyServer(lambda number, body: drop) as dead, FaultyServer() as alive:
        found = pool(dead, alive, waits=waits)
        for n in range(40):
            found.ask([{"role": "user", "content": f"q {n}"}], [], seed=n)
    assert len(alive.requests) == 40 and 3 <= len(dead.requests) <= 8


def rows(count: int = 14) -> list[dict[str, Any]]:
    talk = [
        {"role": role, "content": f"{role} {turn}"} for turn in range(2) for role in ("user", "assistant")
    ]
    return [
        *({"prompt": f"question {n}"} for n in range(count - 2)),
        {"prompt": "please cut me"},
        {"messages": talk},
    ]


def config(folder: Path, *servers: FaultyServer, **options: Any) -> DataConfig:
    path = folder / "prompts.jsonl"
    if not path.exists():
        path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    given: dict[str, Any] = {
        "held_out_prompts": 3,
        "max_length": 96,
        "concurrency": 4,
        "retries": 2,
        **options,
    }
    return DataConfig(
        prompts=str(path), regenerate=Regenerate.servers, servers=[server.url for server in servers], **given
    )


def prepare(folder: Path, settings: DataConfig, retry_errors: bool = False) -> dict[str, Any]:
    return build(
        folder,
        settings,
        gather(settings, work_folder(folder)),
        FACTS,
        draft_vocab_size=None,
        generate=ToyAnswers(FACTS),
        retry_errors=retry_errors,
        say=lambda _: None,
    )


def rows_and_counts(folder: Path) -> dict[str, Any]:
    """All bytes of an artifact but the servers' addresses in its manifest."""
    files: dict[str, Any] = dict(tree(folder))
    manifest = json.loads(files.pop("manifest.json"))
    manifest["config"].pop("servers")
    return {**files, "manifest": manifest}


def test_rows_are_the_servers_answers_turn_by_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    with FaultyServer() as server:
        made = prepare(tmp_path / "data", config(tmp_path, server))
        assert len(server.requests) == 15
        again = prepare(tmp_path / "data", config(tmp_path, server))
    assert (
        again == json.loads((tmp_path / "data" / "manifest.json").read_text()) and len(server.requests) == 15
    )
    found = {row["id"]: row for row in conversations(tmp_path / "data")}
    assert len(found) == 14 and made["counts"]["failed"] == 0
    for row in found.values():
        messages = json.loads(row["messages"])
        said = [message["content"] for message in messages if message["role"] == "assistant"]
        assert said == [answer_to(messages[:n])[0] for n in range(1, len(messages), 2)]
        cut = messages[0]["content"] == "please cut me"
        assert row["truncated"] == cut
        assert supervised(row) == "".join(text + END for text in said).removesuffix(END if cut else "\0")
        prompt = FACTS.tokenizer.apply_chat_template(
            messages[:1], add_generation_prompt=True, return_dict=False
        )
        assert row["tokens"][: len(prompt)] == prompt
    listed = [
        json.loads(line)
        for line in (tmp_path / "data" / "answers" / "servers.jsonl").read_text().splitlines()
    ]
    assert Counter(item["finish_reason"] for item in listed) == {"stop": 14, "length": 1}
    assert all(item["usage"]["completion_tokens"] > 0 and item["model"] == "toy-model" for item in listed)
    assert not work_folder(tmp_path / "data").exists()
    assert not [name for name, content in tree(tmp_path).items() if b"very-secret" in content]


def test_any_order_and_any_fault_give_the_same_rows(tmp_path: Path) -> None:
    first = threading.Event()

    def late(handler: Any, body: dict[str, Any]) -> bool:
        first.wait(10)
        return False

    def fault(number: int, body: dict[str, Any]) -> Fault | None:
        if number == 6:
            first.set()
        return late if number == 0 else {1: drop, 2: garbage, 3: half}.get(number)

    with FaultyServer() as calm:
        prepare(tmp_path / "calm", config(tmp_path, calm))
    with FaultyServer(fault) as wild:
        prepare(tmp_path / "wild", config(tmp_path, wild))
    assert rows_and_counts(tmp_path / "calm") == rows_and_counts(tmp_path / "wild")


def test_failures_are_kept_counted_and_asked_again_on_request(tmp_path: Path) -> None:
    broken = True

    def fault(number: int, body: dict[str, Any]) -> Fault | None:
        return drop if broken and body["messages"][-1]["content"] in ("question 4", "user 1") else None

    with FaultyServer(fault) as server:
        settings = config(tmp_path, server, retries=1, held_out_prompts=0)
        made = prepare(tmp_path / "data", settings)
        assert made["counts"]["failed"] == 2
        left = made["counts"]["left_out"]
        assert left == {"later turns: no answer from the servers": 1, "no answer from the servers": 1}
        asked = len(server.requests)
        prepare(tmp_path / "data", settings)
        (tmp_path / "data" / "manifest.json").unlink()
        assert prepare(tmp_path / "data", settings)["counts"] == made["counts"]
        listed = (tmp_path / "data" / "answers" / "failures.jsonl").read_text().splitlines()
        assert sorted(json.loads(line)["turn"] for line in listed) == [0, 1]
        assert len(server.requests) == asked  # neither what is answered nor what failed
        broken = False
        mended = prepare(tmp_path / "data", settings, retry_errors=True)
        assert mended["counts"]["failed"] == 0 and mended["counts"]["train"]["conversations"] == 14
        assert len(server.requests) == asked + 2
        assert set(server.answered.values()) == {1}
    assert not work_folder(tmp_path / "data").exists()


def test_a_killed_run_asks_only_for_what_is_missing(tmp_path: Path) -> None:
    with FaultyServer() as server:
        prepare(tmp_path / "whole", config(tmp_path, server))
    process: list[subprocess.Popen[str]] = []

    def fault(number: int, body: dict[str, Any]) -> Fault | None:
        if number == 8 and process:
            process[0].send_signal(signal.SIGKILL)
        return None

    root = str(Path(__file__).parents[2])
    with FaultyServer(fault) as server:
        code = (
            "import sys; from pathlib import Path; from tests.data.test_servers import *\n"
            "class Url: url = sys.argv[2]\n"
            "prepare(Path(sys.argv[1]) / 'killed', config(Path(sys.argv[1]), Url()))"
        )
        command = [sys.executable, "-c", code, str(tmp_path), server.url]
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        process.append(subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, text=True))
        assert process[0].wait() == -signal.SIGKILL
        assert not (tmp_path / "killed").exists()
        before = len(server.requests)
        prepare(tmp_path / "killed", config(tmp_path, server))
        assert len(server.requests) - before <= 15 - 8 + 4  # those in flight were not finished
    assert rows_and_counts(tmp_path / "killed") == rows_and_counts(tmp_path / "whole")
