"""What is too much, too long or unwanted: a clean answer for it, and everybody else's text as it should be."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.serving.running import Running, config_of, running, wait_for
from tests.serving.test_openai_client import ask, prompt_of, reference, text_of
from tests.talking import QUESTIONS


def held_up(server: Running, pool: ThreadPoolExecutor, count: int, **others):
    """So many chats at work, the engine standing in a round."""
    server.draft.close()
    found = [
        pool.submit(server.client().chat.completions.create, **ask(QUESTIONS[1], max_tokens=12, **others))
        for _ in range(count)
    ]
    wait_for(server.draft.entered.is_set)
    return found


def test_a_full_server_says_429_and_when_to_come_back() -> None:
    expected = text_of(reference(prompt_of(QUESTIONS[1]), 12))
    with running(config_of(max_batch_size=2, queue=2)) as server, ThreadPoolExecutor(8) as pool:
        taken = held_up(server, pool, 4)
        wait_for(lambda: server.metric("deepspec_waiting") + server.metric("deepspec_running") == 4)
        with pytest.raises(openai.RateLimitError) as caught:
            server.client().chat.completions.create(**ask())
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert (caught.value.code == "queue_full" and "2 wait" in str(caught.value)) or "3 wait" in str(
            caught.value
        )
        patient = pool.submit(server.client(max_retries=8).chat.completions.create, **ask(max_tokens=4))
        server.draft.open()
        assert [one.result().choices[0].message.content for one in taken] == [expected] * 4
        assert patient.result().usage.completion_tokens == 4
        assert server.metric("deepspec_requests_total", path="/v1/chat/completions", status="429") >= 1
        assert server.metric("deepspec_requests_total", path="/v1/chat/completions", status="200") == 5


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_place(stream: bool) -> None:
    with running(config_of(max_batch_size=1, queue=1)) as server:
        server.draft.close(after=2 if stream else 0)
        if stream:
            body = ask(QUESTIONS[1], max_tokens=200, stream=True, ignore_eos=True)
            with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=30) as response:
                lines = response.iter_lines()  # closes the connection when it is dropped
                assert any('"content": "' in line and '""' not in line for line in lines)
                wait_for(server.draft.entered.is_set)
        else:
            with pytest.raises(openai.APITimeoutError):
                server.client(timeout=0.5).chat.completions.create(**ask(max_tokens=200))
        gone = {"path": "/v1/chat/completions", "status": "499"}
        wait_for(lambda: server.metric("deepspec_requests_total", **gone) == 1)
        assert server.metric("deepspec_running") == 1  # the engine stands in a round of the long answer
        server.draft.open()
        wait_for(lambda: server.metric("deepspec_running") == 0)
        answer = server.client().chat.completions.create(**ask(max_tokens=3))
        assert answer.usage.completion_tokens == 3
        assert server.metric("deepspec_generated_tokens_total") < 20  # the long answer was not written on


def test_a_client_that_hangs_up_in_the_queue_leaves_it() -> None:
    with running(config_of(max_batch_size=1, queue=1)) as server, ThreadPoolExecutor(2) as pool:
        (first,) = held_up(server, pool, 1)
        with pytest.raises(openai.APITimeoutError):
            server.client(timeout=0.3).chat.completions.create(**ask())
        wait_for(lambda: server.metric("deepspec_waiting") == 0)
        prefilled = server.metric("deepspec_prompt_tokens_total")
        server.draft.open()
        assert first.result().choices
        assert server.metric("deepspec_prompt_tokens_total") == prefilled


def test_time_is_limited_in_the_queue_and_in_the_batch() -> None:
    with running(config_of(max_batch_size=1, queue=2, timeout=1.0)) as server, ThreadPoolExecutor(3) as pool:
        (running_one,) = held_up(server, pool, 1)
        with pytest.raises(openai.InternalServerError) as waited:
            server.client().chat.completions.create(**ask())
        assert waited.value.status_code == 503 and "place in the batch" in str(waited.value)
        with pytest.raises(openai.InternalServerError) as ran:
            running_one.result()
        assert ran.value.status_code == 504 and "longer than 1 s" in str(ran.value)
        server.draft.open()
        assert server.client().chat.completions.create(**ask(max_tokens=3)).usage.completion_tokens == 3
        server.draft.close(after=2)
        body = ask(max_tokens=200, stream=True, extra_body={"ignore_eos": True})
        chunks = server.client().chat.completions.create(**body)
        assert next(iter(chunks)).choices[0].delta.role == "assistant"
        with pytest.raises(openai.APIError, match=r"longer than 1 s"):
            list(chunks)


def test_a_long_body_is_not_read() -> None:
    with running(config_of(max_body=2000)) as server:
        url, headers = f"{server.url}/v1/completions", {"Content-Type": "application/json"}
        declared = httpx.post(url, content=b'"' + b"x" * 2000, headers=headers)
        chunked = httpx.post(url, content=iter([b"x" * 1500, b"x" * 1500]), headers=headers)
        for response in (declared, chunked):
            assert response.status_code == 413
            assert response.json()["error"]["message"] == "The request is longer than 2000 bytes."
        fits = json.dumps({"model": "tiny", "prompt": "Hello", "max_tokens": 2}).ljust(2000)
        assert httpx.post(url, content=fits, headers=headers).status_code == 200


def test_a_defect_in_the_engine_ends_its_batch_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    expected = text_of(reference(prompt_of(QUESTIONS[1]), 12))
    with running(config_of(max_batch_size=2, queue=4)) as server, ThreadPoolExecutor(8) as pool:
        taken = held_up(server, pool, 4)
        wait_for(lambda: server.metric("deepspec_waiting") + server.metric("deepspec_running") == 4)
        server.draft.fails = True
        server.draft.open()
        ends = [one.exception() or one.result().choices[0].message.content for one in taken]
        failed = [one for one in ends if isinstance(one, openai.InternalServerError)]
        assert 1 <= len(failed) <= 2 and ends.count(expected) == 4 - len(failed)
        assert not any("secret" in str(one) for one in failed)
        assert any("secret words" in record.exc_text for record in caplog.records if record.exc_text)


def test_what_stops_takes_nothing_new_and_finishes_what_it_has() -> None:
    expected = text_of(reference(prompt_of(QUESTIONS[1]), 12))
    with running(config_of(max_batch_size=1, queue=4)) as server, ThreadPoolExecutor(4) as pool:
        taken = held_up(server, pool, 2)
        wait_for(lambda: server.metric("deepspec_waiting") + server.metric("deepspec_running") == 2)
        server.service.worker.drain()
        with pytest.raises(openai.InternalServerError) as caught:
            server.client().chat.completions.create(**ask())
        assert caught.value.status_code == 503 and "retry-after" in caught.value.response.headers
        assert httpx.get(f"{server.url}/health").status_code == 503
        server.draft.open()
        assert [one.result().choices[0].message.content for one in taken] == [expected] * 2


def test_without_the_draft_the_text_is_the_same() -> None:
    with running(config_of(plain=True)) as server:
        answer = server.client().chat.completions.create(**ask(QUESTIONS[1], max_tokens=12))
        assert answer.choices[0].message.content == text_of(reference(prompt_of(QUESTIONS[1]), 12))
        assert server.metric("deepspec_drafts_total") == 0
