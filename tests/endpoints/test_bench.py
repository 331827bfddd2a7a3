"""Measuring a server that behaves, and one that does not."""

import json
import re
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepspec import bench_endpoint
from deepspec.config.schema import Config, DecodeConfig, EndpointConfig
from deepspec.data import protocol
from deepspec.endpoints import client as endpoint_client
from deepspec.endpoints.counters import acceptance_between
from deepspec.endpoints.result import Answer, EndpointResult, Level, load_result
from deepspec.endpoints.summary import summarise
from deepspec.errors import UserError
from deepspec.reporting.endpoints import render
from tests.data.faulty_server import drop, status
from tests.data.toy_tokenizers import chatml
from tests.endpoints.fake import (
    WORDS,
    FakeServer,
    bad_line,
    ends_early,
    error_event,
    half_a_stream,
    silent,
    whole_answer,
)

SECRET = "sk-do-not-show-this"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses, and a key that must never be seen."""
    monkeypatch.setattr(protocol, "FIRST_WAIT", 0.001)
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    monkeypatch.delenv("OTHER_API_KEY", raising=False)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def config_of(folder: Path, url: str, **settings: Any) -> Config:
    own = {
        name: settings.pop(name)
        for name in ("model", "other_url", "other_model", "overwrite")
        if name in settings
    }
    small = {"requests": 6, "concurrency": [1, 3], "warmup": 1, "timeout": 20.0, "retries": 2}
    return Config(
        name="endpoints",
        endpoint=EndpointConfig(**{**small, **settings}),
        decode=DecodeConfig(max_new_tokens=16),
        url=url,
        out=str(folder / "out"),
        **own,
    )


def measured(config: Config) -> EndpointResult:
    page = bench_endpoint.run(config)
    assert SECRET not in page.read_text(encoding="utf-8")
    path = Path(config.out) / "endpoints.json"
    assert SECRET not in path.read_text(encoding="utf-8")
    return load_result(path)


def refused(config: Config) -> str:
    with pytest.raises(UserError) as caught:
        bench_endpoint.run(config)
    assert SECRET not in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


def test_a_good_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        result = measured(config_of(tmp_path, server.url))
        assert server.keys == [f"Bearer {SECRET}"] * 13
    assert SECRET not in capsys.readouterr().out
    assert result.complete and [level.concurrency for level in result.levels] == [1, 3]
    assert result.endpoints[0].model == "toy-model" and result.endpoints[0].key_variable == "OPENAI_API_KEY"
    body = server.requests[0]
    assert body["stream"] is True and body["stream_options"] == {"include_usage": True}
    assert (body["max_tokens"], body["temperature"]) == (16, 0.0)
    answers = [answer for level in result.levels for answer in level.answers]
    assert len(answers) == 12 and len({answer.prompt for answer in answers}) == 12  # no prompt twice
    for answer in answers:
        assert (answer.tokens, answer.counted, answer.prompt_tokens, answer.chunks) == (
            11,
            "usage",
            7,
            len(WORDS),
        )
        assert answer.finish == "stop" and answer.error is None
    # At one at a time the order is the server's: no client sees a word before it was written.
    for answer, times in zip(result.levels[0].answers, server.times[1:7], strict=True):
        assert times[0] <= answer.first <= answer.last <= answer.seconds and times[-1] <= answer.last
    for level, row in zip(result.levels, result.summary, strict=True):
        longest = max(answer.seconds for answer in level.answers)
        total = sum(answer.seconds for answer in level.answers)
        assert longest <= level.seconds and total / level.concurrency <= level.seconds
        assert row.tokens_per_second.value == pytest.approx(66 / level.seconds)
        assert row.ttft.p50.value == pytest.approx(np.median([answer.first for answer in level.answers]))
        assert row.ttft.p99.value is None and row.tau is None and "/metrics" in row.no_acceptance
    connection = result.endpoints[0].connection
    assert connection.tcp.prompts == connection.request.prompts == 20
    assert connection.tcp.low <= connection.tcp.value <= connection.tcp.high and connection.tls.value is None
    assert len([path for path in server.gets if path == "/v1/models"]) >= 22


def test_numbers_from_answers() -> None:
    random = np.random.default_rng(0)
    answers = [
        Answer(
            "p",
            first=first,
            last=first + rest,
            seconds=first + rest + 0.01,
            tokens=n,
            counted="usage",
            chunks=5,
        )
        for first, rest, n in zip(
            random.random(120), random.random(120), random.integers(2, 50, 120), strict=True
        )
    ]
    answers += [
        Answer("p", error="no"),
        Answer("p", first=1.0, last=1.0, seconds=1.0, tokens=1, counted="usage", chunks=1),
    ]
    row = summarise(Level(0, 4, 10.0, answers))
    good = answers[:120]
    per_token = [(a.last - a.first) / (a.tokens - 1) for a in good]
    assert row.tpot.p50.value == pytest.approx(np.percentile(per_token, 50)) and row.tpot.p50.prompts == 120
    assert row.ttft.p99.value == pytest.approx(np.percentile([a.first for a in [*good, answers[-1]]], 99))
    assert row.seconds.p95.value == pytest.approx(
        np.percentile([a.seconds for a in [*good, answers[-1]]], 95)
    )
    assert row.tokens_per_second.value == pytest.approx((sum(a.tokens for a in good) + 1) / 10)
    assert (row.requests, row.failed, row.errors) == (122, 1, {"no": 1})


@pytest.mark.parametrize(
    ("concurrency", "turns"),
    [  # sixteen questions, in blocks that fill the concurrency twice at least
        (2, ["aaaa", "bbbb", "bbbb", "aaaa", "aaaa", "bbbb", "bbbb", "aaaa"]),
        (4, ["a" * 8, "b" * 8, "b" * 8, "a" * 8]),
        (16, ["a" * 16, "b" * 16]),
    ],
)
def test_two_servers_take_turns_and_each_has_its_own_key(
    concurrency: int, turns: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTHER_API_KEY", "the-other")
    order: list[str] = []

    def note(name: str):
        return lambda number, body: order.append(name)

    with FakeServer(note("a")) as one, FakeServer(note("b"), words=3) as two:
        settings = {"requests": 16, "concurrency": [concurrency], "warmup": 0, "other_model": "spare"}
        result = measured(config_of(tmp_path, one.url, other_url=two.url, **settings))
        assert set(one.keys) == {f"Bearer {SECRET}"} and set(two.keys) == {"Bearer the-other"}
        assert [body["messages"] for body in one.requests] and {body["model"] for body in two.requests} == {
            "spare"
        }
        asked = [sorted(body["messages"][0]["content"] for body in server.requests) for server in (one, two)]
        assert asked[0] == asked[1]
    assert "".join(order) == "".join(turns)
    assert [level.answers[0].chunks for level in result.levels] == [6, 3]
    page = render(result)
    assert "toy-model at" in page and "spare at" in page and "took turns" in page and "<script" not in page


@pytest.mark.parametrize("known", [True, False])
def test_without_usage_a_tokenizer_counts_or_the_chunks_do(tmp_path: Path, known: bool) -> None:
    tokenizer = chatml()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    place = {"tokenizer": str(tmp_path / "tokenizer")} if known else {}
    with FakeServer(usage=False) as server:
        result = measured(config_of(tmp_path, server.url, concurrency=[1], **place))
    expected = len(tokenizer("".join(WORDS), add_special_tokens=False)["input_ids"]) if known else len(WORDS)
    answers = result.levels[0].answers
    assert {(answer.tokens, answer.counted) for answer in answers} == {
        (expected, "tokenizer" if known else "chunks")
    }
    assert any("counted as tokens" in words for words in result.endpoints[0].warnings) is not known


def test_a_server_that_knows_no_stream_options_is_asked_without(tmp_path: Path) -> None:
    def fault(number: int, body: dict[str, Any]):
        def say(handler, body):
            handler.reply(400, {"error": {"message": "unknown field stream_options"}})
            return True

        return say if "stream_options" in body else None

    with FakeServer(fault) as server:
        result = measured(config_of(tmp_path, server.url, concurrency=[1]))
    assert sum("stream_options" in body for body in server.requests) == 1
    assert {answer.counted for answer in result.levels[0].answers} == {"chunks"}


def test_a_rate_limit_is_waited_for_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    real = endpoint_client.asyncio.sleep

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        await real(0)

    monkeypatch.setattr(endpoint_client.asyncio, "sleep", sleep)
    limited = status(429, Retry_After="7")
    with FakeServer(lambda number, body: limited if number in (2, 3) else None) as server:
        result = measured(config_of(tmp_path, server.url, concurrency=[1]))
    assert waits == [7.0, 7.0]
    assert [answer.rate_limited for answer in result.levels[0].answers] == [0, 2, 0, 0, 0, 0]
    assert result.summary[0].rate_limited == 2 and result.summary[0].failed == 0
    assert any("2 times 429" in words for words in result.endpoints[0].warnings)


@pytest.mark.parametrize("code", [401, 403])
@pytest.mark.parametrize("set_key", [True, False])
def test_a_refused_key_is_named_by_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, set_key: bool
) -> None:
    if not set_key:
        monkeypatch.delenv("OPENAI_API_KEY")
    words = (
        "the key was read from OPENAI_API_KEY" if set_key else "no key was sent: OPENAI_API_KEY is not set"
    )
    with FakeServer(lambda number, body: status(code)) as server:
        said = refused(config_of(tmp_path, server.url))
        assert said == f"{server.url}/v1 refuses with status {code}; {words}."
    with FakeServer(models_status=code) as server:
        assert words in refused(config_of(tmp_path, server.url))
    assert not (tmp_path / "out" / "endpoints.json").exists()


def test_a_key_that_is_none_is_not_sent_and_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", f"{SECRET}\nmore")
    assert "OPENAI_API_KEY" in refused(config_of(tmp_path, "http://127.0.0.1:9"))


def test_wrong_addresses_and_models(tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        assert f"{url}/v1 cannot be reached" in refused(config_of(tmp_path, url))
    assert "url: 'localhost:8000' is not a URL" in refused(config_of(tmp_path, "localhost:8000"))
    assert "no passwords or keys in URLs" in refused(config_of(tmp_path, f"http://me:{SECRET}@localhost"))
    with FakeServer(lambda number, body: status(404)) as server:
        said = refused(config_of(tmp_path, server.url, model="gpt-4o"))
        assert said == f"{server.url}/v1 has no model 'gpt-4o': it has toy-model, spare. Set model=..."
        assert "chat/completions is not there" in refused(config_of(tmp_path, server.url, model="spare"))
    with FakeServer() as server:  # answers to any name
        result = measured(config_of(tmp_path / "a", server.url, model="gpt-4o", concurrency=[1]))
        assert result.endpoints[0].warnings == ["it does not list 'gpt-4o', but toy-model, spare"]
    with FakeServer(models=b"<html>") as server:
        assert "does not list its models: name one" in refused(config_of(tmp_path, server.url))
        assert (
            measured(config_of(tmp_path, server.url, model="any", concurrency=[1])).endpoints[0].models == []
        )
    with FakeServer(lambda number, body: status(404), models=b"<html>") as server:
        assert "has no model 'any'" in refused(config_of(tmp_path / "b", server.url, model="any"))
    assert "No server is named" in refused(config_of(tmp_path, None))
    said = refused(config_of(tmp_path, "http://localhost", args={"messages": []}))
    assert "endpoint.args cannot set 'messages'" in said


def test_an_answer_by_another_model_is_said(tmp_path: Path) -> None:
    with FakeServer(answers_as="small-model") as server:
        result = measured(config_of(tmp_path, server.url, concurrency=[1]))
    assert result.endpoints[0].warnings == ["the answers name another model than was asked for: small-model"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (half_a_stream, "the stream broke off after 1 chunks"),
        (ends_early, "the stream ended in the middle, after 1 chunks"),
        (bad_line, "a line that is not a JSON object"),
        (error_event, "the server reports: .*out of memory for \\*\\*\\*"),
        (whole_answer, "does not stream: it answered with application/json"),
        (silent, "no complete answer within 0.3 s"),
        (drop, "the connection broke .* after 3 tries"),
        (status(500), "status 500: .* after 3 tries"),
        (status(400), 'status 400: {"error": "no"}'),
    ],
)
def test_one_bad_answer_is_counted_and_many_end_it(tmp_path: Path, fault, words: str) -> None:
    limit = {"timeout": 0.3} if fault is silent else {}
    spoiled: set[str] = set()

    def once(number: int, body: dict[str, Any]):
        text = body["messages"][-1]["content"]
        if number == 3:
            spoiled.add(text)
        return fault if text in spoiled else None

    with FakeServer(once) as server:
        result = measured(config_of(tmp_path, server.url, concurrency=[1], **limit))
    assert result.complete and result.summary[0].failed == 1
    (error,) = result.summary[0].errors
    assert re.search(words, error)
    with FakeServer(lambda number, body: fault if number >= 4 else None) as server:
        said = refused(config_of(tmp_path / "b", server.url, concurrency=[1, 2], requests=9, **limit))
    assert re.search(words, said) and "4 requests in a row failed" in said
    kept = load_result(tmp_path / "b" / "out" / "endpoints.json")
    assert not kept.complete and kept.error in said and "What was measured before is in" in said
    assert [answer.error is None for answer in kept.levels[0].answers] == [True] * 3 + [False] * 4
    assert "Not complete" in (tmp_path / "b" / "out" / "endpoints.html").read_text(encoding="utf-8")


def test_a_complete_result_stays_and_a_cut_one_is_replaced(tmp_path: Path) -> None:
    with FakeServer() as server:
        config = config_of(tmp_path, server.url, concurrency=[1])
        measured(config)
        assert "overwrite=true" in refused(config)
        path = Path(config.out) / "endpoints.json"
        content = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**content, "complete": False}), encoding="utf-8")
        assert measured(config).complete
        config.overwrite = True
        assert measured(config).complete


def test_prompts_of_a_file(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Yes."}]},
        {"prompt": "Two?"},
    ]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    with FakeServer() as server:
        result = measured(
            config_of(
                tmp_path,
                server.url,
                concurrency=[1],
                requests=4,
                warmup=0,
                prompts=str(tmp_path / "mine.jsonl"),
            )
        )
    asked = [[message["content"] for message in body["messages"]] for body in server.requests]
    assert asked == [["One?"], ["Two?"]] * 2
    assert (result.prompts, result.distinct_prompts) == ("mine.jsonl", 2)


VLLM = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {0}
vllm:spec_decode_num_drafts_total{{engine="1",model_name="m"}} 10
vllm:spec_decode_num_drafts_created{{engine="0"}} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} {1:.1e}
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {2}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} 7
"""
SGLANG = """sglang:spec_verify_calls_total{{model_name="m"}} {0}
sglang:generation_tokens_total{{model_name="m"}} {1}
sglang:num_requests_total{{model_name="m"}} {2}
"""


