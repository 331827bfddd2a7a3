"""EAGLE-3: alignment against a plain loop, training logits against decoding logits, saved against loaded."""

from pathlib import Path

import pytest
import torch

from deepspec.decoding import Engine, Request
from deepspec.drafts.eagle3 import Eagle3Draft, Eagle3Options, default_layers
from deepspec.drafts.registry import new_draft
from deepspec.drafts.unrolled import supervised, unrolled_attention
from deepspec.errors import UserError
from deepspec.target import Target
from deepspec.target.layout import document_mask
from deepspec.training.saved_draft import load_draft
from tests.drafts.conformance import decoding_logits
from tests.drafts.packed import batch_of
from tests.models import VOCAB, prompts, tiny_target

FAMILIES = ["llama", "qwen3", "gemma3", "deepseek_v3", "gpt_oss"]
IDS = torch.arange(0, VOCAB, 2)
VARIANTS = {
    "plain": {},
    "two layers": {"layers": 2},
    "3.1": {"norm_layers": True, "normalised_feedback": True},
}


def make(target: Target, seed: int = 0, reduced: bool = True, **options: object) -> Eagle3Draft:
    torch.manual_seed(seed)
    chosen = Eagle3Options(vocab_size=len(IDS) if reduced else None, ttt_steps=4, **options)
    return new_draft(chosen, target, IDS if reduced else None).double().eval()


def test_supervised_anchors_are_those_of_a_plain_loop() -> None:
    mask = [1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1, 1, 0, 0]
    docs = [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1]
    steps, length = 3, len(mask)
    found = supervised(torch.tensor([mask]).bool(), torch.tensor([docs]), steps)[0]
    for anchor in range(length):
        for k in range(1, steps + 1):
            needed = range(anchor, anchor + k + 1)
            features = anchor > 0 and docs[anchor - 1] == docs[anchor]
            inside = needed[-1] < length and all(docs[j] == docs[anchor] >= 0 and mask[j] for j in needed)
            assert bool(found[anchor, k - 1]) == (inside and features), (anchor, k)
    assert supervised(torch.ones(1, 2).bool(), torch.zeros(1, 2).long(), 4)[0, 1:].sum() == 0


def test_the_loss_is_the_formula_in_a_plain_loop() -> None:
    """Σ_s 0.8^s Σ_rows m·CE(p̃, q), with q from decoding and p from the target's plain forward."""
    target = tiny_target("llama")
    draft = make(target)
    text, start, steps = [*prompts(1, seed=14)[0], *range(3, 11)], 2, 4
    loss = draft(batch_of(target, draft, [text], [start]))
    with torch.no_grad():
        p = target.model(torch.tensor([text]), use_cache=False).logits[0].softmax(-1)
    total = weight = 0.0
    for anchor in range(start, len(text) - 1):
        count = min(steps, len(text) - 1 - anchor)
        q = decoding_logits(draft, target, text, anchor, count).log_softmax(-1)
        for k in range(1, count + 1):
            kept = p[anchor + k - 1][IDS]
            total += 0.8 ** (k - 1) * -float((kept * q[k - 1]).sum())
            weight += 0.8 ** (k - 1) * float(kept.sum())
    assert loss.sums["soft_ce"].item() == pytest.approx(total, rel=1e-5)
    assert loss.weights["soft_ce"].item() == pytest.approx(weight, rel=1e-5)


def test_saved_and_loaded_drafts_propose_the_same(tmp_path: Path) -> None:
    target, (prompt,) = tiny_target("qwen3"), prompts(1, seed=17)
    draft = make(target, norm_layers=True)
    draft.save_pretrained(tmp_path)
    names = {name for name, _ in draft.named_parameters()}
    assert not any("embed" in name for name in names)  # the target's embedding is never copied
    loaded = load_draft(tmp_path).double()
    assert torch.equal(loaded.target_ids, IDS)
    first, second = (Engine(target, d, k=4).generate([Request(prompt, 20)])[0] for d in (draft, loaded))
    assert [r.accepted for r in first.rounds] == [r.accepted for r in second.rounds]
    a, b = (decoding_logits(d, target, [*prompt, *range(3, 12)], len(prompt), 4) for d in (draft, loaded))
    assert torch.equal(a, b)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_warm_start_is_the_targets_last_layer(family: str) -> None:
    """With the token's half of the inputs silenced, the fresh draft computes what the target's layer does."""
    target = tiny_target(family)
    draft = make(target, start="target")
    assert not torch.equal(draft.norm.weight, torch.ones_like(draft.norm.weight))
    x = torch.randn(1, 5, 32, dtype=torch.float64)
    torch.testing.assert_close(draft.norm(x), target.norm(x), rtol=1e-5, atol=1e-5)
    if family != "llama":
        return  # other families' layers differ from the draft's in kind; what fits is copied
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(draft.layers[0].self_attn, name).weight[:, :32] = 0
        positions = torch.arange(5)[None]
        mask = document_mask(torch.zeros(1, 5), positions, torch.float64)
        rotary = draft.rotary(x, positions)
        layer = draft.layers[0]
        inputs = layer.read(x, torch.randn_like(x))
        mixed = unrolled_attention(
            layer.self_attn.queries(inputs, rotary), layer.self_attn.keys_values(inputs, rotary), [], mask
        )
        found = layer.finish(x, layer.self_attn.output(mixed))
        theirs = target.decoder.rotary_emb(x, positions)
        expected = target.layers[-1](
            x, attention_mask=mask, position_embeddings=theirs, position_ids=positions
        )
    torch.testing.assert_close(
        found, expected[0] if isinstance(expected, tuple) else expected, rtol=1e-5, atol=1e-5
    )


def test_a_damaged_draft_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        load_draft(tmp_path)
    draft = make(tiny_target("llama"))
    draft.save_pretrained(tmp_path)
    from safetensors.torch import load_file, save_file

    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("fc.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="missing_keys"):
        load_draft(tmp_path)


def test_a_truncated_or_unreadable_draft_is_named(tmp_path: Path) -> None:
    make(tiny_target("llama")).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(UserError, match="could not be loaded"):
        load_draft(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        load_draft(tmp_path)


@pytest.mark.parametrize(("count", "expected"), [(30, [1, 14, 26]), (4, [0, 1]), (2, [0]), (1, [0])])
def test_default_layers_are_clamped(count: int, expected: list[int]) -> None:
    assert default_layers(count) == (expected if count != 4 else sorted({1, 0}))
