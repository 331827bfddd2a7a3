"""The confidence head: what it learns, what it must not change, and how it ends a chain."""

import pytest
import torch

from deepspec.drafts.confidence import ConfidenceHead
from deepspec.drafts.contract import StaticTree
from deepspec.drafts.eagle3 import Eagle3Options
from deepspec.drafts.registry import new_draft
from tests.drafts.conformance import Drawn, begun, decoding_logits
from tests.drafts.packed import batch_of
from tests.drafts.test_drafts_conform import IDS, ONE_EACH, make
from tests.models import tiny_target

TEXT = [5, 9, 30, 40, 7, 8, 11, 90, 14, 15]


class Scripted:
    """Draws the most probable token; `plan[step]` says which rows go on."""

    tree = None

    def __init__(self, plan: list[list[bool]]) -> None:
        self.plan, self.max_tokens, self.asked, self.drawn = plan, len(plan), [], 0

    def go_on(self, confidence):
        assert self.drawn == len(self.asked)  # asked before each draw
        self.asked.append(confidence)
        return torch.tensor(self.plan[len(self.asked) - 1])

    def draw(self, logits, parent, vocab=None):
        self.drawn += 1
        return (logits.argmax(-1) if vocab is None else vocab[logits.argmax(-1)]), None


def state_of(draft, target):
    state = None
    for text in (TEXT[:4], TEXT[:7]):
        state = draft.join(state, begun(draft, target, text, 2))
    return state


def test_the_head_is_a_product_and_starts_undecided() -> None:
    head, h, e = ConfidenceHead(3, 2), torch.randn(4, 3), torch.randn(4, 2)
    assert head(h, e).tolist() == [0.0] * 4
    torch.nn.init.normal_(head.proj.weight)
    w = head.proj.weight[0]
    torch.testing.assert_close(head(h, e), h @ w[:3] + e @ w[3:])


@pytest.mark.parametrize("variant", ONE_EACH)
def test_rows_stop_where_they_are_told(variant: str) -> None:
    target = tiny_target("llama")
    draft = make(target, variant, confidence=True)
    with torch.inference_mode():
        control = Scripted([[True, True], [False, True], [True, True], [True, False], [True, True]])
        state = state_of(draft, target)
        proposal = draft.propose(state, control)
        assert proposal.length == [1, 3]  # a row that stopped stays stopped
        assert (control.drawn, len(control.asked)) == (3, 4)
        assert proposal.tokens.shape == proposal.confidence.shape == (2, 3)
        torch.testing.assert_close(proposal.confidence, torch.stack(control.asked[:3], 1))
        assert (proposal.confidence > 0).all() and (proposal.confidence < 1).all()
        none = draft.propose(state_of(draft, target), Scripted([[False, False]] * 3))
        assert (none.length, none.tokens.shape) == ([0, 0], (2, 0))


@pytest.mark.parametrize("variant", [one for one in ONE_EACH if one != "dspark"])  # which learns from it
def test_what_the_head_learns_leaves_the_draft_as_it_was(variant: str) -> None:
    target = tiny_target("llama")
    draft = make(target, variant, confidence=True)
    batch = batch_of(target, draft, [TEXT], [2])
    loss = draft(batch)
    loss.sums["confidence"].backward()
    learnt = {name for name, p in draft.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert learnt == {"confidence_head.proj.weight"}
    assert draft.default_loss["confidence"] == 1.0
    assert "confidence" in draft.loss_parts
    without = make(target, variant)
    assert "confidence" not in without.loss_parts
    without.load_state_dict(
        {name: tensor for name, tensor in draft.state_dict().items() if not name.startswith("confidence")}
    )
    a, b = (decoding_logits(one, target, TEXT, 3, 3) for one in (draft, without))
    assert torch.equal(a, b)


def test_the_head_learns_the_chance_of_acceptance() -> None:
    """On one text, which the head can learn by heart: c becomes Σ min(p, q)."""
    target = tiny_target("llama")
    torch.manual_seed(0)
    draft = new_draft(Eagle3Options(ttt_steps=2, confidence=True), target, IDS).double()
    batch = batch_of(target, draft, [TEXT], [2])
    optimiser = torch.optim.Adam(draft.confidence_head.parameters(), lr=0.3)
    for _ in range(150):
        loss = draft(batch)
        (loss.sums["confidence"] / loss.weights["confidence"]).backward()
        optimiser.step()
        optimiser.zero_grad()
    goal = loss.overlap[loss.valid].double().clamp(1e-6, 1 - 1e-6)
    least = -(goal * goal.log() + (1 - goal) * (1 - goal).log()).mean()
    found = (loss.sums["confidence"] / loss.weights["confidence"]).item()
    assert least.item() <= found < least.item() + 0.02


@pytest.mark.parametrize("variant", ONE_EACH)
def test_siblings_in_a_tree_share_their_parents_confidence(variant: str) -> None:
    target = tiny_target("llama")
    draft = make(target, variant, confidence=True)
    with torch.inference_mode():
        chain = draft.propose(state_of(draft, target), Scripted([[True, True]] * 3))
        control = Drawn(StaticTree((-1, -1, 0, 2)), 3)
        tree = draft.propose(state_of(draft, target), control)
    assert torch.equal(tree.tokens[:, [0, 2, 3]], chain.tokens)  # the most probable children are the chain
    torch.testing.assert_close(tree.confidence[:, [0, 2, 3]], chain.confidence)
    assert torch.equal(tree.confidence[:, 0], tree.confidence[:, 1])