def test_acceptance_from_counters() -> None:
    found, why = acceptance_between(VLLM.format(100, 300, 150), VLLM.format(300, 900, 550))
    assert (found.server, found.tau, found.budget, why) == ("vllm", 3.0, 3.0, None)
    # 20 requests of 1 + 9 tokens: 180 tokens came out of 60 verifications, 3 each.
    found, why = acceptance_between(SGLANG.format(5, 50, 5), SGLANG.format(65, 250, 25))
    assert (found.server, found.tau, found.budget, why) == ("sglang", 3.0, None, None)
    assert acceptance_between(VLLM.format(9, 9, 9), VLLM.format(9, 9, 9))[1] == "the server drafted nothing"
    assert "restarted" in acceptance_between(VLLM.format(9, 9, 9), VLLM.format(3, 3, 3))[1]
    assert "no counters" in acceptance_between("a 1\n", "a 2\nnonsense {\n")[1]
    assert "/metrics" in acceptance_between(None, "a 1")[1]


def test_acceptance_of_a_server_with_counters(tmp_path: Path) -> None:
    with FakeServer() as server:
        server.metrics = lambda: VLLM.format(*(len(server.requests) * n for n in (10, 30, 15)))
        result = measured(config_of(tmp_path, server.url))
    assert [row.tau for row in result.summary] == [2.5, 2.5] and [row.budget for row in result.summary] == [
        3.0,
        3.0,
    ]
