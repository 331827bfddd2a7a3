"""`draft.init_from`: what a saved draft may start, what is refused, what is recorded."""

import hashlib
from pathlib import Path

import pytest
import torch

from deepspec.drafts.options import (
    DFlashOptions,
    Eagle3Options,
    EagleOptions,
    MedusaOptions,
    MtpOptions,
    PEagleOptions,
    StandaloneOptions,
)
from deepspec.drafts.registry import new_draft
from deepspec.errors import UserError
from deepspec.training.saved_draft import load_draft, start_from
from tests.models import VOCAB, tiny_target

IDS = torch.arange(0, VOCAB, 2)
OPTIONS = {
    "eagle": EagleOptions,
    "eagle3": Eagle3Options,
    "mtp": MtpOptions,
    "standalone": lambda **more: StandaloneOptions(layers=2, **more),
    "dflash": lambda **more: DFlashOptions(layers=2, **more),
    "medusa": MedusaOptions,
    "peagle": PEagleOptions,
}


def made(options, seed: int = 0, ids: torch.Tensor = IDS):
    torch.manual_seed(seed)
    draft = new_draft(options, tiny_target("llama"), ids)
    if options.init_from:
        start_from(draft, Path(options.init_from))
    return draft


@pytest.mark.parametrize("family", sorted(OPTIONS))
def test_a_saved_draft_starts_one_of_its_kind(family: str, tmp_path: Path) -> None:
    saved = made(OPTIONS[family]())
    with torch.no_grad():
        for parameter in saved.parameters():
            parameter.add_(torch.randn_like(parameter))
    saved.save_pretrained(tmp_path)
    started = made(OPTIONS[family](init_from=str(tmp_path), confidence=True), seed=5)
    found = started.state_dict()
    for name, tensor in saved.state_dict().items():
        assert torch.equal(found.pop(name), tensor), name
    assert list(found) == ["confidence_head.proj.weight"]  # the one thing that may be new
    sha = hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    started.save_pretrained(tmp_path / "again")
    noted = load_draft(tmp_path / "again").config.init_from
    assert noted == {"folder": str(tmp_path), "model_type": saved.config.model_type, "sha256": sha[:16]}


def test_what_no_option_says_is_taken_from_the_saved_draft(tmp_path: Path) -> None:
    """The residual stream, the norms and the rope of a draft that another project trained, its confidence's constant."""
    saved = made(Eagle3Options())
    other = {
        "norm_residual": True,
        "norm_features": True,
        "head_norms": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    }
    saved = type(saved)(type(saved.config)(**{**saved.config.to_dict(), **other}))
    saved.target_ids.copy_(IDS)
    saved.save_pretrained(tmp_path)
    fresh = new_draft(Eagle3Options(confidence=True), tiny_target("llama"), IDS)
    started = start_from(fresh, tmp_path)
    assert {key: getattr(started.config, key) for key in other} == other
    found = started.state_dict()
    for name, tensor in saved.state_dict().items():
        assert torch.equal(found.pop(name), tensor), name
    assert list(found) == ["confidence_head.proj.weight"]


def test_other_training_settings_are_no_other_draft(tmp_path: Path) -> None:
    made(Eagle3Options()).save_pretrained(tmp_path)
    made(Eagle3Options(init_from=str(tmp_path), ttt_steps=9, step_weights="dpace", step_decay=0.5))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (EagleOptions(), "is a deepspec_eagle3, from which a deepspec_eagle cannot start"),
        (Eagle3Options(layers=2), "num_layers is 1, here 2"),
        (Eagle3Options(capture_layers=[0, 2]), r"capture_layers is \[0, 1\], here \[0, 2\]"),
        (Eagle3Options(normalised_feedback=True), "normalised_feedback is False, here True"),
        (Eagle3Options(head="frozen"), "head is trained, here frozen"),
    ],
)
def test_another_draft_is_refused_by_what_differs(options, words: str, tmp_path: Path) -> None:
    made(Eagle3Options()).save_pretrained(tmp_path)
    options.init_from = str(tmp_path)
    with pytest.raises(UserError, match=words):
        made(options)


def test_a_head_of_other_words_is_refused(tmp_path: Path) -> None:
    made(Eagle3Options()).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="other tokens than the data"):
        made(Eagle3Options(init_from=str(tmp_path)), ids=IDS + 1 - (IDS == VOCAB - 1).long())


def test_a_confidence_head_is_not_dropped(tmp_path: Path) -> None:
    made(Eagle3Options(confidence=True)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="unexpected ones"):
        made(Eagle3Options(init_from=str(tmp_path)))


def test_a_language_model_of_other_sizes_is_named_by_what_differs(tmp_path: Path) -> None:
    made(StandaloneOptions(layers=2)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"lm\.num_hidden_layers is 2, here 3\.$"):
        made(StandaloneOptions(layers=3, init_from=str(tmp_path)))


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no draft"):
        made(MtpOptions(init_from=str(tmp_path / "none")))
