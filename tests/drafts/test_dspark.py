"""DSpark: the sequential heads and the loss against their formulas, a start from DFlash."""

import math
from pathlib import Path

import pytest
import torch

from deepspec.drafts.options import DFlashOptions, DSparkOptions
from deepspec.drafts.registry import new_draft
from deepspec.errors import UserError
from deepspec.training.saved_draft import start_from
from tests.drafts.conformance import decoded, decoding_logits
from tests.drafts.packed import batch_of
from tests.drafts.plain import every_step, total
from tests.drafts.test_drafts_conform import IDS, STEPS, make
from tests.models import VOCAB, prompts, tiny_target

RANK = 6


@pytest.mark.parametrize("variant", ["dspark", "dspark, rnn"])
def test_the_bias_and_the_confidence_are_the_formulas(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama")
    draft = make(target, variant, confidence=True)
    hidden: list[torch.Tensor] = []
    follow = type(draft).follow

    def spy(self, target, h, previous, memory):
        hidden.append(h[0, 0].clone())
        return follow(self, target, h, previous, memory)

    monkeypatch.setattr(type(draft), "follow", spy)
    text, anchor = [*prompts(1, seed=5)[0], *range(3, 14)], 4
    forced = decoded(draft, target, text, anchor, STEPS)
    weights = {name: value.detach() for name, value in draft.markov_head.named_parameters()}
    assert weights["markov_w1.weight"].shape == (VOCAB, RANK)  # of every token
    assert weights["markov_w2.weight"].shape == (len(IDS), RANK)  # of the draft's own
    w = draft.confidence_head.proj.weight.detach()[0]
    state = torch.zeros(RANK, dtype=torch.float64)
    for k in range(STEPS):
        row = latent = weights["markov_w1.weight"][text[anchor + k]]
        if variant == "dspark, rnn":
            z = torch.cat([state, row, hidden[k]])
            wz = weights["joint_proj.weight"] @ z + weights["joint_proj.bias"]
            gate, candidate, output = wz[:RANK], wz[RANK : 2 * RANK], wz[2 * RANK :]
            keep = 1 / (1 + torch.exp(-gate))
            state, latent = keep * state + (1 - keep) * torch.tanh(candidate), torch.tanh(output)
        expected = target.head(hidden[k][None])[0, IDS] + weights["markov_w2.weight"] @ latent
        torch.testing.assert_close(forced.logits[k], expected)
        sure = 1 / (1 + math.exp(-float(w @ torch.cat([hidden[k], row]))))
        assert float(forced.confidence[k]) == pytest.approx(sure)


def test_the_loss_is_the_formula_in_a_plain_loop() -> None:
    """0.1·CE + 0.9·‖q − p‖₁ + BCE(c, 1 − ½‖q − p‖₁), each weighted by exp(−(k−1)/γ)."""
    target = tiny_target("llama")
    draft = make(target, "dspark", gamma=3.0, confidence=True)
    text, start = [*prompts(1, seed=14)[0], *range(3, 11)], 2
    with torch.no_grad():
        loss = draft(batch_of(target, draft, [text], [start]))
    ce = ce_weight = distance = bce = weight = 0.0
    for k, log_q, p, label, confidence in every_step(draft, target, text, start, STEPS):
        w, apart = math.exp(-(k - 1) / 3.0), float((log_q.exp() - p).abs().sum())
        goal = 1 - apart / 2
        distance += w * apart
        bce -= w * (goal * math.log(confidence) + (1 - goal) * math.log(1 - confidence))
        weight += w
        if label % 2 == 0:
            ce -= w * float(log_q[label])
            ce_weight += w
    expected = 0.1 * ce / ce_weight + 0.9 * distance / weight + bce / weight
    assert float(total(draft, loss)) == pytest.approx(expected, rel=1e-5)


def fresh(options, seed: int = 0):
    torch.manual_seed(seed)
    return new_draft(options, tiny_target("llama"), None)


def test_a_dflash_draft_starts_one(tmp_path: Path) -> None:
    """All of the backbone is taken over; the new head adds nothing at first, so that only the slots differ."""
    saved = fresh(DFlashOptions(layers=1, block_tokens=STEPS, gamma=2.0))
    saved.save_pretrained(tmp_path)
    draft = fresh(DSparkOptions(layers=1, block_tokens=STEPS, rank=RANK), seed=5)
    start_from(draft, tmp_path)
    found = draft.state_dict()
    for name, tensor in saved.state_dict().items():
        assert torch.equal(found.pop(name), tensor), name
    assert {name.partition(".")[0] for name in found} == {"markov_head", "confidence_head"}
    assert not draft.markov_head.markov_w2.weight.any()
    draft = draft.double()
    text = [*prompts(1, seed=4)[0], *range(3, 12)]
    before = decoding_logits(draft, tiny_target("llama"), text, 5, STEPS)
    with torch.no_grad():
        draft.markov_head.markov_w1.weight.add_(1.0)
    assert torch.equal(before, decoding_logits(draft, tiny_target("llama"), text, 5, STEPS))


def test_a_dflash_draft_of_another_block_is_refused(tmp_path: Path) -> None:
    fresh(DFlashOptions(layers=1, block_tokens=STEPS + 1)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="block_tokens is 5, here 4"):
        start_from(fresh(DSparkOptions(layers=1, block_tokens=STEPS, rank=RANK)), tmp_path)


def test_a_confidence_head_that_sees_other_things_is_refused(tmp_path: Path) -> None:
    fresh(DFlashOptions(layers=1, block_tokens=STEPS, confidence=True)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"other shapes .*confidence_head"):
        start_from(fresh(DSparkOptions(layers=1, block_tokens=STEPS, rank=RANK)), tmp_path)


def test_wrong_options_are_named() -> None:
    with pytest.raises(UserError, match=r"draft\.sequential"):
        make(tiny_target("llama"), "dspark", sequential="gated")
