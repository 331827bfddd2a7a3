"""DFlash: the block's attention and its pieces, which anchors are trained, the loss, the mask."""

import math

import pytest
import torch

from deepspec.drafts import block
from deepspec.drafts.block import block_attention, drawn_anchors
from deepspec.drafts.walk import walk
from deepspec.errors import UserError
from tests.drafts.conformance import check_training_is_decoding, decoding_logits, training_logits
from tests.drafts.packed import batch_of
from tests.drafts.plain import every_step, total
from tests.drafts.test_drafts_conform import STEPS, make
from tests.models import VOCAB, prompts, tiny_target


def texts() -> list[list[int]]:
    return [[*text, *range(3, 15)] for text in prompts(2, seed=12, longest=20)]


def test_the_loss_is_the_formula_in_a_plain_loop() -> None:
    """Σ_k exp(−(k−1)/γ) · CE of the text's token, over the labels that the draft's vocabulary has."""
    target = tiny_target("llama")
    draft = make(target, "dflash", gamma=3.0)
    text, start = [*prompts(1, seed=14)[0], *range(3, 11)], 2
    with torch.no_grad():
        loss = draft(batch_of(target, draft, [text], [start]))
    found = weight = 0.0
    for k, log_q, _, label, _ in every_step(draft, target, text, start, STEPS):
        if label % 2 == 0:  # of the reduced vocabulary
            found -= math.exp(-(k - 1) / 3.0) * float(log_q[label])
            weight += math.exp(-(k - 1) / 3.0)
    assert float(loss.sums["ce"]) == pytest.approx(found, rel=1e-5)
    assert float(loss.weights["ce"]) == pytest.approx(weight, rel=1e-5)


def test_a_shorter_draft_is_the_beginning_of_the_block() -> None:
    target = tiny_target("llama")
    draft = make(target, "dflash")
    text = [*prompts(1, seed=3)[0], *range(3, 12)]
    long, short = (decoding_logits(draft, target, text, 5, steps) for steps in (4, 2))
    torch.testing.assert_close(long[:2], short)


@pytest.mark.parametrize("variant", ["dflash", "dspark", "medusa"])
def test_steps_past_the_slots_are_never_drafted(variant: str) -> None:
    """More steps asked for than there are slots: the walk is that of the slots there are."""
    target = tiny_target("llama")
    draft = make(target, variant)
    walks = []
    for steps in (STEPS, STEPS + 3):
        batch = batch_of(target, draft, texts(), [2, 3], steps)
        with torch.no_grad():
            loss = draft(batch)
        assert loss.valid.shape[-1] == steps
        assert not loss.valid[..., STEPS:].any()
        walks.append(walk(loss.hits, loss.valid, batch.loss_mask, batch.documents))
    short, long = walks
    assert (short.rounds, short.committed, short.cut) == (long.rounds, long.committed, long.cut)
    assert (*short.verified, 0, 0, 0) == long.verified
    text = texts()[0]
    assert len(decoding_logits(draft, target, text, 5, STEPS + 3)) == STEPS


def test_anchors_are_drawn_from_supervised_text_by_seed_and_position_alone() -> None:
    candidates = torch.rand(3, 40, generator=torch.Generator().manual_seed(0)) < 0.5
    candidates[2, 5:] = False
    seeds = torch.tensor([11, 12, 13])
    drawn = drawn_anchors(candidates, 8, seeds)
    assert not (drawn & ~candidates).any()
    assert drawn.sum(1).tolist() == [8, 8, int(candidates[2].sum())]
    alone = drawn_anchors(candidates[1:2], 8, seeds[1:2])
    assert torch.equal(alone[0], drawn[1])
    padded = torch.nn.functional.pad(candidates, (0, 7))
    assert torch.equal(drawn_anchors(padded, 8, seeds)[:, :40], drawn)
    assert not torch.equal(drawn_anchors(candidates, 8, seeds + 1), drawn)
    often = sum(drawn_anchors(torch.ones(1, 40).bool(), 8, torch.tensor([s])).long() for s in range(600))
    spread = 5 * (600 * 0.2 * 0.8) ** 0.5  # five standard deviations: every position is as likely
    assert (often - 600 * 0.2).abs().max() < spread


def test_training_takes_some_anchors_and_evaluation_all(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama")
    draft = make(target, "dflash", anchors=5)
    batch = batch_of(target, draft, texts(), [2, 3])
    batch.seeds = torch.tensor([7])
    every, of_all = training_logits(draft, batch, monkeypatch)
    draft.train()
    some, of_some = training_logits(draft, batch, monkeypatch)
    assert int(some.valid[..., 0].sum()) == 5 < int(every.valid[..., 0].sum())
    assert not (some.valid & ~every.valid).any()
    for step in range(STEPS):
        kept = some.valid[..., step][every.valid[..., step]]
        torch.testing.assert_close(of_some[step], of_all[step][kept])


def test_blocks_in_pieces_are_the_same_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama")
    draft = make(target, "dflash")
    batch = batch_of(target, draft, [[*range(3, 25)]], [2])

    def gradient() -> tuple[torch.Tensor, list[torch.Tensor]]:
        draft.zero_grad()
        loss = total(draft, draft(batch))
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in draft.parameters() if p.grad is not None]

    whole = gradient()
    monkeypatch.setattr(block, "BLOCKS_AT_ONCE", 3)
    torch.testing.assert_close(gradient(), whole)
    assert len(whole[1]) == len(list(draft.parameters()))


def test_block_attention_is_attention_under_the_whole_mask() -> None:
    torch.manual_seed(1)
    rows, blocks, size, length, d = 2, 3, 4, 7, 8
    seen = torch.rand(rows, blocks, length) < 0.5
    seen[0, 0] = False  # an anchor without context
    query = torch.randn(rows, 4, blocks * size, d, dtype=torch.float64)
    context, own = (
        tuple(torch.randn(rows, 2, n, d, dtype=torch.float64) for _ in range(2))
        for n in (length, blocks * size)
    )
    mask = torch.zeros(rows, blocks * size, length + blocks * size, dtype=torch.bool)
    for q in range(blocks * size):
        mask[:, q, :length] = seen[:, q // size]
        for key in range(blocks * size):
            mask[:, q, length + key] = q // size == key // size
    keys, values = (torch.cat(pair, 2).repeat_interleave(2, 1) for pair in zip(context, own, strict=True))
    expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask[:, None])
    torch.testing.assert_close(block_attention(query, context, own, seen), expected)


@pytest.mark.parametrize("variant", ["dflash", "peagle"])
def test_a_mask_can_be_a_row_that_no_text_uses(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama")
    draft = make(target, variant, mask_token=1)
    assert "mask.embedding" not in draft.state_dict()
    check_training_is_decoding(draft, target, texts(), [2, 3], STEPS, monkeypatch)
    with pytest.raises(UserError, match=r"mask_token is 1, and that token occurs"):
        draft(batch_of(target, draft, [[5, 6, 1, 7]], [1]))
    with pytest.raises(UserError, match=rf"ids 0 to {VOCAB - 1}"):
        make(target, variant, mask_token=VOCAB)


def test_the_targets_embedding_and_head_stay_the_targets() -> None:
    draft = make(tiny_target("llama"), "dflash")
    assert {name for name in draft.state_dict() if "embed" in name or "head" in name} == {"mask.embedding"}


@pytest.mark.parametrize(
    ("options", "words"), [({"head": "shared"}, r"draft\.head"), ({"step_weights": "no"}, "step_weights")]
)
def test_wrong_options_are_named(options: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make(tiny_target("llama"), "dflash", **options)
