"""Acceptance by enumeration: over every draft and every outcome, the output has the target's distribution."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepspec.decoding.acceptance import draw, greedy_law, token_law
from deepspec.drafts.contract import Proposal

V = 3


def random_distribution(generator: torch.Generator, holes: bool) -> Tensor:
    weights = torch.rand(V, generator=generator, dtype=torch.float64) ** 3
    if holes:
        weights[int(torch.randint(V, (1,), generator=generator))] = 0
    return weights / weights.sum()


def tables(seed: int, depth: int, holes: bool) -> dict[tuple[int, ...], Tensor]:
    """A distribution after every text shorter than `depth`."""
    generator = torch.Generator().manual_seed(seed)
    texts = [text for n in range(depth) for text in itertools.product(range(V), repeat=n)]
    return {text: random_distribution(generator, holes) for text in texts}


def output_law(k: int, p: dict, q: dict | None, path: tuple[int, ...] | None, vocab: Tensor | None) -> dict:
    """P(first k+1 tokens) of one round, its committed tokens continued by plain sampling from p."""
    found: dict[tuple[int, ...], float] = {}
    drafts = itertools.product(range(V), repeat=k) if path is None else [path]
    for draft in drafts:
        chance = 1.0 if q is None else float(torch.stack([q[draft[:i]][draft[i]] for i in range(k)]).prod())
        if chance == 0:
            continue
        target = torch.stack([p[draft[:i]] for i in range(k + 1)])[None]
        drawn = None if q is None else torch.stack([q[draft[:i]] for i in range(k)])[None]
        if drawn is not None and vocab is not None:
            drawn = drawn[..., vocab]
        proposal = Proposal(torch.tensor([draft]), [k], q=drawn, vocab=vocab)
        law = token_law(proposal, target)
        survive = 1.0
        for n in range(k + 1):
            stop = survive * (1 - float(law.accept[0, n])) if n < k else survive
            after = law.next_distribution(torch.tensor([n]))[0]
            for token in range(V):
                _spread(found, (*draft[:n], token), chance * stop * float(after[token]), k + 1, p)
            survive *= float(law.accept[0, n]) if n < k else 1.0
    return found


def _spread(found: dict, text: tuple[int, ...], chance: float, length: int, p: dict) -> None:
    if len(text) == length:
        found[text] = found.get(text, 0.0) + chance
        return
    for token in range(V):
        _spread(found, (*text, token), chance * float(p[text][token]), length, p)


def assert_is_target(found: dict, p: dict, length: int) -> None:
    for text in itertools.product(range(V), repeat=length):
        exact = float(torch.stack([p[text[:i]][text[i]] for i in range(length)]).prod())
        assert abs(found.get(text, 0.0) - exact) < 1e-12


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), k=st.integers(1, 3), holes=st.booleans())
def test_token_rejection_is_lossless(seed: int, k: int, holes: bool) -> None:
    p, q = tables(seed, k + 1, holes), tables(seed + 1, k + 1, holes)
    assert_is_target(output_law(k, p, q, None, None), p, k + 1)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), path=st.lists(st.integers(0, V - 1), min_size=1, max_size=3))
def test_a_deterministic_draft_is_a_point_mass(seed: int, path: list[int]) -> None:
    p = tables(seed, len(path) + 1, False)
    assert_is_target(output_law(len(path), p, None, tuple(path), None), p, len(path) + 1)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_a_reduced_draft_vocabulary_is_zero_outside(seed: int) -> None:
    k, vocab = 2, torch.tensor([0, 2])
    p, q = tables(seed, k + 1, False), tables(seed + 1, k + 1, False)
    for row in q.values():
        row[1] = 0
        row.div_(row.sum())
    assert_is_target(output_law(k, p, q, None, vocab), p, k + 1)


def test_equal_distributions_accept_everything() -> None:
    p = torch.tensor([[[0.2, 0.3, 0.5], [0.1, 0.1, 0.8]]])
    law = token_law(Proposal(torch.tensor([[1]]), [1], q=p[:, :1]), p)
    assert law.accept.tolist() == [[1.0]]
    # The residual has no mass; were it ever needed it is p, not NaN.
    assert torch.equal(law.next_distribution(torch.tensor([0])), p[:, 0])


def test_expected_length_of_the_seeded_example() -> None:
    """Accepted length in expectation equals Σ_n P(the first n all pass), from Σ min(p, q) at each prefix."""
    p, q = tables(7, 4, False), tables(8, 4, False)
    by_law = 0.0
    for draft in itertools.product(range(V), repeat=3):
        chance = float(torch.stack([q[draft[:i]][draft[i]] for i in range(3)]).prod())
        target = torch.stack([p[draft[:i]] for i in range(4)])[None]
        proposal = Proposal(torch.tensor([draft]), [3], q=torch.stack([q[draft[:i]] for i in range(3)])[None])
        by_law += chance * float(token_law(proposal, target).accept[0].cumprod(0).sum())
    exact = 0.0
    for n in range(1, 4):
        for text in itertools.product(range(V), repeat=n):
            exact += float(
                torch.stack([torch.minimum(p[text[:i]], q[text[:i]])[text[i]] for i in range(n)]).prod()
            )
    assert by_law == pytest.approx(exact, abs=1e-12)


@given(
    best=st.lists(st.integers(0, 4), min_size=5, max_size=5),
    drafted=st.lists(st.integers(0, 4), min_size=4, max_size=4),
    length=st.integers(0, 4),
)
def test_greedy_stops_at_the_first_mismatch_or_the_proposals_end(
    best: list[int], drafted: list[int], length: int
) -> None:
    logits = torch.nn.functional.one_hot(torch.tensor([best]), 5).double()
    law = greedy_law(Proposal(torch.tensor([drafted]), [length]), logits)
    verdict = draw(law, torch.zeros(1, 4, dtype=torch.float64), torch.zeros(1, 5, dtype=torch.float64))
    expected = 0
    while expected < length and drafted[expected] == best[expected]:
        expected += 1
    assert (verdict.length.item(), verdict.next_token.item()) == (expected, best[expected])


def test_comparison_is_strict() -> None:
    """u in [0, 1): an accept probability of 0 never passes, of 1 always does."""
    p = torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]]], dtype=torch.float64)
    law = token_law(Proposal(torch.tensor([[0], [0]]), [1, 1]), p)
    uniform = torch.tensor([[1 - 2**-53], [0.0]], dtype=torch.float64)
    assert draw(law, uniform, torch.zeros(2, 2, dtype=torch.float64)).length.tolist() == [1, 0]
