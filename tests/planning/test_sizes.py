"""Sizes known from configurations, against the real models, caches, drafts and files."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deepspec.drafts.registry import UNTRAINED, new_draft, option_classes
from deepspec.planning.sizes import draft_sizes, target_sizes
from deepspec.target import chain
from deepspec.target.outline import Outline, cached_bytes
from deepspec.training.checkpoint import save_draft
from tests.models import FAMILIES, tiny_model, tiny_target

DRAFTS = sorted(option_classes().keys() - UNTRAINED.keys())


def outline(family: str) -> Outline:
    return Outline(copy.deepcopy(tiny_model(family).config), None, family, torch.float64, False)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_targets_bytes_are_those_of_its_weights_and_its_cache(family: str) -> None:
    target, seen = tiny_target(family), outline(family)
    sizes = target_sizes(seen)
    assert sizes.weights == sum(one.nbytes for one in target.model.parameters())
    assert (seen.vocab_size, seen.hidden_size, seen.num_layers) == (
        target.vocab_size, target.hidden_size, target.num_layers,
    )  # fmt: skip
    state = target.new_state(1, 10)
    target.forward(torch.arange(3, 13)[None], state, chain([0], 10, target.device), 1)
    buffers = [one for layer in state.buffers for one in (layer.keys, layer.values)]
    assert 10 * cached_bytes(target.config, 8) == sum(one.nbytes for one in buffers)


def test_of_a_mixture_a_token_meets_the_chosen_experts_only() -> None:
    counted = outline("deepseek_v3").parameters()
    experts = sum(
        p.numel() for name, p in tiny_model("deepseek_v3").named_parameters() if ".experts." in name
    )
    assert experts > 0 and counted.total - counted.active == experts // 2  # two of four are chosen


def test_quantised_weights_are_counted_by_their_bits() -> None:
    seen = outline("llama")
    seen.model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    assert target_sizes(seen).weights == seen.parameters().total // 2


@pytest.mark.parametrize("name", DRAFTS)
def test_a_drafts_bytes_are_those_of_its_file(name: str, tmp_path: Path) -> None:
    options = option_classes()[name]()
    if getattr(options, "vocab_size", None):
        options = replace(options, vocab_size=40)
    target = tiny_target("llama")
    ids = None if options.vocab_size is None else torch.arange(40)
    before = torch.get_default_dtype()
    draft = new_draft(options, target, ids).to(before)
    sizes = draft_sizes(options, outline("llama"))
    assert sizes.parameters == sum(one.numel() for one in draft.parameters())
    assert (sizes.capture_layers, sizes.reach) == (draft.capture_layers, draft.feature_reach)
    save_draft(draft, tmp_path, draft.state_dict())
    assert sizes.saved == pytest.approx((tmp_path / "model.safetensors").stat().st_size, rel=0.1)
