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


def test_a_bad_request_ends_alone() -> None:
    texts = prompts(5, seed=15)
    answers = {tuple(text): reference("llama", text, 12) for text in texts}
    requests = [Request(text, 12, id=str(index)) for index, text in enumerate(texts)]
    requests[1] = Request([], 12, id="empty")
    requests[3] = Request(texts[3], 12, Sampling(-1.0), id="cold")
    for engine in ways(answers):
        with pytest.raises(UserError, match="'empty'"):
            engine.generate(requests)
        seen = []
        results = engine.generate(requests, seen.append, keep_going=True)
        assert [result.id for result in results] == ["0", "empty", "2", "cold", "4"]
        assert [result.finish for result in results] == ["length", "error", "length", "error", "length"]
        assert "empty prompt" in results[1].error and "temperature is -1" in results[3].error
        for index in (0, 2, 4):
            assert results[index].tokens == answers[tuple(texts[index])] and not results[index].error
        assert sorted(map(id, seen)) == sorted(map(id, results))


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
