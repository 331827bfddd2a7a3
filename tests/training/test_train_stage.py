"""`deepspec.train.run` on a small real target: what it writes, what it refuses, what it does not do twice."""

import copy
import dataclasses
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspec import train as stage
from deepspec.artifacts import fingerprint, new_artifact, plain
from deepspec.config.schema import Config, DataConfig, Dtype, TargetConfig, TrainConfig
from deepspec.data.conversation import Conversation
from deepspec.data.dataset import Document, save_draft_vocab, save_rows
from deepspec.drafts.eagle3 import Eagle3Options
from deepspec.errors import UserError
from deepspec.target import load_target
from deepspec.training import history
from deepspec.training.optimiser import Stepper, StepResult
from deepspec.training.saved_draft import load_draft
from tests.config.processes import environment
from tests.data.toy_tokenizers import chatml
from tests.models import tiny_model

VOCAB_SIZE = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer, on disk."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer, tiny = chatml(), copy.deepcopy(tiny_model("llama")).float()
    torch.manual_seed(0)
    tiny.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    tiny.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def document(split: Any, seed: int) -> Document:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 90, (20,), generator=draw).tolist()
    conversation = Conversation(id=str(seed), group=str(seed), category="x", source="x", messages=())
    return Document(conversation, (), tokens, [0] * 5 + [1] * 15, "regenerated", split)


@pytest.fixture
def config(model: Path, tmp_path: Path) -> Config:
    """A recipe whose data is there."""
    made = Config(
        name="test",
        target=TargetConfig(name="tiny", path=str(model), dtype=Dtype.float32, device="cpu"),
        draft=Eagle3Options(vocab_size=VOCAB_SIZE, ttt_steps=2),
        data=DataConfig(max_length=48),
        train=TrainConfig(epochs=2.0, batch_size=2, log_every=2, eval_every=4, eval_rows=2, eval_steps=3),
        out=str(tmp_path / "run"),
    )
    documents = [document("train", seed) for seed in range(12)]
    documents += [document("held_out", seed) for seed in range(100, 104)]
    manifest = {
        "fingerprint": fingerprint("some data"),
        "config": plain(made.data),
        "inputs": {"target": load_target(made.target).identity(), "draft_vocab_size": VOCAB_SIZE},
    }
    with new_artifact(Path(made.out) / "data", manifest) as folder:
        for split in ("train", "held_out"):
            save_rows(folder, split, documents, 48, 0)
        save_draft_vocab(folder, torch.arange(VOCAB_SIZE) * 2)
    return made


