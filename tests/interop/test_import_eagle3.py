"""EAGLE-3 checkpoints written by hand to the published layouts: read, and the logits of a plain loop."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from deepspec.decoding import Engine, Request
from deepspec.errors import UserError
from deepspec.interop.formats import read
from deepspec.target import Target
from tests.drafts.conformance import decoding_logits, features_of
from tests.interop.published import HEADS, HIDDEN, INNER, KV, eagle3_logits, eagle3_tensors
from tests.models import VOCAB, prompts, tiny_target

LAYER = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "vocab_size": VOCAB,
}
IDS = torch.tensor([0, 1, 2, *range(5, 60, 3), 96])
TEXT = [*prompts(1, seed=3)[0], *range(3, 12)]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama")


def vocab(ids: Tensor = IDS) -> dict[str, Tensor]:
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[ids] = True
    return {"d2t": torch.tensor([int(t) - d for d, t in enumerate(ids)]), "t2d": mask}


def written(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], pickled: bool = False) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


def sglang(**more: Any) -> dict[str, Any]:
    return {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **LAYER, **more}


def speculators(**more: Any) -> dict[str, Any]:
    layer = {"model_type": "llama", **LAYER, "rope_parameters": {"rope_type": "default", "rope_theta": 5e3}}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "norm_before_residual": False,
        **more,
    }


def plain(names: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in names.items()}


def check(folder: Path, target: Target, tensors: dict[str, Tensor], layers: list[int], **how: Any) -> Any:
    """Its logits are the plain loop's, and our engine decodes with it without a loss."""
    draft, _ = read(folder, target)
    assert draft.capture_layers == layers
    draft = draft.double()
    embedding = target.model.get_input_embeddings().weight
    length, steps = len(TEXT) - 5, 4
    features = features_of(draft, target, TEXT[: length - 1])[0]
    expected = eagle3_logits(
        tensors, embedding, features, TEXT[:length], TEXT[length : length + steps], **how
    )
    found = decoding_logits(draft, target, TEXT, length - 1, steps)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)  # angles are float32
    request = Request(TEXT[:9], 12)
    (ours,), (bare,) = Engine(target, draft, k=3).generate([request]), Engine(target).generate([request])
    assert ours.tokens == bare.tokens
    return draft


@pytest.mark.parametrize("prefix", ["", "model."])
def test_safeailab_with_a_pickle_its_default_layers_and_a_reduced_vocabulary(
    tmp_path: Path, target: Target, prefix: str
) -> None:
    """No layer ids: the inputs of layers 2, n/2 and n−3 of 4 are, as outputs, 0 twice; so a target of 8 layers."""
    import transformers

    config = transformers.LlamaConfig(
        **{**LAYER, "num_hidden_layers": 8, "eos_token_id": 2, "max_position_embeddings": 256}
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    deep = Target(model, None, "eight layers")
    tensors = eagle3_tensors(rows=len(IDS))
    folder = written(
        tmp_path / "draft",
        sglang(rope_theta=20000.0, draft_vocab_size=len(IDS)),
        {**{prefix + name: t for name, t in tensors.items()}, **vocab()},
        pickled=True,
    )
    draft = check(folder, deep, tensors, [1, 3, 4], theta=20000.0)
    assert draft.target_ids.tolist() == IDS.tolist()


def test_sglang_31_with_named_layers(tmp_path: Path, target: Target) -> None:
    tensors = eagle3_tensors(layers=2, seed=1)
    tensors |= {f"fc_norm.{i}.weight": torch.rand(HIDDEN, dtype=torch.float64) + 0.5 for i in range(2)}
    config = sglang(
        eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2], "use_aux_hidden_state": True},
        fc_norm=True,
        norm_output=True,
        draft_vocab_size=VOCAB,
    )
    draft = check(written(tmp_path / "draft", config, tensors), target, tensors, [0, 2], norm_output=True)
    assert draft.target_ids is None


def test_a_full_vocabulary_with_its_identity_map_is_the_identity(tmp_path: Path, target: Target) -> None:
    tensors = eagle3_tensors(layers=2, seed=2)
    config = sglang(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2]})
    whole = vocab(torch.arange(VOCAB))
    draft = check(written(tmp_path / "draft", config, tensors | whole), target, tensors, [0, 2])
    assert draft.target_ids is None


@pytest.mark.parametrize("features", [False, True])
def test_speculators_ids_are_inputs_and_both_residuals_are_known(
    tmp_path: Path, target: Target, features: bool
) -> None:
    tensors = eagle3_tensors(layers=2, rows=len(IDS), seed=4)
    if features:
        tensors["input_norm.weight"] = torch.rand(2 * HIDDEN, dtype=torch.float64) + 0.5
    config = speculators(
        eagle_aux_hidden_state_layer_ids=[1, 3],
        norm_before_residual=True,
        norm_before_fc=features,
        draft_vocab_size=len(IDS),
    )
    embedding = target.model.get_input_embeddings().weight
    folder = written(
        tmp_path / "draft", config, plain(tensors) | vocab() | {"embed_tokens.weight": embedding}
    )
    check(folder, target, tensors, [0, 2], theta=5e3, norm_residual=True)


