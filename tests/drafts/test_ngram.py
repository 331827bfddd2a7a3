"""Prompt lookup against a search through the whole text, and its decoding against `transformers.generate`."""

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspec.decoding import Engine, Request, Sampling
from deepspec.drafts.contract import Beginning, Committed, DraftContext
from deepspec.drafts.ngram import Lookup, NgramDraft, NgramOptions
from deepspec.drafts.registry import new_draft, option_classes, untrained_draft
from deepspec.errors import UserError
from tests.decoding.fakes import reference, tokens_of
from tests.models import prompts, tiny_target


class Wanted:
    tree = None

    def __init__(self, tokens: int) -> None:
        self.max_tokens = tokens


def searched(text: list[int], count: int, min_n: int, max_n: int) -> list[int]:
    """The longest suffix that stands earlier in the text, its latest place, and what follows there; a copy that
    runs into its own end goes on copying."""
    for n in range(min(max_n, len(text) - 1), min_n - 1, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[-n:]:
                copied = list(text)
                for index in range(start + n, start + n + count):
                    copied.append(copied[index])
                return copied[len(text) :]
    return []


@settings(max_examples=200, deadline=None)
@given(
    text=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    pieces=st.lists(st.integers(1, 5), max_size=8),
    count=st.integers(1, 6),
    n=st.tuples(st.integers(1, 4), st.integers(0, 3)),
)
def test_the_longest_suffix_at_its_latest_place(
    text: list[int], pieces: list[int], count: int, n: tuple[int, int]
) -> None:
    """However the text has come, in pieces of any size."""
    min_n, max_n = n[0], n[0] + n[1]
    lookup, read = Lookup(min_n, max_n), 0
    for piece in [*pieces, len(text)]:
        lookup.extend(text[read : read + piece])
        read = min(len(text), read + piece)
        if read:
            assert lookup.ahead(count) == searched(text[:read], count, min_n, max_n)


def test_rows_keep_their_own_texts_and_lengths() -> None:
    draft = NgramDraft(NgramOptions(min_n=2, max_n=3))
    texts = [[5, 6, 7, 8, 5, 6], [1, 2, 3, 4], [9, 9, 9]]
    state = None
    for text in texts:
        begun = draft.begin(
            Beginning(DraftContext(tiny_target("llama")), torch.tensor([text]), torch.empty(1, 0, 0), 64)
        )
        state = draft.join(state, begun)
    proposal = draft.propose(state, Wanted(3))
    assert proposal.length == [3, 0, 3] and proposal.q is None
    assert proposal.tokens.tolist() == [[7, 8, 5], [0, 0, 0], [9, 9, 9]]
    committed = torch.tensor([[7, 0, 0], [1, 2, 3], [4, 9, 0]])
    draft.update(state, Committed(committed, torch.empty(3, 3, 0), [[7], [1, 2, 3], [4, 9]]))
    draft.select(state, [0, 1])
    proposal = draft.propose(state, Wanted(2))
    assert proposal.tokens.tolist() == [[8, 5], [4, 1]] and proposal.length == [2, 2]
    draft.select(state, [1])
    draft.update(state, Committed(torch.tensor([[0]]), torch.empty(1, 1, 0), [[0]]))
    assert draft.propose(state, Wanted(2)).tokens.shape == (1, 0)


def test_a_round_costs_the_same_in_a_long_text() -> None:
    """Two texts, one ten times the other: the per-token cost is within noise, not ten times."""

    def seconds(length: int) -> float:
        text = torch.randint(0, 50, (length,), generator=torch.Generator().manual_seed(0)).tolist()
        lookup, best = Lookup(2, 4), float("inf")
        lookup.extend(text)
        for _ in range(5):
            start = time.perf_counter()
            for token in text[:500]:
                lookup.extend([token])
                lookup.ahead(5)
            best = min(best, time.perf_counter() - start)
        return best

    assert seconds(40_000) < 5 * seconds(4_000)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mistral_sliding", "deepseek_v3"])
def test_greedy_text_is_generates_text(family: str) -> None:
    """Prompts that repeat themselves, and ones that do not, in one ragged batch."""
    target, texts = tiny_target(family), prompts(6, seed=21, longest=10)
    texts = [text * (1 + index % 3) for index, text in enumerate(texts)]
    expected = [reference(family, text) for text in texts]
    requests = [Request(text, 40) for text in texts]
    for rows in (1, 4):
        engine = Engine(target, NgramDraft(NgramOptions(min_n=1, max_n=3)), k=4, max_batch_size=rows)
        results = engine.generate(requests)
        assert tokens_of(results) == expected
        rounds = [r for result in results for r in result.rounds]
        assert {r.verified for r in rounds} >= {0, 4} and sum(r.accepted for r in rounds) > 0


def test_a_sampled_answer_does_not_depend_on_batch_mates() -> None:
    target, texts = tiny_target("llama"), prompts(5, seed=22)
    requests = [Request(text * 2, 20, Sampling(0.7), seed=seed) for seed, text in enumerate(texts)]
    engine = Engine(target, NgramDraft(NgramOptions(min_n=1)), max_batch_size=3)
    together = engine.generate(requests)
    assert tokens_of(together) == [engine.generate([request])[0].tokens for request in requests]


def test_there_is_nothing_to_train() -> None:
    assert option_classes()["ngram"] is NgramOptions
    assert isinstance(untrained_draft(NgramOptions()), NgramDraft)
    with pytest.raises(UserError, match="nothing to train"):
        new_draft(NgramOptions(), tiny_target("llama"), None)
    for options in (NgramOptions(min_n=0), NgramOptions(min_n=3, max_n=2)):
        with pytest.raises(UserError, match=r"draft\.min_n"):
            NgramDraft(options)
