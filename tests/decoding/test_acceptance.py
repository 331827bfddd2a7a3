"""Acceptance by enumeration: over every draft and every outcome, the output has the target's distribution."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspec.decoding.acceptance import choose_greedy, choose_sampled, draw
from deepspec.decoding.acceptance.chains import TokenLaw, block_law, token_law
from deepspec.decoding.acceptance.trees import tree_law
from deepspec.drafts.contract import Proposal
from tests.decoding.enumeration import (
    Outcomes,
    V,
    chain_parents,
    enumerate_rule,
    probability,
    proposal_of,
    shape_of,
    tables,
    target_of,
)

EXACT = 1e-12
# topological, unsorted by depth, single branches, a full root, siblings far apart
SHAPES = [
    [-1, -1],
    [-1, -1, 0, 0],
    [-1, -1, -1, 0],
    [-1, 0, -1, 1, 2],
    [-1, -1, 1, 2, 1],
    [-1, 0, 0, -1, 1],
]
RULES = {"token": token_law, "block": block_law}


def by_tree(proposal: Proposal, p: torch.Tensor):
    return tree_law(proposal, p, shape_of(proposal))


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), k=st.integers(1, 3), holes=st.booleans())
def test_drawn_chains_are_lossless(rule: str, seed: int, k: int, holes: bool) -> None:
    p, q = tables(seed, k + 1, holes), tables(seed + 1, k + 1, holes)
    assert enumerate_rule(RULES[rule], chain_parents(k), p, q, True).worst() < EXACT


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), share=st.floats(0.1, 0.9))
def test_a_draft_that_stops_by_what_it_has_drawn_is_lossless(rule: str, seed: int, share: float) -> None:
    """The length may depend on the tokens before the one not drawn."""
    p, q = tables(seed, 4, False), tables(seed + 1, 4, False)
    found = enumerate_rule(
        RULES[rule], chain_parents(3), p, q, True, stop=lambda text: float(q[text].max()) < share
    )
    assert found.worst() < EXACT


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6), k=st.integers(1, 3))
def test_a_deterministic_chain_is_lossless(rule: str, seed: int, k: int) -> None:
    p, q = tables(seed, k + 1, False), tables(seed + 1, k + 1, False)
    assert enumerate_rule(RULES[rule], chain_parents(k), p, q, False).worst() < EXACT


@pytest.mark.parametrize("rule", [*RULES, "tree"])
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_a_reduced_draft_vocabulary_is_zero_outside(rule: str, seed: int) -> None:
    p, q = tables(seed, 3, False), tables(seed + 1, 3, False)
    for row in q.values():
        row[1] = 0
        row.div_(row.sum())
    parents = [-1, -1, 0, 1] if rule == "tree" else chain_parents(2)
    law, vocab = RULES.get(rule, by_tree), torch.tensor([0, 2])
    assert enumerate_rule(law, parents, p, q, True, vocab=vocab).worst() < EXACT


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "deterministic"])
@pytest.mark.parametrize("parents", SHAPES, ids=str)
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 10**6), holes=st.booleans())
def test_trees_are_lossless(parents: list[int], drawn: bool, seed: int, holes: bool) -> None:
    """With holes, q has fewer tokens than some nodes have children."""
    p, q = tables(seed, len(parents) + 1, False), tables(seed + 1, len(parents) + 1, holes)
    assert enumerate_rule(by_tree, parents, p, q, drawn).worst() < EXACT


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6), drawn=st.booleans(), deepest=st.integers(0, 3))
def test_nodes_too_deep_to_be_kept_are_as_if_not_there(seed: int, drawn: bool, deepest: int) -> None:
    parents = [-1, -1, 0, 2]
    p, q = tables(seed, 5, False), tables(seed + 1, 5, False)

    def law(proposal: Proposal, target: torch.Tensor):
        found = tree_law(proposal, target, shape_of(proposal, deepest))
        depth = torch.tensor([1, 1, 2, 3])
        assert (found.accept[:, depth > deepest] == 0).all()
        return found

    assert enumerate_rule(law, parents, p, q, drawn).worst() < EXACT


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), k=st.integers(1, 3))
def test_expected_lengths_are_those_of_the_papers(seed: int, k: int) -> None:
    """Token rejection reaches a text with Π min(p, q), block verification with w(xy) = min(w(x) p(y), q(xy))
    (Sun et al. 2024), which is never less."""
    p, q = tables(seed, k + 1, False), tables(seed + 1, k + 1, False)
    token = block = 0.0
    for n in range(1, k + 1):
        for text in itertools.product(range(V), repeat=n):
            heads = [text[:i] for i in range(n)]
            token += float(
                torch.stack([torch.minimum(p[h], q[h])[text[i]] for i, h in enumerate(heads)]).prod()
            )
            weight = 1.0
            for i, head in enumerate(heads):
                weight = min(weight * float(p[head][text[i]]), probability(q, text[: i + 1]))
            block += weight
    by_token = enumerate_rule(token_law, chain_parents(k), p, q, True)
    by_block = enumerate_rule(block_law, chain_parents(k), p, q, True)
    assert by_token.accepted == pytest.approx(token, abs=EXACT)
    assert by_block.accepted == pytest.approx(block, abs=EXACT)
    assert by_block.accepted >= by_token.accepted - EXACT


def test_block_verification_is_worth_having() -> None:
    gains = []
    for seed in range(10):
        p, q = tables(2 * seed, 4, False), tables(2 * seed + 1, 4, False)
        both = [
            enumerate_rule(rule, chain_parents(3), p, q, True).accepted for rule in (block_law, token_law)
        ]
        gains.append(both[0] / both[1])
    assert sum(gains) / len(gains) > 1.05


def test_a_deterministic_block_is_token_rejection() -> None:
    p = torch.full((1, 3, V), 1 / V)
    assert isinstance(block_law(Proposal(torch.tensor([[0, 1]]), [2]), p), TokenLaw)


def test_equal_distributions_accept_everything() -> None:
    p = torch.tensor([[[0.2, 0.3, 0.5], [0.1, 0.1, 0.8]]])
    for rule in RULES.values():
        law = rule(Proposal(torch.tensor([[1]]), [1], q=p[:, :1]), p)
        assert law.accept.tolist() == [[1.0]]
        # The residual has no mass; were it ever needed it is p, not NaN.
        assert torch.equal(law.next_distribution(torch.tensor([0])), p[:, 0])


@pytest.mark.parametrize("parents", [chain_parents(3), [-1, -1, 0, 0], [-1, 0, 1, 0]], ids=str)
def test_a_draft_that_is_not_a_number_costs_nothing_but_speed(parents: list[int]) -> None:
    """Tokens 'drawn' from NaN are tokens from anywhere; the output stays the target's."""
    p, q = tables(3, 4, False), tables(4, 4, False)
    is_chain = parents == chain_parents(3)

    def law(proposal: Proposal, target: torch.Tensor):
        proposal.q[:, 1] = torch.nan
        return choose_sampled("auto", proposal, target, None if is_chain else shape_of(proposal))

    assert enumerate_rule(law, parents, p, q, True).worst() < EXACT


