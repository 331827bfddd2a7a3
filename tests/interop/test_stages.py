"""The stages: a trained run exported, imported into another run, measured there and trained further."""

import copy
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspec import evaluate, export, import_draft
from deepspec.artifacts import new_artifact
from deepspec.config.schema import Config, DecodeConfig, Dtype, EvaluateConfig, Format, TargetConfig
from deepspec.drafts.options import Eagle3Options
from deepspec.drafts.registry import new_draft
from deepspec.errors import UserError
from deepspec.interop.card import licence_of
from deepspec.target import load_target
from deepspec.training.checkpoint import save_draft
from deepspec.training.saved_draft import load_draft, start_from
from tests.config.processes import ROOT, environment
from tests.data.toy_tokenizers import chatml
from tests.models import tiny_model

OPTIONS = Eagle3Options(vocab_size=40, ttt_steps=3, capture_layers=[0, 1, 2])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer, tiny = chatml(), copy.deepcopy(tiny_model("llama")).float()
    torch.manual_seed(0)
    tiny.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    tiny.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: llama3.1\n---\nA tiny one.\n")
    return folder


@pytest.fixture
def config(model: Path, tmp_path: Path) -> Config:
    """A run whose draft is there."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "Hello number {i}"}}\n' for i in range(3)))
    made = Config(
        name="test",
        target=TargetConfig(name="tiny", path=str(model), dtype=Dtype.float32, device="cpu"),
        draft=OPTIONS,
        decode=DecodeConfig(k=3, max_new_tokens=8),
        evaluate=EvaluateConfig(
            prompts=str(prompts), max_prompts=3, sweep=[], baselines=False, bootstrap=100, warmup_prompts=0
        ),
        out=str(tmp_path / "run"),
    )
    target = load_target(made.target)
    torch.manual_seed(1)
    draft = new_draft(OPTIONS, target, torch.arange(40) * 2)
    manifest = {
        "fingerprint": "of-this-draft",
        "recipe": {},
        "target": target.identity(),
        "capture_layers": draft.capture_layers,
        "warnings": [],
    }
    with new_artifact(Path(made.out) / "draft", manifest) as folder:
        save_draft(draft, folder, draft.state_dict())
    return made


@pytest.mark.parametrize("form", [Format.vllm, Format.sglang])
def test_out_and_in_again_measured_and_trained_further(
    config: Config, form: Format, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = export.run(dataclasses.replace(config, format=form, out_dir=str(tmp_path / "served")))
    said = capsys.readouterr().out
    assert "gave the same logits when read back" in said
    assert ("vllm serve" if form is Format.vllm else "sglang.launch_server") in said
    card = (out / "README.md").read_text()
    assert 'license: "llama3.1"' in card and "of-this-draft" in card
    other = dataclasses.replace(config, out=str(tmp_path / "other"), import_from=str(out))
    folder = import_draft.run(other)
    first, second = load_draft(Path(config.out) / "draft"), load_draft(folder)
    for name, tensor in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], tensor), name
    evaluate.run(other)
    result = json.loads((tmp_path / "other" / "evaluation" / "result.json").read_text())
    assert result["summary"]["equality"] == {"compared": 3, "equal": 3, "proven_ties": 0, "unproven": 0}
    assert "what it was trained on is not known" in result["warnings"][0]
    fresh = new_draft(OPTIONS, load_target(config.target), torch.arange(40) * 2)
    start_from(fresh, folder)
    assert torch.equal(fresh.fc.weight, first.fc.weight)
    back = export.run(dataclasses.replace(other, format=form))
    assert (back / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    assert "acceptance length τ at K = 3" in (back / "README.md").read_text()


def test_nothing_is_replaced_unasked(config: Config, tmp_path: Path) -> None:
    there = tmp_path / "mine"
    there.mkdir()
    (there / "thesis.txt").write_text("x")
    with pytest.raises(UserError, match="is no export of deepspec"):
        export.run(dataclasses.replace(config, out_dir=str(there), overwrite=True))
    folder = export.run(config)
    assert folder == Path(config.out) / "export" / "vllm"
    with pytest.raises(UserError, match=r"an export is there already.*overwrite=true"):
        export.run(config)
    export.run(dataclasses.replace(config, overwrite=True))
    with pytest.raises(UserError, match="the draft there is from training"):
        import_draft.run(dataclasses.replace(config, import_from=str(folder)))


def test_a_changed_draft_is_not_exported(config: Config) -> None:
    weights = Path(config.out) / "draft" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with pytest.raises(UserError, match=r"damaged"):
        export.run(config)


def test_what_is_missing_is_said(config: Config, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"No draft is named.*from=DIR"):
        import_draft.run(config)
    nowhere = dataclasses.replace(config, out=str(tmp_path / "x"), import_from=str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="nowhere is not a folder"):
        import_draft.run(nowhere)
    with pytest.raises(UserError, match=r"-m deepspec\.train"):
        export.run(dataclasses.replace(config, out=str(tmp_path / "x")))


def test_a_target_without_a_card_has_an_unknown_licence(tmp_path: Path) -> None:
    assert licence_of(str(tmp_path), {}) == "unknown"
    assert licence_of(str(tmp_path), {"weights": "b179c9523d0e6a0f"}) == "apache-2.0"


def program(stage: str, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command: list[Any] = [sys.executable, "-m", f"deepspec.{stage}", "+recipe=quickstart", *words]
    return subprocess.run(
        command, cwd=folder, env=environment(ROOT), capture_output=True, text=True, check=False, timeout=120
    )


def test_from_the_shell(config: Config, tmp_path: Path) -> None:
    """`from=` reaches the configuration, though it is a word of Python; an unknown format is named."""
    done = program("import_draft", f"from={tmp_path / 'nowhere'}", "--cfg", "job", folder=tmp_path)
    assert f"import_from: {tmp_path / 'nowhere'}" in done.stdout
    done = program("export", "format=onnx", folder=tmp_path)
    assert done.returncode == 1
    assert "`format` takes one of vllm, speculators, sglang, deepspec, gguf, hf" in done.stderr
