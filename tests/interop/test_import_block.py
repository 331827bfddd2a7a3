"""DFlash and DSpark checkpoints written by hand to the published layouts: read, and the logits of plain formulas."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from deepspec.decoding import Engine, Request
from deepspec.drafts.options import DFlashOptions, DSparkOptions
from deepspec.drafts.registry import new_draft
from deepspec.errors import UserError
from deepspec.interop.formats import read
from deepspec.target import Target
from deepspec.training.saved_draft import start_from
from tests.drafts.conformance import decoded, features_of
from tests.drafts.packed import batch_of
from tests.interop.published import HEADS, HIDDEN, INNER, KV
from tests.interop.published_block import HEAD_DIM, LAYERS, RANK, block_said, block_tensors
from tests.interop.test_import_eagle3 import IDS, vocab, written
from tests.models import VOCAB, prompts, tiny_model

MASK, K = 96, 4
TEXT = [*prompts(1, seed=3)[0], *range(3, 12)]
CAPTURED = [0, 1, 2, 3, 4]
LAYER = {
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "vocab_size": VOCAB,
    "attention_bias": False,
    "layer_types": ["full_attention"] * LAYERS,
    "rope_theta": 1e6,
}
MARKOV = {"markov_rank": RANK, "markov_head_type": "vanilla"}
CONFIDENCE = {"enable_confidence_head": True, "confidence_head_with_markov": True}


@pytest.fixture(scope="module")
def target() -> Target:
    """A Qwen3 of six layers, so that five of them can be captured."""
    settings = copy.deepcopy(tiny_model("qwen3").config).to_dict()
    config = transformers.Qwen3Config(**{**settings, "num_hidden_layers": 6, "layer_types": None})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return Target(model.eval(), None, "six layers")


def authors(architecture: str = "DFlashDraftModel", **more: Any) -> dict[str, Any]:
    inner = {"mask_token_id": MASK, "target_layer_ids": CAPTURED}
    return {"architectures": [architecture], **LAYER, "block_size": K + 1, "dflash_config": inner, **more}


def deepspec(**more: Any) -> dict[str, Any]:
    own = {"block_size": K, "mask_token_id": MASK, "num_anchors": 8, "target_layer_ids": CAPTURED}
    return {"architectures": ["Qwen3DSparkModel"], **LAYER, "num_target_layers": 6, **own, **more}


def speculators(kind: str, **more: Any) -> dict[str, Any]:
    names = {"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator"}
    layer = {key: value for key, value in LAYER.items() if key != "rope_theta"}
    layer["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    own = {"mask_token_id": MASK, "aux_hidden_state_layer_ids": [i + 1 for i in CAPTURED]}
    return {
        "architectures": [names[kind]],
        "speculators_model_type": kind,
        "transformer_layer_config": layer,
        **own,
        **more,
    }


def check(folder: Path, target: Target, tensors: dict[str, Tensor], first: int, head: Tensor) -> Any:
    """Its logits and confidences are the formulas', and our engine decodes with it without a loss."""
    draft, _ = read(folder, target)
    assert (draft.capture_layers, draft.config.block_tokens, draft.first_slot) == (CAPTURED, K, first)
    draft = draft.double()
    length = len(TEXT) - K
    features = features_of(draft, target, TEXT[: length - 1])[0]
    embedding = target.model.get_input_embeddings().weight
    slots = K + first
    logits, confidence = block_said(
        tensors, embedding, head, features, TEXT, mask=MASK, slots=slots, first=first, theta=1e6
    )
    forced = decoded(draft, target, TEXT, length - 1, K)
    torch.testing.assert_close(torch.stack(forced.logits), logits, rtol=1e-4, atol=1e-4)  # angles are float32
    if confidence is not None:
        torch.testing.assert_close(torch.stack(forced.confidence), confidence, rtol=1e-4, atol=1e-4)
    request = Request(TEXT[:9], 12)
    (ours,), (bare,) = Engine(target, draft, k=K).generate([request]), Engine(target).generate([request])
    assert ours.tokens == bare.tokens
    return draft


def own(target: Target) -> dict[str, Tensor]:
    """What DeepSpec and speculators store of the target."""
    model = target.model
    return {
        "embed_tokens.weight": model.get_input_embeddings().weight,
        "lm_head.weight": model.get_output_embeddings().weight,
    }


def test_dflash_of_its_authors(tmp_path: Path, target: Target) -> None:
    tensors = block_tensors(5)
    head = target.model.get_output_embeddings().weight
    draft = check(written(tmp_path / "draft", authors(), tensors), target, tensors, 1, head)
    assert draft.config.head == "frozen"
    inside = {**authors()["dflash_config"], "block_size": K + 1}
    newer = authors(dflash_config=inside)
    del newer["block_size"]
    check(written(tmp_path / "newer", newer, tensors), target, tensors, 1, head)


def test_dspark_of_specforge(tmp_path: Path, target: Target) -> None:
    tensors = block_tensors(5, seed=1, markov=VOCAB)
    config = authors("DSparkDraftModel", block_size=K, **MARKOV, **CONFIDENCE)
    head = target.model.get_output_embeddings().weight
    check(written(tmp_path / "draft", config, tensors), target, tensors, 0, head)


@pytest.mark.parametrize("rnn", [False, True])
def test_dspark_of_deepspec(tmp_path: Path, target: Target, rnn: bool) -> None:
    tensors = block_tensors(5, seed=2, rnn=rnn, markov=VOCAB)
    markov = {**MARKOV, "markov_head_type": "rnn" if rnn else "vanilla"}
    folder = written(tmp_path / "draft", deepspec(**markov, **CONFIDENCE), tensors | own(target))
    draft = check(folder, target, tensors, 0, own(target)["lm_head.weight"])
    assert draft.config.head == "frozen"  # the one it brings is the target's