def test_children_that_repeat_an_elder_one_are_worth_nothing() -> None:
    """A deterministic draft that proposes the same token twice is slow, not wrong."""
    p = tables(5, 3, False)
    parents, tokens = [-1, -1, -1], [[0, 0, 2]]
    proposal = proposal_of(parents, tokens, None)
    law = by_tree(proposal, target_of(parents, tokens, p))
    assert law.accept[0, 1] == 0
    assert Outcomes(parents, p, 2).add(law, tokens, [1.0]).worst() < EXACT


@settings(max_examples=60, deadline=None)
@given(data=st.data(), length=st.integers(0, 6))
def test_greedy_follows_the_argmax_to_the_proposals_end(data: st.DataObject, length: int) -> None:
    """Chains and trees of any shape against a plain walk."""
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(6)]
    if data.draw(st.booleans()):
        parents = chain_parents(6)
    children = {above: [i for i in range(6) if parents[i] == above] for above in range(-1, 6)}
    drafted = [0] * 6
    for nodes in children.values():
        for node, token in zip(nodes, data.draw(st.permutations(range(6))), strict=False):
            drafted[node] = token
    best = data.draw(st.lists(st.integers(0, 5), min_size=7, max_size=7))
    logits = torch.nn.functional.one_hot(torch.tensor([best]), 6).double()
    proposal = Proposal(torch.tensor([drafted]), [length])
    shape = None
    if parents != chain_parents(6):
        proposal.parents = torch.tensor([parents])
        shape = shape_of(proposal)
    verdict = draw(choose_greedy(proposal, logits, shape), torch.zeros(1, 6), torch.zeros(1))
    path, at = [], -1
    while right := [node for node in children[at] if node < length and drafted[node] == best[at + 1]]:
        at = right[0]
        path.append(at)
    assert (verdict.length.item(), verdict.next_token.item()) == (len(path), best[at + 1])
    if verdict.path is not None:
        assert verdict.path[0, : len(path)].tolist() == path


def test_comparison_is_strict() -> None:
    """u in [0, 1): an accept probability of 0 never passes, of 1 always does."""
    p = torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]]], dtype=torch.float64)
    law = token_law(Proposal(torch.tensor([[0], [0]]), [1, 1]), p)
    uniform = torch.tensor([[1 - 2**-53], [0.0]], dtype=torch.float64)
    assert draw(law, uniform, torch.zeros(2, dtype=torch.float64)).length.tolist() == [1, 0]
