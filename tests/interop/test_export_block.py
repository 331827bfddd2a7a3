"""DFlash, DSpark and P-EAGLE out: the published names, what is refused, and the same draft when read back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deepspec.drafts.options import DFlashOptions, DSparkOptions, PEagleOptions
from deepspec.errors import UserError
from deepspec.target import Target
from tests.drafts.conformance import decoding_logits, features_of
from tests.interop.published_block import RANK, block_said
from tests.interop.test_export import GEMMA, IDS, LLAMA, exported, same, trained
from tests.interop.test_import_block import CAPTURED, target  # noqa: F401  the fixture of six layers
from tests.models import VOCAB, prompts, tiny_target

K, MASK = 4, 96
TEXT = [*prompts(1, seed=9)[0], *range(3, 12)]
BASE: dict[str, Any] = {
    "layers": 2,
    "block_tokens": K,
    "mask_token": MASK,
    "vocab_size": None,
    "capture_layers": [0, 1, 2],
}
QWEN = tiny_target("qwen3")


def dflash(**more: Any) -> DFlashOptions:
    return DFlashOptions(**{**BASE, **more})


def dspark(**more: Any) -> DSparkOptions:
    return DSparkOptions(**{**BASE, "rank": RANK, **more})


def peagle(**more: Any) -> PEagleOptions:
    return PEagleOptions(capture_layers=[0, 1, 2], **{"mask_token": MASK, **more})


def files(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


@pytest.mark.parametrize("ids", [None, IDS])
@pytest.mark.parametrize("form", ["vllm", "speculators"])
def test_dflash_goes_to_speculators_and_comes_back(form: str, ids: Any, tmp_path: Path) -> None:
    draft = trained(dflash(), QWEN, ids)
    assert exported(draft, form, tmp_path / "out", QWEN) == []
    again = same(draft, tmp_path / "out", QWEN)
    assert again.config.head == "frozen"
    config, tensors = files(tmp_path / "out")
    assert config["architectures"] == ["DFlashSpeculator"] and config["speculators_model_type"] == "dflash"
    assert (config["block_size"], config["sample_from_anchor"], config["mask_token_id"]) == (
        K + 1,
        False,
        MASK,
    )
    assert config["aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["sliding_window_non_causal"] is True  # vLLM looks back only, in every layer, without it
    assert config["transformer_layer_config"]["model_type"] == "qwen3"
    assert {"embed_tokens.weight", "lm_head.weight", "hidden_norm.weight", "fc.weight"} <= set(tensors)
    assert ("d2t" in tensors) == (ids is not None)


@pytest.mark.parametrize("sequential", ["markov", "rnn"])
def test_dspark_goes_to_speculators_with_its_heads(sequential: str, tmp_path: Path) -> None:
    draft = trained(dspark(sequential=sequential), QWEN, IDS)
    assert exported(draft, "speculators", tmp_path / "out", QWEN) == []
    again = same(draft, tmp_path / "out", QWEN)
    assert torch.equal(again.confidence_head.proj.weight, draft.confidence_head.proj.weight)
    config, tensors = files(tmp_path / "out")
    assert (config["block_size"], config["sample_from_anchor"], config["markov_rank"]) == (K, True, RANK)
    assert config["markov_head_type"] == {"markov": "vanilla", "rnn": "rnn"}[sequential]
    assert tensors["markov_head.markov_w1.weight"].shape == (VOCAB, RANK)
    assert tensors["confidence_head.proj.bias"].tolist() == [0.0]


@pytest.mark.parametrize(("options", "slots", "first"), [(dflash(), K + 1, 1), (dspark(), K, 0)])
def test_what_sglang_gets_is_the_formula_without_embeddings_and_head(
    options: Any, slots: int, first: int, tmp_path: Path
) -> None:
    draft = trained(options, QWEN)
    exported(draft, "sglang", tmp_path / "out", QWEN)
    same(draft, tmp_path / "out", QWEN)
    config, tensors = files(tmp_path / "out")
    assert config["architectures"] == ["DFlashDraftModel" if first else "DSparkDraftModel"]
    assert config["block_size"] == slots and config["dflash_config"]["target_layer_ids"] == [0, 1, 2]
    assert config["dflash_config"]["mask_token_id"] == MASK
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(tensors)
    length = len(TEXT) - K
    model = QWEN.model
    said, _ = block_said(
        tensors,
        model.get_input_embeddings().weight,
        model.get_output_embeddings().weight,
        features_of(draft, QWEN, TEXT[: length - 1])[0],
        TEXT,
        mask=config["dflash_config"]["mask_token_id"],
        slots=config["block_size"],
        first=first,
        eps=config["rms_norm_eps"],
    )
    torch.testing.assert_close(decoding_logits(draft, QWEN, TEXT, length - 1, K), said, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options", [dspark(), dspark(sequential="rnn"), dspark(rank=0), dspark(head="trained")]
)
def test_dspark_goes_to_deepspec(options: Any, target: Target, tmp_path: Path) -> None:  # noqa: F811
    options.capture_layers = CAPTURED
    draft = trained(options, target)
    exported(draft, "deepspec", tmp_path / "out", target)
    same(draft, tmp_path / "out", target)
    config, tensors = files(tmp_path / "out")
    assert config["architectures"] == ["Qwen3DSparkModel"] and config["target_layer_ids"] == CAPTURED
    assert (config["block_size"], config["num_target_layers"], config["num_hidden_layers"]) == (K, 6, 2)
    assert ("markov_head.markov_w1.weight" in tensors) == (options.rank > 0)
    assert {"embed_tokens.weight", "lm_head.weight"} <= set(tensors)


@pytest.mark.parametrize("ids", [None, IDS])
def test_peagle_goes_to_speculators_and_comes_back(ids: Any, tmp_path: Path) -> None:
    draft = trained(peagle(), LLAMA, ids)
    exported(draft, "vllm", tmp_path / "out")
    again = same(draft, tmp_path / "out")
    assert type(again) is type(draft)
    config, tensors = files(tmp_path / "out")
    assert config["architectures"] == ["PEagleSpeculator"] and config["speculators_model_type"] == "peagle"
    assert config["speculators_config"]["algorithm"] == "peagle" and config["mask_token_id"] == MASK
    assert tensors["mask_hidden"].shape == (1, 1, 3 * LLAMA.hidden_size)
    card = (tmp_path / "out" / "README.md").read_text()
    assert '"method": "eagle3", "parallel_drafting": true' in card


LEARNT = r"learnt a vector.*draft\.mask_token=ID.*format=hf"


@pytest.mark.parametrize(
    ("form", "options", "on", "words"),
    [
        ("vllm", dflash(mask_token=None), QWEN, LEARNT),
        ("sglang", dspark(mask_token=None), QWEN, LEARNT),
        ("deepspec", dspark(mask_token=None), QWEN, LEARNT),
        ("vllm", peagle(mask_token=None), LLAMA, LEARNT),
        ("vllm", dflash(head_norms=False), QWEN, r"queries and keys.*draft\.head_norms=true"),
        ("vllm", dspark(sequential="rnn"), QWEN, r"plain Markov head only.*draft\.sequential=markov"),
        ("sglang", dspark(sequential="rnn"), QWEN, r"plain Markov head only.*format=speculators"),
        ("vllm", dflash(head="trained"), QWEN, r"target's head in the place.*draft\.head=frozen"),
        ("sglang", dflash(head="trained"), QWEN, r"use the target's head.*draft\.head=frozen"),
        ("vllm", dflash(capture_layers=[1, 3]), QWEN, r"last layer \(3\)"),
        ("deepspec", dspark(), QWEN, r"exactly five captured layers, this one 3"),
        ("deepspec", dflash(), QWEN, r"anchor's own slot.*draft\.rank=0"),
        ("vllm", dflash(), GEMMA, r"bare rows.*format=hf"),
        ("vllm", peagle(norm_layers=True), LLAMA, r"norm of each captured layer.*format=speculators"),
        ("sglang", peagle(), LLAMA, r"no place.*\(peagle\).*format=speculators"),
    ],
)
def test_what_a_format_cannot_carry_is_refused_with_what_works(
    form: str, options: Any, on: Target, words: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=words):
        exported(trained(options, on), form, tmp_path / "out", on)
    assert list(tmp_path.iterdir()) == []


def test_a_reduced_vocabulary_is_refused_by_sglang(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no reduced vocabulary.*format=speculators"):
        exported(trained(dflash(), QWEN, IDS), "sglang", tmp_path / "out", QWEN)


def test_dflashs_confidence_head_stays_behind(tmp_path: Path) -> None:
    draft = trained(dflash(confidence=True), QWEN)
    (note,) = exported(draft, "sglang", tmp_path / "out", QWEN)
    assert "confidence head stays behind" in note
