"""The offline walk against a toy engine that drafts and verifies token by token."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepspec.drafts.contract import DraftLoss
from deepspec.drafts.walk import Walk, greedy_accepts, keyed_uniforms, sampled_accepts, walk

V, END = 4, 0


def next_token(context: list[int], salt: int) -> int:
    """A deterministic language model."""
    return random.Random(f"{salt}{context[-3:]}").randrange(V)


def target_token(context: list[int]) -> int:
    return next_token(context, 1)


def draft_token(context: list[int]) -> int:
    """Right about two times of three, seeing its own words."""
    return target_token(context) if next_token(context, 2) else next_token(context, 3)


def greedy_answer(prompt: list[int], limit: int) -> list[int]:
    text = list(prompt)
    while len(text) - len(prompt) < limit and not (len(text) > len(prompt) and text[-1] == END):
        text.append(target_token(text))
    return text


def toy_engine(prompt: list[int], limit: int, k: int) -> list[tuple[int, int, bool]]:
    """Rounds (accepted, kept, cut) of real draft–verify decoding; the prefill gives the first token."""
    text = [*prompt, target_token(prompt)]
    rounds = []
    while text[-1] != END and len(text) - len(prompt) < limit:
        drafted: list[int] = []
        for _ in range(k):
            drafted.append(draft_token(text + drafted))
        accepted = 0
        while accepted < k and drafted[accepted] == target_token(text + drafted[:accepted]):
            accepted += 1
        new = [*drafted[:accepted], target_token(text + drafted[:accepted])]
        kept = 0
        for token in new[: limit - (len(text) - len(prompt))]:
            text.append(token)
            kept += 1
            if token == END:
                break
        rounds.append((accepted, kept, kept < len(new)))
    assert text == greedy_answer(prompt, limit)
    return rounds


def statistics(rows: list[list[tuple[list[int], int]]], k: int) -> tuple[DraftLoss, Tensor, Tensor]:
    """What a draft's forward would say of packed rows of (text, prompt length), padded."""
    length = max(sum(len(text) for text, _ in row) for row in rows) + 2
    mask = torch.zeros(len(rows), length, dtype=torch.bool)
    documents = torch.full((len(rows), length), -1)
    valid = torch.zeros(len(rows), length, k, dtype=torch.bool)
    hits = torch.rand(len(rows), length, k, generator=torch.Generator().manual_seed(1)) < 0.5
    for b, row in enumerate(rows):
        offset = 0
        for d, (text, prompt) in enumerate(row):
            documents[b, offset : offset + len(text)] = d
            mask[b, offset + prompt : offset + len(text)] = True
            for a in range(prompt, len(text) - 1):
                drafted: list[int] = []
                for step in range(k):
                    drafted.append(draft_token(text[: a + step + 1]))
                    if a + step + 1 < len(text):
                        valid[b, offset + a, step] = True
                        hits[b, offset + a, step] = drafted[-1] == text[a + step + 1]
            offset += len(text)
    return DraftLoss(valid=valid, hits=hits), mask, documents


prompts = st.lists(st.integers(1, V - 1), min_size=1, max_size=4)


