"""Sampled text of a real transformer, on every proposal shape and rule, against exact probabilities.

The same test must find every classic way to get it wrong. Seeds are fixed, so that nothing here is flaky.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from deepspec.decoding import Engine, Sampling, acceptance, batch, control
from deepspec.decoding.acceptance.trees import FixedChildrenLaw
from deepspec.drafts.contract import DynamicTree, Proposal, StaticTree
from deepspec.drafts.eagle3 import Eagle3Options
from deepspec.drafts.registry import new_draft
from tests.decoding import four_words
from tests.decoding.fakes import TableDraft

RUNS = 3000
SAMPLING = Sampling(0.9)
STATIC = {"tree": StaticTree((-1, -1, 0, -1, 1, 0, 2))}
WAYS = {
    "token": {"rule": "token"},
    "block": {"rule": "block"},
    "deterministic children": STATIC,
    "sampled children": {**STATIC, "children": "sampled"},
    "dynamic": {"tree": DynamicTree(2, 2, 6)},
    "eagle3, chains": {},
    "eagle3, sampled children": {**STATIC, "children": "sampled"},
    "eagle3, dynamic": {"tree": DynamicTree(2, 2, 6)},
}
ALPHA = 1e-3 / (5 * (len(WAYS) + 2))  # of one test; all of the honest ones together: 1e-3


def eagle3():
    torch.manual_seed(5)
    draft = new_draft(Eagle3Options(vocab_size=None, capture_layers=[0]), four_words.target(), None).double()
    with torch.no_grad():
        draft.lm_head.weight.mul_(3)
    return draft.eval()


def smallest(
    way: str, sampling: Sampling = SAMPLING, ragged: bool = True, runs: int = RUNS, length: int = 4
) -> float:
    """The smallest p-value of `runs` texts decoded that way."""
    draft = eagle3() if way.startswith("eagle3") else TableDraft(four_words.table(), ragged)
    engine = Engine(four_words.target(), draft, k=3, max_batch_size=128, **WAYS[way])
    return min(four_words.p_values(engine, sampling, runs, length))


@pytest.mark.parametrize("way", WAYS)
def test_sampled_text_has_the_targets_distribution(way: str) -> None:
    assert smallest(way) > ALPHA


@pytest.mark.parametrize("way", ["block", "sampled children"])
def test_a_penalty_counts_each_nodes_own_path(way: str) -> None:
    assert smallest(way, replace(SAMPLING, repetition_penalty=1.8)) > ALPHA


def caught(way: str, runs: int = 2000, length: int = 4) -> bool:
    return smallest(way, ragged=False, runs=runs, length=length) < ALPHA


def test_a_draw_from_a_rounded_softmax_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded to two bits, so that a few thousand texts show it."""
    honest = control.draw
    monkeypatch.setattr(control, "draw", lambda q, u: honest((q * 4).round() / 4, u))
    assert caught("token")


@pytest.mark.parametrize("rounded", [False, True])
def test_a_draw_from_a_bfloat16_softmax_is_caught_by_the_rule_alone(rounded: bool) -> None:
    """What a real one is off by takes millions of verdicts, and no model."""
    runs = 1 << 21
    q = torch.tensor([[0.5019, 0.2, 0.2981]], dtype=torch.float64)
    p = torch.tensor([[[0.49, 0.3, 0.21], [0.2, 0.3, 0.5]]], dtype=torch.float64)
    u = torch.rand(3, runs, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    drawn_from = q.bfloat16().double() if rounded else q
    tokens = control.draw(drawn_from.expand(runs, 3), u[0])[:, None]
    proposal = Proposal(tokens, [1] * runs, q=q[:, None].expand(runs, 1, 3))
    law = acceptance.choose_sampled("auto", proposal, p.expand(runs, 2, 3), None)
    verdict = acceptance.draw(law, u[1][:, None], u[2])
    first = torch.where(verdict.length == 1, tokens[:, 0], verdict.next_token)
    counts = {(token,): int((first == token).sum()) for token in range(3)}
    expected = {(token,): float(p[0, 0, token]) for token in range(3)}
    assert (four_words.p_value(counts, expected) < 1e-3) == rounded


def test_a_rejected_child_that_may_come_again_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.arange
    monkeypatch.setattr(FixedChildrenLaw, "next_distribution", lambda self, at: self.p[rows(len(at)), at])
    assert caught("deterministic children")


def _q_of_drawn(proposal, rows):
    q = proposal.q.gather(1, rows[..., None].expand(-1, -1, proposal.q.shape[-1]))
    return q.gather(2, proposal.tokens[..., None])[..., 0]


def test_a_threshold_on_the_drawn_tokens_own_q_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = acceptance.token_law

    def leaky(proposal, p):
        law = honest(proposal, p)
        rows = torch.arange(proposal.tokens.shape[1]).expand_as(proposal.tokens)
        law.accept = torch.where(_q_of_drawn(proposal, rows) >= 0.3, law.accept, 0.0)
        return law

    monkeypatch.setattr(acceptance, "token_law", leaky)
    assert caught("token")


def test_sampled_children_pruned_by_confidence_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = acceptance.tree_law

    def pruned(proposal, p, shape):
        sure = _q_of_drawn(proposal, proposal.q_row) >= 0.3
        whole = (sure[:, None, :] | ~shape.ancestors).all(-1)
        elder = shape.elder & sure[:, None, :]
        return honest(proposal, p, replace(shape, inside=shape.inside & whole, elder=elder))

    monkeypatch.setattr(acceptance, "tree_law", pruned)
    assert caught("sampled children")


def test_draws_that_come_again_in_the_next_round_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keyed by a token's own position they do, and block verification has learnt something about them."""
    honest = batch.uniforms

    def by_position(seeds, positions, purpose, count=1, index=0):
        places = range(index, index + count)
        return np.concatenate([honest(seeds, [at + i for at in positions], purpose) for i in places], 1)

    for module in (batch, control):
        monkeypatch.setattr(module, "uniforms", by_position)
    assert caught("block", runs=6000, length=6)
