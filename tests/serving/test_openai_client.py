"""The `openai` client against the server: what it gets is what the engine writes, in the protocol's shapes."""

from collections.abc import Iterator

import httpx
import openai
import pytest
import torch

from deepspec.decoding import Request, Sampling
from tests.serving.running import Running, alone, config_of, running
from tests.talking import QUESTIONS, talking_target


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(config_of()) as one:
        yield one


def prompt_of(question: str) -> list[int]:
    target = talking_target()
    return target.tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True
    )["input_ids"]


def reference(prompt: list[int], count: int) -> list[int]:
    """Greedy tokens by `transformers.generate`."""
    ids = torch.tensor([prompt])
    out = talking_target().model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


def text_of(tokens: list[int]) -> str:
    return talking_target().tokenizer.decode(tokens, skip_special_tokens=True)


def ask(text: str = QUESTIONS[0], **others) -> dict:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **others}


def test_a_chat_is_the_targets_own_text(server: Running) -> None:
    for question in QUESTIONS[:3]:
        expected = reference(prompt_of(question), 20)
        answer = server.client().chat.completions.create(**ask(question, max_tokens=20))
        assert answer.choices[0].message.content == text_of(expected)
        assert answer.choices[0].message.role == "assistant"
        ended = expected[-1] in talking_target().eos
        assert answer.choices[0].finish_reason == ("stop" if ended else "length")
        assert answer.usage.prompt_tokens == len(prompt_of(question))
        assert answer.usage.completion_tokens == len(expected)
        assert (answer.model, answer.object) == ("tiny", "chat.completion")


@pytest.mark.parametrize("usage", [True, False])
def test_a_stream_is_the_same_text_in_pieces(server: Running, usage: bool) -> None:
    expected = reference(prompt_of(QUESTIONS[1]), 22)
    options = {"stream_options": {"include_usage": True}} if usage else {}
    chunks = list(
        server.client().chat.completions.create(
            **ask(QUESTIONS[1], max_completion_tokens=22, stream=True, **options)
        )
    )
    with_text = [chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert "".join(chunk.choices[0].delta.content for chunk in with_text) == text_of(expected)
    assert len(with_text) > 3 and chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
        "length"
    ]
    assert len({chunk.id for chunk in chunks}) == 1
    counts = [chunk.usage for chunk in chunks if chunk.usage]
    assert [one.completion_tokens for one in counts] == ([22] if usage else [])
    assert not usage or (
        counts[0].total_tokens == len(prompt_of(QUESTIONS[1])) + 22 and not chunks[-1].choices
    )


def test_completions_take_the_protocols_four_shapes(server: Running) -> None:
    tokenizer, create = talking_target().tokenizer, server.client().completions.create
    texts = ["Hello there", "def add(a, b):"]
    tokens = [tokenizer(text)["input_ids"] for text in texts]
    expected = [text_of(reference(one, 12)) for one in tokens]
    for prompt in (texts, tokens):
        answer = create(model="tiny", prompt=prompt, max_tokens=12)
        assert [choice.text for choice in answer.choices] == expected
        assert answer.usage.prompt_tokens == sum(map(len, tokens))
        assert create(model="tiny", prompt=prompt[0], max_tokens=12).choices[0].text == expected[0]
    pieces = {0: "", 1: ""}
    for chunk in create(model="tiny", prompt=texts, max_tokens=12, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
    assert list(pieces.values()) == expected


def test_seeds_and_choices(server: Running) -> None:
    settings = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 16, "n": 3, "seed": 11}
    extra = {"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1}
    first, again = (
        server.client().chat.completions.create(**ask(**settings), extra_body=extra) for _ in range(2)
    )
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2] and len(set(texts)) > 1
    sampling = Sampling(0.9, 40, 0.95, 0.01, 1.1)
    eos = talking_target().eos
    assert texts == [alone(Request(prompt_of(QUESTIONS[0]), 16, sampling, 11 + n, eos)) for n in range(3)]
    other = server.client().chat.completions.create(**ask(**{**settings, "seed": None}), extra_body=extra)
    unseeded = server.client().chat.completions.create(**ask(**{**settings, "seed": None}), extra_body=extra)
    assert [c.message.content for c in other.choices] != [c.message.content for c in unseeded.choices]


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_ends_the_text_before_it(server: Running, stream: bool) -> None:
    text = text_of(reference(prompt_of(QUESTIONS[2]), 24))
    stop = text[len(text) // 2 :][:3]
    assert len(stop) == 3
    request = ask(QUESTIONS[2], max_tokens=24, stop=[stop, "never there"], stream=stream)
    answer = server.client().chat.completions.create(**request)
    if stream:
        choices = [chunk.choices[0] for chunk in answer]
        found, reason = "".join(one.delta.content or "" for one in choices), choices[-1].finish_reason
    else:
        found, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert (found, reason) == (text[: text.index(stop)], "stop")


def test_an_end_token_ends_the_answer_and_is_not_shown(server: Running) -> None:
    eos = talking_target().eos
    prompt, tokens = next(
        (prompt, tokens)
        for prompt in map(prompt_of, QUESTIONS)
        if (tokens := reference(prompt, 20))[-1] in eos and len(tokens) < 20
    )
    create = server.client().completions.create
    answer = create(model="tiny", prompt=prompt, max_tokens=20)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text_of(tokens), "stop")
    longer = create(model="tiny", prompt=prompt, max_tokens=20, extra_body={"ignore_eos": True})
    assert longer.usage.completion_tokens == 20 and longer.choices[0].finish_reason == "length"
    assert longer.choices[0].text.startswith(answer.choices[0].text)


