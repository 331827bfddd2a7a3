"""The standalone draft: where it comes from, and its loss against plain forwards."""

import copy
from pathlib import Path

import pytest
import torch

from deepspec.drafts.registry import new_draft
from deepspec.drafts.standalone import StandaloneOptions
from deepspec.errors import UserError
from deepspec.target import Target
from tests.drafts.packed import batch_of
from tests.models import VOCAB, tiny_model, tiny_target

IDS = torch.arange(0, VOCAB, 2)
FAMILIES = ["llama", "qwen3", "gemma3", "deepseek_v3", "gpt_oss"]
TEXT = [5, 9, 30, 40, 7, 8, 11, 90, 14, 15, 60, 61]


def make(target: Target, ids: torch.Tensor | None = None, **options: object):
    torch.manual_seed(0)
    draft = new_draft(StandaloneOptions(**options), target, ids).double().eval()
    draft.model.config._experts_implementation = "eager"  # the grouped kernel has no float64
    return draft


def logits_of(model, text: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([text]), use_cache=False).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_all_of_the_targets_layers_are_the_target(family: str) -> None:
    target = tiny_target(family)
    draft = make(target, layers=9)
    assert draft.model.config.num_hidden_layers == target.num_layers
    torch.testing.assert_close(
        logits_of(draft.model, TEXT), logits_of(target.model, TEXT), rtol=1e-4, atol=1e-4
    )
    assert draft.needs_features is False
    assert draft.capture_layers == []


@pytest.mark.parametrize("family", FAMILIES)
def test_fewer_layers_are_the_targets_first(family: str) -> None:
    target = tiny_target(family)
    draft = make(target, layers=2)
    short = copy.deepcopy(target.model)
    decoder = short.get_decoder()
    decoder.layers = decoder.layers[:2]
    short.config.num_hidden_layers = decoder.config.num_hidden_layers = 2
    torch.testing.assert_close(logits_of(draft.model, TEXT), logits_of(short, TEXT), rtol=1e-4, atol=1e-4)
    for parameter in draft.parameters():
        assert parameter.requires_grad


@pytest.mark.parametrize("family", FAMILIES)
def test_a_narrower_one_of_the_family_learns(family: str) -> None:
    target = tiny_target(family)
    draft = make(target, layers=1, start="random", hidden_size=16)
    settings = draft.model.config
    assert (settings.hidden_size, settings.num_hidden_layers) == (16, 1)
    assert settings.num_attention_heads == target.config.num_attention_heads // 2
    assert settings.intermediate_size == target.config.intermediate_size // 2
    loss = draft(batch_of(target, draft, [TEXT], [2]))
    loss.sums["soft_ce"].backward()
    assert all(p.grad is not None for name, p in draft.named_parameters() if "layers.0.self_attn" in name)


def test_the_loss_is_a_plain_loop_over_supervised_positions() -> None:
    """Once a position, whatever the steps measured; the measured step k is position a + k − 1."""
    target = tiny_target("llama")
    draft = make(target, IDS, layers=2)
    start, steps = 3, 3
    batch = batch_of(target, draft, [TEXT], [start], steps)
    with torch.no_grad():
        loss, alone = draft(batch), draft(batch_of(target, draft, [TEXT], [start]))
    p, q = (
        logits_of(target.model, TEXT).softmax(-1),
        logits_of(draft.model, TEXT)[:, IDS].log_softmax(-1),
    )
    total = weight = 0.0
    for j in range(start, len(TEXT) - 1):
        total -= float((p[j, IDS] * q[j]).sum())
        weight += float(p[j, IDS].sum())
    for found in (loss, alone):
        assert found.sums["soft_ce"].item() == pytest.approx(total, rel=1e-5)
        assert found.weights["soft_ce"].item() == pytest.approx(weight, rel=1e-5)
    for anchor in range(start, len(TEXT) - 1):
        for k in range(1, steps + 1):
            there = anchor + k < len(TEXT)
            assert bool(loss.valid[0, anchor, k - 1]) == there
            if there:
                hit = int(IDS[q[anchor + k - 1].argmax()]) == TEXT[anchor + k]
                assert bool(loss.hits[0, anchor, k - 1]) == hit


def test_a_given_model_is_taken_if_its_vocabulary_is_the_targets(tmp_path: Path) -> None:
    target = tiny_target("llama")
    tiny_model("qwen3").save_pretrained(tmp_path / "qwen3")
    draft = make(target, start=str(tmp_path / "qwen3"))
    torch.testing.assert_close(
        logits_of(draft.model, TEXT), logits_of(tiny_model("qwen3"), TEXT), rtol=1e-4, atol=1e-4
    )
    other = copy.deepcopy(tiny_model("llama"))
    other.resize_token_embeddings(50)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match="another tokenizer"):
        make(target, start=str(tmp_path / "other"))
    with pytest.raises(UserError, match=r"draft\.start=.*nowhere"):
        make(target, start=str(tmp_path / "nowhere"))


def test_sizes_of_a_copy_cannot_be_chosen() -> None:
    with pytest.raises(UserError, match=r"draft\.start=random"):
        make(tiny_target("llama"), hidden_size=16)
