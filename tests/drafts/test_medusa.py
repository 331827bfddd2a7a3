"""Medusa: alignment and loss against a plain loop, the start, trees no deeper than the heads."""

import pytest
import torch

from deepspec.drafts.contract import DynamicTree, StaticTree
from deepspec.drafts.options import MedusaOptions
from deepspec.drafts.registry import new_draft
from deepspec.errors import UserError
from tests.drafts.conformance import Drawn, begun, decoding_logits
from tests.drafts.packed import batch_of
from tests.drafts.test_drafts_conform import STEPS, make
from tests.models import prompts, tiny_target

TEXT = [5, 9, 30, 40, 7, 8, 11, 90, 14, 15]


def test_the_loss_is_the_formula_in_a_plain_loop() -> None:
    """Σ_k 0.8^(k−1) · CE of the text's token, f + SiLU(W f + b) on the target's normed last hidden."""
    target = tiny_target("llama")
    draft = make(target, "medusa", reduced=False)
    text, start = [*prompts(1, seed=14)[0], *range(3, 11)], 2
    batch = batch_of(target, draft, [text], [start])
    total = weight = 0.0
    with torch.no_grad():
        loss = draft(batch)
        normed = target.norm(batch.last_hidden[0])
        for anchor in range(start, len(text) - 1):
            for k in range(1, min(STEPS, len(text) - 1 - anchor) + 1):
                head, f = draft.heads[k - 1], normed[anchor - 1]
                inner = head.linear.weight @ f + head.linear.bias
                q = (head.lm_head.weight @ (f + inner / (1 + torch.exp(-inner)))).softmax(-1)
                total -= 0.8 ** (k - 1) * float(q[text[anchor + k]].log())
                weight += 0.8 ** (k - 1)
    assert float(loss.sums["ce"]) == pytest.approx(total, rel=1e-5)
    assert float(loss.weights["ce"]) == pytest.approx(weight, rel=1e-5)


@pytest.mark.parametrize("head", ["trained", "frozen"])
def test_every_head_starts_as_the_targets(head: str) -> None:
    target = tiny_target("llama")
    draft = new_draft(MedusaOptions(heads=STEPS, head=head, vocab_size=None), target, None).double()
    with torch.no_grad():
        plain = target.model(torch.tensor([TEXT]), use_cache=False).logits[0]
    for logits in decoding_logits(draft, target, TEXT, 5, STEPS):
        torch.testing.assert_close(logits, plain[4], rtol=1e-5, atol=1e-5)


def test_a_tree_deeper_than_the_heads_is_refused() -> None:
    target = tiny_target("llama")
    draft = make(target, "medusa")
    with pytest.raises(UserError, match="5 tokens deep, and this draft sees 4 ahead"):
        draft.propose(begun(draft, target, TEXT), Drawn(StaticTree((-1, 0, 1, 2, 3)), 9))


def test_a_dynamic_tree_ends_with_the_heads() -> None:
    target = tiny_target("llama")
    draft = make(target, "medusa")
    with torch.inference_mode():
        proposal = draft.propose(begun(draft, target, TEXT), Drawn(DynamicTree(9, 2, 99), 10))
    depths: list[int] = []
    for parent in proposal.parents[0].tolist():
        depths.append(1 if parent < 0 else depths[parent] + 1)
    assert max(depths) == STEPS
    assert len(depths) == 2 + 4 * (STEPS - 1)
