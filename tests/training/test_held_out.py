"""The evaluation during training, against drafting token by token with the fake draft."""

import json

import pytest
import torch

from deepspec.drafts.contract import DraftBatch, DraftContext
from deepspec.training.batches import Plan, windows
from deepspec.training.held_out import HeldOut, evaluate_held_out
from deepspec.training.sources import Online, draft_batch
from tests.training.fakes import FakeConfig, FakeDraft, FakeTarget, V, rows
from tests.training.worker import accelerator_for_tests

COEFFICIENTS = {"ce": 1.0, "hidden": 0.5}
K = 4


def evaluate(draft: FakeDraft, how: HeldOut) -> dict[str, object]:
    accelerator = accelerator_for_tests()
    model = accelerator.prepare(draft)
    return evaluate_held_out(
        model,
        rows(9, seed=4),
        how,
        source=Online(FakeTarget(torch.float64), [0, 2]),
        coefficients=COEFFICIENTS,
        accelerator=accelerator,
    )


def half_trained_draft() -> FakeDraft:
    """Right now and then."""
    torch.manual_seed(3)
    draft, target = FakeDraft(FakeConfig(dropout=0.1)).double(), FakeTarget(torch.float64)
    optimiser = torch.optim.Adam(draft.parameters(), lr=0.03)
    ((rows_together,),) = windows(rows(6, seed=7), Plan(6, 6), 0, seed=0)
    batch = draft_batch(rows_together, Online(target, [0, 2]))
    for _ in range(40):
        loss = draft(batch)
        (loss.sums["ce"] / loss.weights["ce"]).backward()
        optimiser.step()
        optimiser.zero_grad()
    return draft


@torch.no_grad()
def drafted(draft: FakeDraft, target: FakeTarget, text: list[int], pending: int) -> list[int]:
    """K greedy tokens after text[: pending + 1], each seeing the draft's own ones before it."""
    tokens = torch.tensor([text[: pending + 1]])
    places = torch.arange(pending + 1)[None]
    seen = target.capture(tokens, places, torch.zeros_like(tokens), [0, 2])
    state = torch.tanh(draft.fc(seen.features[0, pending - 1]))
    made: list[int] = []
    for _ in range(K):
        token = made[-1] if made else text[pending]
        state = torch.tanh(state + draft.token(target.embed(torch.tensor(token))))
        made.append(int(draft.lm_head(state).argmax()))
    return made


def engine(draft: FakeDraft) -> tuple[int, int]:
    """Rounds and tokens committed over all answers of the rows."""
    target = FakeTarget(torch.float64)
    rounds = committed = 0
    for row in rows(9, seed=4):
        for document in sorted(set(row["documents"])):
            own = [i for i, d in enumerate(row["documents"]) if d == document]
            text, mask = ([row[name][i] for i in own] for name in ("tokens", "loss_mask"))
            if 1 not in mask:
                continue
            pending = mask.index(1)
            while pending < len(text) - 1:
                accepted = 0
                left = text[pending + 1 :]
                for token, truth in zip(drafted(draft, target, text, pending), left, strict=False):
                    if token != truth:
                        break
                    accepted += 1
                kept = min(accepted + 1, len(left))
                rounds, committed, pending = rounds + 1, committed + kept, pending + kept
    return rounds, committed


def test_tau_is_that_of_decoding_round_by_round() -> None:
    draft = half_trained_draft()
    found = evaluate(draft, HeldOut(rows=9, steps=K, temperature=0.0, seed=0, batch_size=2))
    rounds, committed = engine(draft.eval())
    assert committed > rounds  # some drafts were accepted
    assert (found["rounds"], found["committed"]) == (rounds, committed)
    assert found["tau"] == pytest.approx(committed / rounds)


def test_evaluation_leaves_training_as_it_was() -> None:
    draft = half_trained_draft().train()
    state = torch.get_rng_state()
    how = HeldOut(rows=9, steps=K, temperature=1.0, seed=0, batch_size=2)
    first = evaluate(draft, how)
    assert torch.equal(torch.get_rng_state(), state)
    assert draft.training
    assert all(one.grad is None for one in draft.parameters())
    assert evaluate(draft, HeldOut(9, K, 1.0, 0, batch_size=5)) == {**first, **_close(first)}


def _close(record: dict[str, object]) -> dict[str, object]:
    return {key: _approx(value) for key, value in record.items()}


def _approx(value: object) -> object:
    return pytest.approx(value) if isinstance(value, float | list | dict) else value


def test_sampled_walk_accepts_with_q_over_p() -> None:
    """With q = p every drafted token passes, whatever the uniforms."""

    class Perfect(FakeDraft):
        def forward(self, batch: DraftBatch) -> object:
            loss = super().forward(batch)
            loss.q_text = loss.p_text
            return loss

    draft = Perfect(FakeConfig()).double()
    found = evaluate(draft, HeldOut(rows=9, steps=K, temperature=1.0, seed=0, batch_size=3))
    assert set(found["acceptance"]) == {1.0}  # type: ignore[call-overload]


@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_no_tau_is_told_of_text_of_another_temperature(temperature: float) -> None:
    draft = half_trained_draft()
    found = evaluate(draft, HeldOut(rows=9, steps=K, temperature=temperature, seed=0, batch_size=3))
    greedy = evaluate(draft, HeldOut(rows=9, steps=K, temperature=0.0, seed=0, batch_size=3))
    assert greedy["tau"] is not None and "tau_reason" not in greedy
    assert found["tau"] is None and f"temperature {temperature}" in str(found["tau_reason"])
    assert found["acceptance"] == [None] * K and found["rounds"] == 0
    assert found["held_out_loss"] == greedy["held_out_loss"]
    json.dumps(found, allow_nan=False)


def test_rows_are_spread_over_all() -> None:
    seen: list[list[int]] = []

    class Watching(FakeDraft):
        def forward(self, batch: DraftBatch) -> object:
            seen.extend(batch.tokens.tolist())
            return super().forward(batch)

    found = evaluate(Watching(FakeConfig()).double(), HeldOut(3, K, 0.0, 0, batch_size=1))
    assert seen == [rows(9, seed=4)[index]["tokens"] for index in (0, 3, 6)]
    assert found["held_out_rows"] == 3


def test_fake_statistics_are_what_the_contract_says() -> None:
    """The fake's `p_text` at (a, k) is the target's probability of t_{a+k}: these tests stand on it."""
    target, row = FakeTarget(torch.float64), rows(9, seed=4)[1]
    columns = {name: torch.tensor([row[name]]) for name in row}
    seen = target.capture(columns["tokens"], columns["positions"], columns["documents"], [0, 2])
    loss = FakeDraft(FakeConfig()).double()(
        DraftBatch(
            DraftContext(target),
            columns["tokens"],
            columns["loss_mask"].bool(),
            columns["documents"],
            columns["positions"],
            seen.features,
            seen.last_hidden,
        )
    )
    p = target.logits(seen.last_hidden[0]).softmax(-1)
    checked = 0
    for a, k in loss.valid[0].nonzero().tolist():
        token = row["tokens"][a + k + 1]
        assert loss.p_text[0, a, k].item() == pytest.approx(p[a + k, token].item())
        assert row["documents"][a] == row["documents"][a + k + 1]
        assert all(row["loss_mask"][a : a + k + 2])
        checked += 1
    assert checked > 10
    assert p.shape[-1] == V
