"""Where an answer ends, and what happens to a request that cannot be answered while others can."""

import pytest
import torch
import transformers

from deepspec.decoding import Engine, Request, Sampling
from deepspec.drafts.contract import DynamicTree
from deepspec.errors import UserError
from deepspec.target import Target
from tests.data.toy_tokenizers import chatml
from tests.decoding.fakes import NEW, AnswerDraft, TableDraft, reference, tokens_of
from tests.models import COMMON, VOCAB, prompts, tiny_target

TREE = DynamicTree(depth=4, top_k=3, total_tokens=12)
SYLLABLES = [
    first + second for first in "bdfgklmnprst" for second in ("a", "e", "i", "o", "u", "ah", "", "y")
]


def spell(tokens: list[int]) -> str:
    """Token → syllable; one in eight has a consonant only, so that strings straddle tokens."""
    return "".join(SYLLABLES[token % len(SYLLABLES)] for token in tokens)


def ways(answers: dict[tuple[int, ...], list[int]], vocab: int = VOCAB) -> list[Engine]:
    """Plainly, by trees, by chains. vocab: of the wrong tokens that are drafted."""
    target = tiny_target("llama")
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    table[:, vocab:] = -torch.inf
    return [
        Engine(target, detokenise=spell),
        Engine(target, AnswerDraft(answers, vocab), tree=TREE, detokenise=spell),
        Engine(target, AnswerDraft(answers, vocab), tree=TREE, detokenise=spell, max_batch_size=3),
        Engine(target, TableDraft(table), k=3, detokenise=spell, max_batch_size=3),
    ]


def test_stop_strings_end_an_answer_where_plain_reading_would() -> None:
    """Cut out of the text anywhere: across tokens and rounds, inside accepted blocks."""
    texts = prompts(6, seed=11)
    answers = {tuple(text): reference("llama", text) for text in texts}
    requests, expected = [], []
    for index, text in enumerate(texts):
        answer = answers[tuple(text)]
        start, length = 7 * index + 3, 3 + index
        stop = (spell(answer)[start : start + length], "never said")
        end = next(n for n in range(1, NEW + 1) if any(s in spell(answer[:n]) for s in stop))
        requests.append(Request(text, NEW, stop=stop))
        expected.append(answer[:end])
    assert len({len(tokens) for tokens in expected}) > 3
    for engine in ways(answers):
        results = engine.generate(requests)
        assert tokens_of(results) == expected
        assert {result.finish for result in results} == {"stop"}
        for result in results:
            assert sum(r.committed for r in result.rounds) == len(result.tokens) - 1
            for r in result.rounds:
                assert r.accepted <= r.verified and r.committed <= r.accepted + 1
                assert r.cut == (r.committed == r.accepted)


def test_stop_strings_are_generates() -> None:
    """With a byte-level tokenizer, whose tokens may end inside a character."""
    tokenizer = chatml()
    torch.manual_seed(0)
    config = {**COMMON, "vocab_size": len(tokenizer), "eos_token_id": None}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**config), dtype=torch.float64
    )
    target = Target(model, tokenizer, "tiny with a tokenizer")
    texts = prompts(5, seed=17)
    requests, expected = [], []
    for index, text in enumerate(texts):
        ids = torch.tensor([text])
        settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
        whole = model.generate(ids, max_new_tokens=NEW, **settings)[0, len(text) :].tolist()
        readable = [c for c in tokenizer.decode(whole[8:]) if c.isascii() and c.isprintable()]
        stop = readable[index]
        stopped = model.generate(
            ids, max_new_tokens=NEW, stop_strings=[stop], tokenizer=tokenizer, **settings
        )[0, len(text) :].tolist()
        requests.append(Request(text, NEW, stop=(stop,)))
        expected.append(stopped)
    assert any(len(tokens) < NEW for tokens in expected)
    for rows in (1, 3):
        draft = AnswerDraft({tuple(text): answer for text, answer in zip(texts, expected, strict=True)}, 50)
        engine = Engine(target, draft, tree=TREE, max_batch_size=rows)
        assert tokens_of(engine.generate(requests)) == expected
        assert tokens_of(Engine(target, max_batch_size=rows).generate(requests)) == expected


def test_the_first_of_several_ends_counts() -> None:
    texts = prompts(4, seed=12)
    answers = {tuple(text): reference("llama", text) for text in texts}
    for text in texts:
        answer = answers[tuple(text)]
        eos = (answer[20], answer[9], VOCAB - 1)
        stop = (spell(answer[14:16]),)
        ends = [
            next(n for n in range(1, NEW + 1) if answer[n - 1] in eos),
            next(n for n in range(1, NEW + 1) if stop[0] in spell(answer[:n])),
            12,
        ]
        for engine in ways(answers):
            (result,) = engine.generate([Request(text, 12, eos=eos, stop=stop)])
            assert result.tokens == answer[: min(ends)]
            names = {ends[2]: "length", ends[1]: "stop", ends[0]: "eos"}
            assert result.finish == names[min(ends)]


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_a_repetition_penalty_is_generates(penalty: float) -> None:
    """It changes greedy text too, and every node of a tree has its own repetitions."""
    texts = prompts(4, seed=13)
    answers = {tuple(text): reference("llama", text, penalty=penalty) for text in texts}
    assert any(answers[tuple(text)] != reference("llama", text) for text in texts)
    requests = [Request(text, NEW, Sampling(repetition_penalty=penalty)) for text in texts]
    for engine in ways(answers):
        assert tokens_of(engine.generate(requests)) == [answers[tuple(text)] for text in texts]


