"""Exports: the published names and conversions, what is refused, and the same draft when read back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deepspec.artifacts import MANIFEST, sums
from deepspec.drafts.options import Eagle3Options, EagleOptions, MtpOptions, StandaloneOptions
from deepspec.drafts.registry import new_draft
from deepspec.errors import UserError
from deepspec.interop.bundle import export
from deepspec.interop.card import Subject
from deepspec.interop.compare import draft_logits
from deepspec.interop.formats import read
from deepspec.target import Target
from deepspec.training.saved_draft import load_draft
from tests.interop.published import eagle3_logits
from tests.models import VOCAB, prompts, tiny_target

IDS = torch.tensor([0, 1, 2, *range(5, 60, 3), 96])
LLAMA = tiny_target("llama")
DEEP = {"capture_layers": [0, 1, 2]}


def trained(options: Any, target: Target = LLAMA, ids: torch.Tensor | None = None, **config: Any) -> Any:
    """A draft whose every tensor is random, of the sizes that a training would give it."""
    torch.manual_seed(0)
    draft = new_draft(options, target, ids)
    if config:
        settings = {**draft.config.to_dict(), **config}
        made = type(draft)(type(draft.config)(**settings))
        if ids is not None:
            made.target_ids.copy_(ids)
        draft = made
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3)
    return draft.double()


def exported(draft: Any, form: str, folder: Path, target: Target = LLAMA) -> list[str]:
    kind = str(draft.config.model_type).removeprefix("deepspec_")
    manifest = {
        "fingerprint": "f",
        "target": {"name": "a tiny one"},
        "recipe": {"draft": {"algorithm": kind}},
    }
    subject = Subject("mine", form, kind, "OUT", "org/target", "mit", 3, manifest, [], None)
    return export(draft, target, subject, folder)


def same(draft: Any, folder: Path, target: Target = LLAMA) -> Any:
    again, _ = read(folder, target)
    again = again.double()
    assert torch.equal(draft_logits(draft, target), draft_logits(again, target))
    return again


@pytest.mark.parametrize("ids", [None, IDS])
@pytest.mark.parametrize("form", ["vllm", "speculators", "sglang"])
@pytest.mark.parametrize("new", [False, True])
def test_eagle3_goes_out_and_comes_back(form: str, ids: Any, new: bool, tmp_path: Path) -> None:
    options = Eagle3Options(**DEEP, norm_layers=new, normalised_feedback=new)
    draft = trained(options, ids=ids)
    folder = tmp_path / "out"
    assert exported(draft, form, folder) == []
    same(draft, folder)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    first = "midlayer." if form == "sglang" else "layers.0."
    layer = {
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        *("input_layernorm", "post_attention_layernorm", "hidden_norm"),
    }
    expected = {f"{first}{name}.weight" for name in layer} | {"fc.weight", "norm.weight", "lm_head.weight"}
    expected |= {f"fc_norm.{i}.weight" for i in range(3)} if new else set()
    expected |= set() if ids is None else {"d2t", "t2d"}
    expected |= set() if form == "sglang" else {"embed_tokens.weight"}
    assert set(tensors) == expected
    assert config["draft_vocab_size"] == (VOCAB if ids is None else len(ids))
    assert (config["fc_norm"], config["norm_output"]) == (new, new)
    if form == "sglang":
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
        assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["vocab_size"] == VOCAB
        assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    else:
        assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
        assert config["norm_before_residual"] is config["norm_before_fc"] is False
        verifier = config["speculators_config"]["verifier"]
        assert verifier == {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]}
        assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    if ids is not None:
        assert [d + int(offset) for d, offset in enumerate(tensors["d2t"])] == ids.tolist()
        assert tensors["t2d"].dtype == torch.bool and tensors["t2d"].nonzero()[:, 0].tolist() == ids.tolist()


def test_the_exported_numbers_are_those_of_the_paper(tmp_path: Path) -> None:
    """The files alone, in a plain loop without our code, give the logits of the draft."""
    draft = trained(Eagle3Options(**DEEP, normalised_feedback=True), ids=IDS)
    exported(draft, "sglang", tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    text = [*prompts(1, seed=5)[0], *range(3, 12)]
    tokens = torch.tensor([text[:-4]])
    captured = LLAMA.model(tokens[:, :-1], output_hidden_states=True).hidden_states
    features = torch.cat([captured[i + 1] for i in (0, 1, 2)], -1)[0]
    embedding = LLAMA.model.get_input_embeddings().weight
    eps = draft.config.rms_norm_eps
    expected = eagle3_logits(tensors, embedding, features, text[:-4], text[-4:], norm_output=True, eps=eps)
    from tests.drafts.conformance import decoding_logits

    found = decoding_logits(draft, LLAMA, text, len(text) - 5, 4)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_norms_of_other_trainers_go_out_again(tmp_path: Path) -> None:
    draft = trained(Eagle3Options(**DEEP), ids=IDS, norm_residual=True, norm_features=True)
    exported(draft, "vllm", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["norm_before_residual"] is config["norm_before_fc"] is True
    same(draft, tmp_path / "out")


def test_deepspec_gets_what_fits_it(tmp_path: Path) -> None:
    import transformers

    settings = {**LLAMA.config.to_dict(), "num_hidden_layers": 6, "head_dim": 8}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.Qwen3Config(**settings), dtype=torch.float64
    )
    six = Target(model, None, "six layers")
    options = Eagle3Options(capture_layers=[0, 1, 2, 3, 4], vocab_size=None)
    draft = trained(options, six, head_norms=True)
    exported(draft, "deepspec", tmp_path / "out", six)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3Eagle3Model"] and config["target_layer_ids"] == [0, 1, 2, 3, 4]
    assert (config["num_target_layers"], config["num_hidden_layers"]) == (6, 1)
    same(draft, tmp_path / "out", six)


def test_a_frozen_head_becomes_the_targets_rows(tmp_path: Path) -> None:
    draft = trained(Eagle3Options(**DEEP, head="frozen"), ids=IDS)
    exported(draft, "vllm", tmp_path / "out")
    head = load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"]
    assert torch.equal(head, LLAMA.model.get_output_embeddings().weight[IDS])


def test_the_confidence_head_stays_behind_and_that_is_said(tmp_path: Path) -> None:
    draft = trained(Eagle3Options(**DEEP, confidence=True), ids=IDS)
    (note,) = exported(draft, "vllm", tmp_path / "out")
    assert "confidence head stays behind" in note
    assert note in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("form", ["sglang", "vllm"])
def test_eagle_goes_out_and_comes_back(form: str, tmp_path: Path) -> None:
    draft = trained(EagleOptions())
    exported(draft, form, tmp_path / "out")
    names = set(load_file(tmp_path / "out" / "model.safetensors"))
    assert {"fc.weight", "fc.bias", "layers.0.post_attention_layernorm.weight"} <= names
    assert not any("input_layernorm" in name or "lm_head" in name for name in names)
    assert ("embed_tokens.weight" in names) == (form == "vllm")
    same(draft, tmp_path / "out")


def test_mtp_of_qwen3_goes_out_and_comes_back(tmp_path: Path) -> None:
    qwen = tiny_target("qwen3")
    draft = trained(MtpOptions(), qwen)
    exported(draft, "speculators", tmp_path / "out", qwen)
    names = set(load_file(tmp_path / "out" / "model.safetensors"))
    own = {"token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", "input_layernorm"}
    assert {f"mtp_layers.0.{name}.weight" for name in own} <= names
    assert all(name.startswith("mtp_layers.0.") for name in names)
    same(draft, tmp_path / "out", qwen)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("form", ["vllm", "sglang"])
def test_a_standalone_draft_is_a_model_that_transformers_loads(
    form: str, family: str, tmp_path: Path
) -> None:
    import transformers

    on = tiny_target(family)
    draft = trained(StandaloneOptions(layers=2), on)
    exported(draft, form, tmp_path / "out", on)
    same(draft, tmp_path / "out", on)
    text = torch.tensor([prompts(1, seed=4)[0]])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float64, attn_implementation=draft.config.attention
    )
    with torch.no_grad():
        found, expected = model(text).logits, draft.model(text).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)  # Gemma's scale is a float32 number


def test_a_standalone_drafts_reduced_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"some of them only.*draft\.vocab_size=null"):
        exported(trained(StandaloneOptions(layers=2), ids=IDS), "vllm", tmp_path / "out")


def test_our_own_format_is_a_draft_as_trained(tmp_path: Path) -> None:
    draft = trained(StandaloneOptions(layers=2))
    exported(draft, "hf", tmp_path / "out")
    assert load_draft(tmp_path / "out").config.model_type == draft.config.model_type
    card = (tmp_path / "out" / "README.md").read_text()
    assert 'license: "mit"' in card and "SpeculativeDecoder.from_pretrained('org/target', 'OUT', k=3)" in card


GEMMA = tiny_target("gemma2")


@pytest.mark.parametrize(
    ("form", "options", "target", "config", "words"),
    [
        ("sglang", Eagle3Options(**DEEP, layers=2), LLAMA, {}, r"second layer.*format=vllm"),
        ("sglang", Eagle3Options(**DEEP), LLAMA, {"norm_residual": True}, r"norm_residual.*format=vllm"),
        ("sglang", Eagle3Options(**DEEP), LLAMA, {"norm_features": True}, r"norm_features.*format=vllm"),
        ("sglang", Eagle3Options(**DEEP), LLAMA, {"head_norms": True}, r"queries and keys.*format=vllm"),
        ("sglang", Eagle3Options(**DEEP), GEMMA, {}, r"bare rows.*scales them.*format=vllm"),
        ("sglang", EagleOptions(), GEMMA, {}, r"bare rows.*scales them.*format=vllm"),
        ("vllm", Eagle3Options(**DEEP, head="frozen"), GEMMA, {}, r"caps its logits.*draft\.head=trained"),
        ("vllm", Eagle3Options(capture_layers=[0, 3]), LLAMA, {}, r"last layer \(3\).*draft\.capture_layers"),
        ("deepspec", Eagle3Options(**DEEP), LLAMA, {}, r"normalises queries and keys.*format=vllm"),
        (
            "deepspec",
            EagleOptions(),
            LLAMA,
            {},
            r"no place.*\(eagle\).*format=vllm or format=sglang or format=hf",
        ),
        ("speculators", MtpOptions(), LLAMA, {}, r"Qwen3's kind.*format=hf"),
        ("deepspec", StandaloneOptions(layers=2), LLAMA, {}, r"no place.*\(standalone\).*format=vllm"),
        ("gguf", StandaloneOptions(layers=2), LLAMA, {}, r"not written yet.*format=vllm.*convert_hf_to_gguf"),
        ("gguf", Eagle3Options(**DEEP), LLAMA, {}, r"not written yet.*not eagle3.*format=vllm"),
    ],
)
def test_what_a_format_cannot_carry_is_refused_with_what_works(
    form: str, options: Any, target: Target, config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=words):
        exported(trained(options, target, **config), form, tmp_path / "out", target)
    assert list(tmp_path.iterdir()) == []


def test_a_reduced_vocabulary_of_eagle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no reduced vocabulary.*draft\.vocab_size=null"):
        exported(trained(EagleOptions(), ids=IDS), "sglang", tmp_path / "out")


def test_gemmas_scaled_embeddings_go_to_vllm(tmp_path: Path) -> None:
    draft = trained(Eagle3Options(**DEEP), GEMMA, IDS)
    exported(draft, "vllm", tmp_path / "out", GEMMA)
    rows = load_file(tmp_path / "out" / "model.safetensors")["embed_tokens.weight"]
    bare = GEMMA.model.get_input_embeddings().weight
    torch.testing.assert_close(rows, bare * GEMMA.config.hidden_size**0.5)


def test_a_writer_that_loses_something_is_caught_and_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspec.interop import bundle

    write = bundle.write

    def forgetful(*arguments: Any) -> Any:
        checkpoint = write(*arguments)
        checkpoint.config["norm_output"] = False
        return checkpoint

    monkeypatch.setattr(bundle, "write", forgetful)
    with pytest.raises(UserError, match="is another draft"):
        exported(trained(Eagle3Options(**DEEP, normalised_feedback=True), ids=IDS), "vllm", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_manifest_has_every_sum_and_the_card_the_command(tmp_path: Path) -> None:
    exported(trained(Eagle3Options(**DEEP), ids=IDS), "vllm", tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    assert manifest["sha256"] == sums(tmp_path / "out") and set(manifest["sha256"]) == {
        *("config.json", "model.safetensors", "README.md")
    }
    card = (tmp_path / "out" / "README.md").read_text()
    settings = '{"method": "eagle3", "model": "OUT", "num_speculative_tokens": 3}'
    assert f"vllm serve org/target --speculative-config '{settings}'" in card
    assert 'base_model: "org/target"' in card and "Nothing yet" in card
