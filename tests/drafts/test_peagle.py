"""P-EAGLE: its rows and their weights in training, the loss, depth 0 as EAGLE-3's first step."""

from pathlib import Path

import pytest
import torch

from deepspec.drafts.options import PEagleOptions
from deepspec.drafts.peagle import kept_depths
from deepspec.drafts.registry import new_draft
from deepspec.errors import UserError
from deepspec.training.saved_draft import start_from
from tests.drafts.conformance import decoding_logits, training_logits
from tests.drafts.packed import batch_of
from tests.drafts.plain import every_step
from tests.drafts.test_drafts_conform import IDS, STEPS, make
from tests.models import prompts, tiny_target


def test_depth_0_is_eagle_3s_first_step_which_can_start_it(tmp_path: Path) -> None:
    target = tiny_target("llama")
    eagle = make(target, "eagle3").float()
    eagle.save_pretrained(tmp_path)
    torch.manual_seed(3)
    draft = new_draft(PEagleOptions(ttt_steps=STEPS), target, IDS)
    start_from(draft, tmp_path)
    text = [*prompts(1, seed=6)[0], *range(3, 14)]
    mine, theirs = (decoding_logits(each.double(), target, text, 5, 2) for each in (draft, eagle))
    torch.testing.assert_close(mine[0], theirs[0])
    assert not torch.allclose(mine[1], theirs[1])


def test_the_loss_is_the_formula_in_a_plain_loop() -> None:
    """Σ_d 0.8^d Σ_rows m·CE(p̃, q), with q from decoding and p from the target's plain forward."""
    target = tiny_target("llama")
    draft = make(target, "peagle")
    text, start = [*prompts(1, seed=14)[0], *range(3, 11)], 2
    with torch.no_grad():
        loss = draft(batch_of(target, draft, [text], [start]))
    total = weight = 0.0
    for k, log_q, p, _, _ in every_step(draft, target, text, start, STEPS):
        total -= 0.8 ** (k - 1) * float((p[IDS] * log_q[IDS]).sum())
        weight += 0.8 ** (k - 1) * float(p[IDS].sum())
    assert float(loss.sums["soft_ce"]) == pytest.approx(total, rel=1e-5)
    assert float(loss.weights["soft_ce"]) == pytest.approx(weight, rel=1e-5)


def test_depths_kept_are_nested_and_as_many_as_the_ratio_says() -> None:
    like = torch.ones(2, 4000, STEPS)
    kept = kept_depths(like, 0.7, torch.tensor([3, 4]))
    assert kept[..., 0].all()
    assert not (kept[..., 1:] & ~kept[..., :-1]).any()
    for depth in range(1, STEPS):  # five standard deviations of a binomial share
        share = 0.7**depth
        spread = 5 * (share * (1 - share) / 8000) ** 0.5
        assert abs(float(kept[..., depth].double().mean()) - share) <= spread
    assert torch.equal(kept_depths(like[1:], 0.7, torch.tensor([4]))[0], kept[1])


def test_rows_kept_in_training_say_what_all_rows_say(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama")
    draft = make(target, "peagle, two layers")
    texts = [[*text, *range(3, 15)] for text in prompts(3, seed=12, longest=20)]
    batch = batch_of(target, draft, texts, [2, 3, 1])
    batch.seeds = torch.tensor([5])
    every, of_all = training_logits(draft, batch, monkeypatch)
    draft.train()
    some, of_some = training_logits(draft, batch, monkeypatch)
    counts = [int(some.valid[..., step].sum()) for step in range(STEPS)]
    assert counts == sorted(counts, reverse=True)
    assert 0 < counts[-1] < int(every.valid[..., -1].sum())
    for step in range(STEPS):
        kept = some.valid[..., step][every.valid[..., step]]
        torch.testing.assert_close(of_some[step], of_all[step][kept])


def test_training_on_some_rows_has_the_loss_of_all_on_average() -> None:
    target = tiny_target("llama")
    draft = make(target, "peagle")
    batch = batch_of(target, draft, [[*range(3, 60)]], [1])
    with torch.no_grad():
        whole = draft(batch).sums["soft_ce"]
        draft.train()
        found = []
        for seed in range(40):
            batch.seeds = torch.tensor([seed])
            found.append(float(draft(batch).sums["soft_ce"]))
    mean, error = torch.tensor(found).mean(), torch.tensor(found).std() / len(found) ** 0.5
    assert abs(mean - whole) < 4 * error
    assert error < 0.02 * whole


def test_feedback_is_no_option_here() -> None:
    with pytest.raises(UserError, match="feeds nothing back"):
        make(tiny_target("llama"), "peagle", normalised_feedback=True)