def test_models(server: Running) -> None:
    (model,) = server.client().models.list().data
    assert model.id == "tiny" and model.owned_by == "deepspec"
    assert server.client().models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        server.client().models.retrieve("gpt-4o")


def test_another_models_name_is_the_protocols_404(server: Running) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        server.client().chat.completions.create(**{**ask(), "model": "gpt-4o"})
    assert caught.value.code == "model_not_found"
    assert "'gpt-4o' does not exist here; this server has 'tiny'" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"logprobs": True}, "logprobs", "not done here"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "vLLM or SGLang"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not done here"),
        ({"presence_penalty": 0.5}, "presence_penalty", "not done here"),
        ({"temperature": -1}, "temperature", "between 0 and 2"),
        ({"temperature": "hot"}, "temperature", "a number"),
        ({"top_p": 0.0}, None, "top_p"),
        ({"n": 0}, "n", "from 1 up"),
        ({"n": 1000}, "n", "at most 68"),
        ({"stop": [""]}, "stop", "none of them empty"),
        ({"max_tokens": 100_000}, None, "together the model takes 256"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"extra_body": {"temprature": 1}}, "temprature", "not known here"),
        ({"messages": []}, "messages", "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "not text"),
        ({"messages": [{"role": "assistant", "content": "hi"}]}, "messages", "nothing to answer"),
        ({"messages": [{"role": "user", "content": "a " * 400}]}, None, "the model takes 256"),
    ],
)
def test_what_is_not_done_is_refused_by_name(server: Running, fields, param, words) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().chat.completions.create(**{**ask(), **fields})
    assert words in str(caught.value) and caught.value.param == param


def test_what_asks_for_nothing_is_allowed(server: Running) -> None:
    nothing = {
        "logprobs": False,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "user": "me",
    }
    answer = server.client().chat.completions.create(**ask(max_tokens=3, **nothing))
    assert answer.usage.completion_tokens == 3


def test_bodies_that_are_no_request(server: Running) -> None:
    url = f"{server.url}/v1/chat/completions"
    json_type = {"Content-Type": "application/json"}
    for content, headers, status, words in [
        (b"{", json_type, 400, "not valid JSON"),
        (b"[" * 100_000, json_type, 400, "not valid JSON"),
        (b"[1]", json_type, 400, "not a JSON object"),
        (b"{}", {"Content-Type": "text/plain"}, 415, "application/json"),
        (b"{}", json_type, 400, "`messages` is missing"),
        (
            b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "top_p": NaN}',
            json_type,
            400,
            "top_p",
        ),
    ]:
        response = httpx.post(url, content=content, headers=headers)
        assert response.status_code == status and words in response.json()["error"]["message"], content[:40]
    response = httpx.get(f"{server.url}/v1/nothing")
    assert response.status_code == 404 and "error" in response.json()


def test_a_key_is_asked_for_where_one_is_set() -> None:
    with running(config_of(), key="a-key") as server:
        for wrong in ("none", "a-ke", "a-key2", "ä"):
            header = {"Authorization": f"Bearer {wrong}".encode()}
            response = httpx.get(f"{server.url}/v1/models", headers=header)
            assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
            assert (
                httpx.post(f"{server.url}/v1/chat/completions", json=ask(), headers=header).status_code == 401
            )
        assert server.client("a-key").models.list().data
        assert (
            server.client("a-key").chat.completions.create(**ask(max_tokens=2)).usage.completion_tokens == 2
        )
        assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