def change(config: Config, **sections: dict[str, Any]) -> Config:
    """A copy with other values, by section."""
    new = {name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    return dataclasses.replace(config, **new)


def edit_manifest(config: Config, edit: Callable[[dict[str, Any]], None]) -> None:
    path = Path(config.out) / "data" / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    edit(manifest)
    path.write_text(json.dumps(manifest), encoding="utf-8")


def test_a_draft_is_trained_saved_and_not_trained_again(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = stage.run(config)
    assert folder == Path(config.out) / "draft"
    said = capsys.readouterr().out
    assert "1 process on cpu" in said
    assert "offline τ" in said
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    draft = load_draft(folder)
    records = history.read(Path(config.out) / "history.jsonl")
    assert manifest["target"] == load_target(config.target).identity()
    assert manifest["capture_layers"] == draft.capture_layers
    assert manifest["data"] == fingerprint("some data")
    assert manifest["training"]["step"] == records[-1]["step"] == 6
    assert manifest["training"]["evaluation"]["tau"] == records[-1]["tau"]
    assert manifest["warnings"] == []
    assert draft.target_ids.tolist() == list(range(0, 2 * VOCAB_SIZE, 2))
    before = (folder / "model.safetensors").stat().st_mtime_ns
    stage.run(change(config, train={"log_every": 1}))
    assert "complete already" in capsys.readouterr().out
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    stage.run(change(config, train={"resume": "never"}))
    assert (folder / "model.safetensors").stat().st_mtime_ns != before


def test_skipped_steps_are_a_warning_in_the_manifest(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    take, calls = Stepper.take, 0

    def sometimes(self: Stepper, *arguments: Any, **more: Any) -> StepResult:
        nonlocal calls
        calls += 1
        result = take(self, *arguments, **more)
        return dataclasses.replace(result, finite=calls not in (2, 5))

    monkeypatch.setattr(Stepper, "take", sometimes)
    folder = stage.run(config)
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["training"]["skipped"] == 2
    (warning,) = manifest["warnings"]
    assert "2 of 6 training steps were skipped" in warning
    assert f"warning: {warning}" in capsys.readouterr().out


def test_the_same_seed_gives_the_same_draft_and_another_another(config: Config, tmp_path: Path) -> None:
    def trained(out: str, seed: int) -> bytes:
        (tmp_path / out).mkdir()
        (tmp_path / out / "data").symlink_to(Path(config.out) / "data")
        here = dataclasses.replace(change(config, train={"seed": seed}), out=str(tmp_path / out))
        return (stage.run(here) / "model.safetensors").read_bytes()

    assert trained("a", 0) == trained("b", 0) != trained("c", 1)


def test_accelerate_launch_with_our_file_trains_with_two_processes(config: Config, model: Path) -> None:
    """The launcher, Hydra and the stage together; in bf16, of which torch has a warning that nobody needs."""
    root = Path(__file__).parents[2]
    launch = ["-m", "accelerate.commands.launch", "--config_file", str(root / "conf/accelerate/ddp_cpu.yaml")]
    settings = {
        "name": "test",
        "target": "hf",
        "target.path": model,
        "target.name": "tiny",
        "target.dtype": "float32",
        "target.device": "cpu",
        "draft.vocab_size": VOCAB_SIZE,
        "draft.ttt_steps": 2,
        "data.max_length": 48,
        "train.precision": "bf16",
        "train.max_steps": 2,
        "train.eval_steps": 3,
        "out": config.out,
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    done = subprocess.run(
        [sys.executable, *launch, "--main_process_port", "0", "-m", "deepspec.train", *overrides],
        cwd=root,
        env={**environment(root), "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "2 processes on cpu, backend gloo, ddp, precision bf16; effective batch 2 rows" in done.stdout
    assert "Mismatch dtype" not in done.stderr + done.stdout
    manifest = json.loads((Path(config.out) / "draft" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["training"]["step"] == 2 and manifest["recipe"]["effective_batch"] == 2
    assert load_draft(Path(config.out) / "draft").target_ids is not None


def test_missing_data_names_the_command_that_makes_it(config: Config) -> None:
    with pytest.raises(UserError, match=r"python.* -m deepspec\.prepare"):
        stage.run(dataclasses.replace(config, out=config.out + "-other"))


@pytest.mark.parametrize("lost", ["inputs", "config", "fingerprint"])
def test_a_damaged_data_manifest_is_a_sentence(config: Config, lost: str) -> None:
    edit_manifest(
        config,
        lambda manifest: manifest.update({lost: None}) if lost != "fingerprint" else manifest.pop(lost),
    )
    with pytest.raises(UserError, match=rf"data/manifest\.json is damaged \(no {lost}.*deepspec\.prepare"):
        stage.run(config)


def test_data_of_other_settings_is_refused_by_name(config: Config) -> None:
    with pytest.raises(UserError, match=r"data\.max_length was 48, is 64"):
        stage.run(change(config, data={"max_length": 64}))
    with pytest.raises(UserError, match=r"draft\.vocab_size was 40, is 50"):
        stage.run(change(config, draft={"vocab_size": 50}))


def test_prompts_count_by_content_wherever_they_lie(config: Config, tmp_path: Path) -> None:
    first, moved = tmp_path / "first.jsonl", tmp_path / "moved.jsonl"
    first.write_text('{"prompt": "a"}\n')
    sha = hashlib.sha256(first.read_bytes()).hexdigest()
    edit_manifest(config, lambda manifest: manifest["config"].update(prompts=str(first)))
    edit_manifest(config, lambda manifest: manifest["inputs"].update(sources={"prompts": sha}))
    stage.run(change(config, data={"prompts": str(first)}))
    first.rename(moved)
    stage.run(change(config, data={"prompts": str(moved)}))
    stage.run(change(config, data={"prompts": str(first)}))  # the data stand without their source
    with pytest.raises(UserError, match=r"other\.jsonl does not exist"):
        stage.run(change(config, data={"prompts": str(tmp_path / "other.jsonl")}))
    with pytest.raises(UserError, match=r"data\.prompts was .*first\.jsonl, is None"):
        stage.run(config)
    for path in (moved, first):
        path.write_text('{"prompt": "edited"}\n')
        with pytest.raises(UserError, match=rf"data\.prompts was .*{sha[:16]}.*, is .*{path.name}"):
            stage.run(change(config, data={"prompts": str(path)}))


def test_a_moved_target_goes_on_and_is_not_trained_again(
    config: Config, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = stage.run(config)
    moved = shutil.copytree(model, tmp_path / "moved")
    elsewhere = change(config, target={"name": str(moved), "path": str(moved)})
    for old in (folder, *(Path(config.out) / "checkpoints").glob("step-*")):  # as earlier versions wrote them
        manifest = json.loads((old / "manifest.json").read_text(encoding="utf-8"))
        manifest["recipe"]["target"]["name"] = "tiny"
        (old / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    capsys.readouterr()
    stage.run(elsewhere)
    assert "complete already" in capsys.readouterr().out
    shutil.rmtree(folder)
    stage.run(elsewhere)
    assert "Resuming from" in capsys.readouterr().out


def test_data_of_another_tokenizer_is_refused_even_where_other_targets_are_allowed(config: Config) -> None:
    edit_manifest(config, lambda manifest: manifest["inputs"]["target"].update(tokenizer="other"))
    with pytest.raises(UserError, match="tokenizer 'other'"):
        stage.run(change(config, target={"allow_other_target": True}))


def test_data_of_other_weights_is_a_choice_and_recorded(config: Config) -> None:
    edit_manifest(config, lambda manifest: manifest["inputs"]["target"].update(weights="other"))
    with pytest.raises(UserError, match=r"target\.allow_other_target=true"):
        stage.run(config)
    folder = stage.run(change(config, target={"allow_other_target": True}))
    (warning,) = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["warnings"]
    assert "other" in warning


def test_a_draft_or_checkpoint_of_another_recipe_is_refused(config: Config) -> None:
    draft = stage.run(config)
    rule = r"A stage replaces nothing unasked.*out=.*overwrite=true"
    with pytest.raises(UserError, match=rf"train\.learning_rate was 0\.001, is 0\.1.*{rule}"):
        stage.run(change(config, train={"learning_rate": 0.1}))
    with pytest.raises(UserError, match=r"train\.learning_rate was 0\.001, is 0\.1"):
        stage.run(change(config, train={"learning_rate": 0.1, "resume": "never"}))
    shutil.rmtree(draft)
    with pytest.raises(
        UserError, match=rf"checkpoints/(step|best)-\d+ .*draft\.ttt_steps was 2, is 3.*{rule}"
    ):
        stage.run(change(config, draft={"ttt_steps": 3}))
    stage.run(change(config, draft={"ttt_steps": 3}, train={"resume": "never"}))
    edit_manifest(config, lambda manifest: manifest.update(fingerprint="new data"))
    with pytest.raises(UserError, match=r"data was .* is 'new data'"):
        stage.run(config)


def test_overwrite_replaces_a_draft_and_its_checkpoints_once(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.run(config)
    other = dataclasses.replace(change(config, train={"learning_rate": 0.1}), overwrite=True)
    folder = stage.run(other)
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["recipe"]["train"]["learning_rate"] == 0.1 and manifest["training"]["step"] == 6
    assert "Resuming" not in capsys.readouterr().out
    shutil.rmtree(folder)
    stage.run(other)  # its own checkpoints are no others
    assert "Resuming from" in capsys.readouterr().out
    stage.run(other)
    assert "complete already" in capsys.readouterr().out


def test_a_layer_the_target_lacks_is_named(config: Config) -> None:
    with pytest.raises(UserError, match="Layer 9 does not exist"):
        stage.run(change(config, draft={"capture_layers": [0, 9]}))


def test_auto_prepare_makes_what_is_missing(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspec import prepare

    made: list[Config] = []
    monkeypatch.setattr(prepare, "run", made.append)
    away = dataclasses.replace(config, auto_prepare=True, out=config.out + "-other")
    with pytest.raises(UserError, match=r"deepspec\.prepare"):
        stage.run(away)  # the stand-in makes nothing
    assert made == [away]
    stage.run(dataclasses.replace(config, auto_prepare=True))
    assert made == [away]


def test_a_lost_or_damaged_draft_vocabulary_is_not_the_whole(config: Config) -> None:
    folder = Path(config.out) / "data"
    path = folder / "draft_vocab.safetensors"
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(UserError, match=rf"{path} is damaged.*Remove {folder}"):
        stage.run(config)
    edit_manifest(config, lambda manifest: manifest.pop("sha256"))  # an artifact of before the sums
    with pytest.raises(UserError, match="draft vocabulary is damaged"):
        stage.run(config)
    path.unlink()
    edit_manifest(config, lambda manifest: manifest.update(draft_vocab={"full": False}))
    with pytest.raises(UserError, match="lost its draft vocabulary"):
        stage.run(config)


def test_a_flipped_byte_of_data_or_draft_is_noticed(config: Config) -> None:
    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    draft = stage.run(config) / "model.safetensors"
    flip(draft)
    with pytest.raises(UserError, match=rf"{draft} is damaged.*Remove {draft.parent} .*deepspec\.train"):
        stage.run(config)
    flip(draft)
    stage.run(config)
    (rows,) = (Path(config.out) / "data" / "train").glob("*.arrow")
    flip(rows)
    with pytest.raises(UserError, match=rf"{rows} is damaged.*deepspec\.prepare"):
        stage.run(config)


def test_an_artifact_without_a_draft_vocabulary_means_the_whole(config: Config) -> None:
    data = Path(config.out) / "data"
    (data / "draft_vocab.safetensors").unlink()
    edit_manifest(config, lambda manifest: manifest["sha256"].pop("draft_vocab.safetensors"))
    edit_manifest(config, lambda manifest: manifest["inputs"].update(draft_vocab_size=None))
    folder = stage.run(change(config, draft={"vocab_size": None}))
    assert load_draft(folder).target_ids is None