def test_dflash_of_deepspec_predicts_from_the_anchors_slot(tmp_path: Path, target: Target) -> None:
    tensors, head = block_tensors(5, seed=3), torch.randn(VOCAB, HIDDEN, dtype=torch.float64)
    stored = tensors | own(target) | {"lm_head.weight": head}
    folder = written(tmp_path / "draft", deepspec(markov_rank=0, enable_confidence_head=False), stored)
    assert check(folder, target, tensors, 0, head).config.head == "trained"


@pytest.mark.parametrize("reduced", [False, True])
def test_dflash_of_speculators(tmp_path: Path, target: Target, reduced: bool) -> None:
    tensors = block_tensors(5, seed=4)
    stored, head = tensors | own(target), own(target)["lm_head.weight"]
    if reduced:
        head = torch.randn(len(IDS), HIDDEN, dtype=torch.float64)
        stored |= {**vocab(), "lm_head.weight": head}
    config = speculators("dflash", block_size=K + 1, sample_from_anchor=False)
    draft = check(written(tmp_path / "draft", config, stored), target, tensors, 1, head)
    assert draft.target_ids is None or draft.target_ids.tolist() == IDS.tolist()


def test_dspark_of_speculators_with_a_confidence_that_sees_no_token(tmp_path: Path, target: Target) -> None:
    tensors = block_tensors(5, seed=5, markov=VOCAB, rows=len(IDS))
    head = torch.randn(len(IDS), HIDDEN, dtype=torch.float64)
    tensors["confidence_head.proj.weight"][:, HIDDEN:] = 0
    narrow = {"confidence_head.proj.weight": tensors["confidence_head.proj.weight"][:, :HIDDEN]}
    config = speculators("dspark", block_size=K, **MARKOV, enable_confidence_head=True)
    stored = tensors | own(target) | vocab() | narrow | {"lm_head.weight": head}
    folder = written(tmp_path / "draft", config | {"confidence_head_with_markov": False}, stored)
    check(folder, target, tensors, 0, head)


def test_what_was_imported_is_trained_further(tmp_path: Path, target: Target) -> None:
    """With the options that say the same, and what no option says (a confidence's constant, other rope) inherited."""
    tensors = block_tensors(5, seed=6, markov=VOCAB)
    folder = written(tmp_path / "draft", deepspec(**MARKOV, **CONFIDENCE), tensors | own(target))
    draft, _ = read(folder, target)
    draft.float().save_pretrained(tmp_path / "ours")
    options = DSparkOptions(
        layers=LAYERS, block_tokens=K, rank=RANK, capture_layers=CAPTURED, mask_token=MASK, vocab_size=None
    )
    started = start_from(new_draft(options, target, None), tmp_path / "ours")
    assert started.config.confidence_bias and started.config.rope_parameters["rope_theta"] == 1e6
    for name, tensor in draft.state_dict().items():
        assert torch.equal(started.state_dict()[name], tensor), name
    loss = started.double().train()(batch_of(target, started, [[*range(5, 30)]], [4]))
    sum(loss.sums.values()).backward()
    assert started.fc.weight.grad.abs().max() > 0 and started.confidence_head.proj.bias.grad.abs() > 0
    other = DFlashOptions(
        layers=LAYERS, block_tokens=K, capture_layers=CAPTURED, mask_token=MASK, vocab_size=None
    )
    with pytest.raises(UserError, match="from which a deepspec_dflash cannot start"):
        start_from(new_draft(other, target, None), tmp_path / "ours")


@pytest.mark.parametrize(
    ("config", "change", "words"),
    [
        (authors(), lambda t: t.pop("hidden_norm.weight"), r"hidden_norm\.weight is missing"),
        (authors(), lambda t: t.update(extra=torch.ones(2)), "extra is unexpected"),
        (authors(layer_types=["sliding_attention"] * 2), None, "sliding window"),
        (authors(dflash_config={"mask_token_id": MASK}), None, "lacks 'target_layer_ids'"),
        (authors(dflash_config={"target_layer_ids": CAPTURED}), None, "mask_token_id is None"),
        (authors(dflash_config={**authors()["dflash_config"], "projector_type": "domino"}), None, "'domino'"),
        (
            authors(dflash_config={**authors()["dflash_config"], "mask_token_id": 97}),
            None,
            "mask_token_id is 97",
        ),
        (authors(input_embedding_scale=5.6), None, "scales the embeddings"),
        (authors(is_causal=True), None, "looks back only"),
        (authors(dflash_config={"mask_token_id": 96, "target_layer_ids": [5]}), None, "last hidden state"),
        (authors(dflash_config={"mask_token_id": 96, "target_layer_ids": [2, 1]}), None, "only ascending"),
        (authors("DFlash2DraftModel"), None, "no draft that can be brought over"),
        (deepspec(markov_rank=4, markov_head_type="gated"), None, "Markov head is 'gated'"),
        (deepspec(markov_rank=RANK), None, r"markov_w1\.weight is missing"),
        (
            speculators("dspark", block_size=4, sample_from_anchor=False, **MARKOV),
            None,
            "its anchor's slot predicts nothing",
        ),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, target: Target, config: Any, change: Any, words: str) -> None:
    tensors = block_tensors(5, seed=7)
    if change:
        change(tensors)
    with pytest.raises(UserError, match=words):
        read(written(tmp_path / "draft", config, tensors), target)