@given(st.lists(st.lists(prompts, min_size=1, max_size=3), min_size=1, max_size=3), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_greedy_walk_is_the_engine_round_for_round(rows: list[list[list[int]]], k: int) -> None:
    limit = 17
    loss, mask, documents = statistics(
        [[(greedy_answer(prompt, limit), len(prompt)) for prompt in row] for row in rows], k
    )
    found = walk(greedy_accepts(loss), loss.valid, mask, documents)
    engine = [toy_engine(prompt, limit, k) for row in rows for prompt in row]
    rounds = [one for answer in engine for one in answer]
    assert found.rounds == len(rounds)
    assert found.committed == sum(kept for _, kept, _ in rounds)
    assert found.cut == sum(cut for _, _, cut in rounds)
    assert found.answers == sum(bool(answer) for answer in engine)
    whole = [accepted for accepted, _, cut in rounds if not cut]
    ended = [kept for _, kept, cut in rounds if cut]
    for position in range(1, k + 1):
        at_least = sum(n >= position for n in whole + ended)
        assert found.accepted[position - 1] == at_least
    assert found.tau == (found.committed / found.rounds if rounds else None)


def test_conditional_and_unconditional_acceptance_by_hand() -> None:
    # One answer of tokens 1..6 after a prompt token; K = 2; accepted by anchor: 2, ., ., 0, 1.
    mask = torch.tensor([[False, True, True, True, True, True, True]])
    documents = torch.zeros(1, 7, dtype=torch.long)
    valid = torch.tensor([[[a + k <= 6 and a >= 1 for k in (1, 2)] for a in range(7)]])
    accepts = torch.zeros(1, 7, 2, dtype=torch.bool)
    accepts[0, 1] = torch.tensor([True, True])
    accepts[0, 5] = torch.tensor([True, True])
    found = walk(accepts, valid, mask, documents)
    # Rounds: at 1 accepts 2, pending 4; at 4 accepts 0, pending 5; at 5 accepts the last token: cut.
    assert found == Walk(3, 3 + 1 + 1, 1, 1, (3, 2), (3, 1), (2, 1))
    assert found.tau == pytest.approx(5 / 3)
    assert found.conditional == [pytest.approx(2 / 3), 1.0]
    assert found.unconditional == [pytest.approx(2 / 3), 0.5]


def test_a_step_past_a_rejection_does_not_count_and_other_answers_do_not_leak() -> None:
    mask = torch.tensor([[True, True, True, True, False, True, True]])
    documents = torch.tensor([[0, 0, 1, 1, 1, 1, -1]])
    valid = torch.ones(1, 7, 3, dtype=torch.bool)
    accepts = torch.tensor([[[False, True, True]] * 7])
    found = walk(accepts, valid, mask, documents)
    # Answers: 0-1, 2-3 (another document), 5 alone (no round); position 6 is padding.
    assert (found.rounds, found.committed, found.cut, found.answers) == (2, 2, 0, 2)
    assert found.accepted == (0, 0, 0)
    assert found.verified == (2, 0, 0)


def test_an_answer_without_context_starts_where_the_draft_can() -> None:
    mask, documents = torch.ones(1, 4, dtype=torch.bool), torch.zeros(1, 4, dtype=torch.long)
    valid = torch.tensor([[[False], [True], [True], [False]]])
    found = walk(torch.zeros(1, 4, 1, dtype=torch.bool), valid, mask, documents)
    assert (found.rounds, found.committed) == (2, 2)


def test_no_rounds_give_none_not_a_number() -> None:
    empty = walk(*[torch.zeros(1, 3, 2, dtype=torch.bool)] * 2, torch.zeros(1, 3), torch.zeros(1, 3).long())
    assert empty.tau is None
    assert empty.conditional == empty.unconditional == [None, None]


def test_walks_add_like_their_counts() -> None:
    one = Walk(3, 5, 1, 1, (3, 2), (3, 1), (2, 1))
    two = Walk(1, 3, 0, 1, (1, 1), (1, 1), (1, 1))
    assert one + two == Walk(4, 8, 1, 2, (4, 3), (4, 2), (3, 2))
    assert Walk.from_counts(one.counts()) == one


def test_sampled_walk_has_the_law_of_token_rejection() -> None:
    """Memoryless p and q: the accepted length of real rejection rounds, and of the walk over texts from p."""
    p, q, k = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.7, 0.1]), 3
    alpha = torch.minimum(p, q).sum().item()
    expected = sum(alpha**i for i in range(k + 1))
    rows, length = 40, 600
    text = torch.multinomial(p, rows * length, True, generator=torch.Generator().manual_seed(3))
    text = text.view(rows, length)
    ahead = torch.stack([text.roll(-step, dims=1) for step in range(1, k + 1)], -1)
    valid = torch.arange(length)[:, None] + torch.arange(1, k + 1) < length
    valid = valid.expand(rows, -1, -1)
    loss = DraftLoss(valid=valid, q_text=q[ahead], p_text=p[ahead])
    accepts = sampled_accepts(loss, keyed_uniforms(5, range(rows), length))
    found = walk(accepts, valid, torch.ones(rows, length), torch.zeros(rows, length).long())
    assert found.rounds > 10_000
    assert found.tau == pytest.approx(expected, abs=0.05)
    for position in range(k):
        assert found.conditional[position] == pytest.approx(alpha, abs=0.03)


def test_sampled_acceptance_is_strict_and_judges_the_token_ahead() -> None:
    q_text = torch.tensor([[[0.0, 0.5], [0.3, 0.3], [0.2, 0.2]]])
    p_text = torch.tensor([[[0.5, 0.5], [0.6, 0.6], [0.1, 0.1]]])
    uniforms = torch.tensor([[0.9, 0.0, 0.49]])
    accepts = sampled_accepts(DraftLoss(q_text=q_text, p_text=p_text), uniforms)
    # q = 0 is refused even at u = 0; q = p always passes; anchor 1 judges token 2 (0.49 < 0.5).
    assert accepts[0, 0].tolist() == [False, True]
    assert accepts[0, 1, 0].item() is True
    assert accepts[0, 2].tolist() == [True, True]


def test_uniforms_depend_on_their_keys_alone() -> None:
    together = keyed_uniforms(7, [3, 11, 5], 9)
    assert torch.equal(keyed_uniforms(7, [11], 20)[0, :9], together[1])
    assert not torch.equal(keyed_uniforms(8, [11], 9)[0], together[1])
    assert keyed_uniforms(-1, [0], 4).shape == (1, 4)