def test_deepspec_with_five_layers_and_head_norms(tmp_path: Path) -> None:
    import transformers

    config = transformers.Qwen3Config(
        **{**LAYER, "num_hidden_layers": 6, "head_dim": 16, "eos_token_id": 2, "max_position_embeddings": 256}
    )
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    deep = Target(model, None, "six layers")
    tensors = eagle3_tensors(layers=5, seed=5, head_dim=16)
    for name in ("q_norm", "k_norm"):
        tensors[f"midlayer.self_attn.{name}.weight"] = torch.rand(16, dtype=torch.float64) + 0.5
    settings = {**LAYER, "head_dim": 16, "architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3"}
    settings |= {"target_layer_ids": [0, 1, 2, 3, 4], "ttt_length": 7, "step_loss_decay": 0.7}
    settings["rope_theta"] = 1e6
    folder = written(
        tmp_path / "draft",
        settings,
        plain(tensors) | {"embed_tokens.weight": model.model.embed_tokens.weight},
    )
    draft = check(folder, deep, tensors, [0, 1, 2, 3, 4], theta=1e6)
    assert (draft.config.ttt_steps, draft.config.step_decay) == (7, 0.7)


TWO = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2]}}


@pytest.mark.parametrize(
    ("change", "config", "words"),
    [
        (lambda t: t.pop("norm.weight"), sglang(**TWO), r"norm\.weight is missing"),
        (
            lambda t: t.update({"extra.weight": torch.ones(4)}),
            sglang(**TWO),
            r"extra\.weight is unexpected",
        ),
        (lambda t: None, sglang(**TWO, fc_norm=True), r"fc_norm\.0\.weight is missing"),
        (lambda t: t.update(d2t=torch.arange(VOCAB)), sglang(**TWO), r"d2t.*not ascending within 0 to 96"),
        (
            lambda t: t.update(d2t=torch.zeros(4, dtype=torch.long)),
            sglang(**TWO),
            "4 entries and the head 97",
        ),
        (
            lambda t: t.update(
                vocab(IDS)
                | {"lm_head.weight": t["lm_head.weight"][: len(IDS)], "t2d": vocab()["t2d"].roll(1)}
            ),
            sglang(**TWO),
            "t2d marks other tokens",
        ),
        (lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:50]}), sglang(**TWO), "50 rows.*no d2t"),
        (
            lambda t: t.update({"embed_tokens.weight": torch.zeros(VOCAB, HIDDEN)}),
            sglang(**TWO),
            "embeddings of its own",
        ),
        (lambda t: None, sglang(**TWO, hidden_act="gelu"), "hidden_act 'gelu'"),
        (lambda t: None, sglang(**TWO, num_hidden_layers=2), "more than one layer"),
        (lambda t: None, sglang(**TWO, partial_rotary_factor=0.5), "partial_rotary_factor"),
        (lambda t: None, sglang(**{**TWO, "hidden_size": 64}), "hidden size 64, tiny llama has 32"),
        (lambda t: None, {"model_type": "deepspec_eagle3"}, r"of deepspec already: draft\.init_from="),
        (lambda t: t.clear() or t.update(x=torch.ones(1)), {"model_type": "gpt2"}, r"no draft.*\(gpt2\)"),
        (
            lambda t: None,
            sglang(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 0]}),
            r"\[2, 0\]; only ascending",
        ),
        (
            lambda t: None,
            sglang(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 4]}),
            "Layer 4 does not",
        ),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, target: Target, change: Any, config: Any, words: str) -> None:
    tensors = eagle3_tensors(layers=2, seed=6)
    change(tensors)
    with pytest.raises(UserError, match=words):
        read(written(tmp_path / "draft", config, tensors), target)


def test_speculators_without_the_residual_it_means_is_refused(tmp_path: Path, target: Target) -> None:
    config = speculators(eagle_aux_hidden_state_layer_ids=[1, 3])
    del config["norm_before_residual"]
    with pytest.raises(UserError, match="does not say norm_before_residual"):
        read(written(tmp_path / "draft", config, plain(eagle3_tensors(layers=2))), target)
    config = speculators(eagle_aux_hidden_state_layer_ids=[0, 3])
    with pytest.raises(UserError, match="0 are the embeddings"):
        read(written(tmp_path / "draft", config, plain(eagle3_tensors(layers=2))), target)


def test_shards_are_read_together_and_a_lost_one_is_named(tmp_path: Path, target: Target) -> None:
    tensors = eagle3_tensors(layers=2, seed=7)
    folder = written(tmp_path / "draft", sglang(**TWO), {})
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for part, inside in parts.items():
        save_file({name: tensors[name] for name in inside}, folder / part)
    weight_map = {name: part for part, inside in parts.items() for name in inside}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    check(folder, target, tensors, [0, 2])
    (folder / "b.safetensors").unlink()
    with pytest.raises(UserError, match=r"b\.safetensors is damaged or missing"):
        read(folder, target)