def test_only_some_rows_are_penalised() -> None:
    texts = prompts(3, seed=14)
    requests = [
        Request(text, 20, Sampling(repetition_penalty=1.0 + index)) for index, text in enumerate(texts)
    ]
    expected = [reference("llama", text, 20, penalty=1.0 + index) for index, text in enumerate(texts)]
    for engine in ways({tuple(text): answer for text, answer in zip(texts, expected, strict=True)}):
        assert tokens_of(engine.generate(requests)) == expected


def test_bad_requests_end_alone() -> None:
    """Each with one sentence, at itself; those between them are answered as if they were alone."""
    texts = prompts(5, seed=15)
    answers = {tuple(text): reference("llama", text, 12) for text in texts}
    good = [Request(text, 12, id=str(index)) for index, text in enumerate(texts)]
    bad = {
        "has an empty prompt": Request([], 12, id="empty"),
        "temperature is -1": Request(texts[0], 12, Sampling(-1.0), id="cold"),
        "Shorten the prompt": Request([3] * 256, 12, id="long"),
        "made with another tokenizer": Request([3, VOCAB], 12, id="foreign"),
        "max_new_tokens=0": Request(texts[1], 0, id="none"),
        "top_p above 0": Request(texts[1], 12, Sampling(1.0, top_p=0.0), id="nothing"),
        "has stop strings, an empty one": Request(texts[1], 12, stop=("",), id="at once"),
    }
    requests = [good[0], *bad.values(), *good[1:]]
    for engine in ways(answers):
        with pytest.raises(UserError, match="'empty'"):
            engine.generate(requests)
        seen = []
        results = engine.generate(requests, seen.append, keep_going=True)
        assert [result.id for result in results] == [request.id for request in requests]
        for words, result in zip(bad, results[1 : 1 + len(bad)], strict=True):
            assert (result.finish, result.tokens) == ("error", []) and words in result.error
        for text, result in zip(texts, [results[0], *results[1 + len(bad) :]], strict=True):
            assert (result.finish, result.error) == ("length", "")
            assert result.tokens == answers[tuple(text)]
        assert sorted(map(id, seen)) == sorted(map(id, results))


def test_a_prompt_that_gives_no_numbers_ends_alone() -> None:
    """A damaged embedding row in one prompt: nothing is said to it, and the others do not hear of it."""
    target, texts = tiny_target("llama"), prompts(5, seed=18)
    answers = {tuple(text): reference("llama", text, 12) for text in texts}
    said = {token for text in texts for token in [*text, *answers[tuple(text)]]}
    token = next(token for token in range(VOCAB - 1, 0, -1) if token not in said)
    requests = [Request(text, 12, id=str(index)) for index, text in enumerate(texts)]
    requests.insert(2, Request([5, token, 7], 12, id="bad"))
    engines = ways(answers, vocab=token)
    rows = target.model.get_input_embeddings().weight
    kept = rows[token].clone()
    try:
        with torch.no_grad():
            rows[token] = torch.nan
        for engine in engines:
            results = engine.generate(requests, keep_going=True)
            assert (results[2].finish, results[2].tokens) == ("error", [])
            assert "'bad' are not numbers" in results[2].error
            assert [r.tokens for r in results if r.id != "bad"] == list(answers.values())
    finally:
        with torch.no_grad():
            rows[token] = kept


def test_logits_that_are_no_numbers_end_one_request_of_a_batch() -> None:
    """One prompt's answer meets a damaged embedding row; its batch mates never say that token.

    A draft that proposes it spoils the whole round, as attention multiplies what it masks by 0.
    """
    target, texts = tiny_target("llama"), prompts(6, seed=16)
    answers = {tuple(text): reference("llama", text, 16) for text in texts}
    bad = texts[2]
    others = {token for text in texts if text != bad for token in [*text, *answers[tuple(text)]]}
    said = answers[tuple(bad)]
    at, token = next(
        (i, t) for i, t in enumerate(said) if t not in others and t not in bad and i > 1 and t > 20
    )
    requests = [Request(text, 16, id=str(index)) for index, text in enumerate(texts)]
    rows = target.model.get_input_embeddings().weight
    kept = rows[token].clone()
    try:
        with torch.no_grad():
            rows[token] = torch.nan
        for engine in ways(answers, vocab=token):
            results = engine.generate(requests, keep_going=True)
            assert [result.finish for result in results] == ["length"] * 2 + ["error"] + ["length"] * 3
            found = results[2].tokens
            assert found == said[: len(found)] and len(found) <= at + 1
            assert len(found) == at + 1 or engine.draft is not None
            assert "'2' are not numbers" in results[2].error
            assert sum(r.committed for r in results[2].rounds) == len(found) - 1
            for index in (0, 1, 3, 4, 5):
                assert results[index].tokens == answers[tuple(texts[index])]
            pieces = []
            with pytest.raises(UserError, match="not numbers"):
                for tokens, _ in engine.stream(requests[2]):
                    pieces += tokens
            assert pieces == found
    finally:
        with torch.no_grad():
            rows[token] = kept
