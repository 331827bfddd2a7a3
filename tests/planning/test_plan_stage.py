"""`deepspec.plan` as a stage: its bytes against a real run's files, described machines, targets too large, refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from deepspec import capture, plan, prepare, train
from deepspec.config.schema import Answers, Config, Dtype, FeatureSource, HardwareConfig, StoreFormat
from deepspec.errors import UserError
from deepspec.planning.findings import duration, size
from tests.data.toy_tokenizers import chatml
from tests.planning.tiny import make_config, save_prompts

BOX = HardwareConfig("box", flops=1e14, bandwidth=1e12, memory_gib=80, devices=8)


@pytest.fixture
def config(model: Path, tmp_path: Path) -> Config:
    return make_config(model, save_prompts(tmp_path / "prompts.jsonl", 160), tmp_path / "run")


def found(config: Config) -> dict[str, Any]:
    return json.loads((Path(config.out) / "plan.json").read_text(encoding="utf-8"))


def written(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_bytes_are_those_of_the_run(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    config.data.max_prompts, config.features.source, config.features.max_kl = 160, FeatureSource.store, 100.0
    config.features.format = StoreFormat.int8
    plan.run(config)
    seen, out = found(config), Path(config.out)
    said = capsys.readouterr().out
    assert "memory a device" in said and "together" in said and "int8" in said
    assert set(seen["seconds"]) == {"prepare", "capture", "train", "evaluate"}
    assert seen["total_seconds"] == pytest.approx(sum(seen["seconds"].values()))
    prepare.run(config), capture.run(config), train.run(config)
    assert seen["disk"]["data"] == pytest.approx(written(out / "data"), rel=0.1)
    shards = sum(path.stat().st_size for path in (out / "features").glob("*.safetensors"))
    assert seen["disk"]["features"] == pytest.approx(shards, rel=0.1)
    weights = (out / "draft" / "model.safetensors").stat().st_size
    assert seen["disk"]["draft"] == pytest.approx(weights, rel=0.1)
    newest = max((out / "checkpoints").glob("step-*"), key=lambda path: int(path.name[5:]))
    tensors = sum(
        path.stat().st_size for path in newest.rglob("*.safetensors") if path.name != "random.safetensors"
    )
    assert seen["checkpoint"] == pytest.approx(tensors, rel=0.1)
    plan.run(config)
    again = found(config)
    assert again["data_exist"] and again["seconds"]["prepare"] == 0
    assert again["counts"] == {name: pytest.approx(value, rel=0.1) for name, value in seen["counts"].items()}


def test_a_known_machine_gives_the_utilisation_of_training(config: Config) -> None:
    config.auto_prepare, config.hardware = (
        True,
        HardwareConfig("box", flops=1e12, bandwidth=1e12, memory_gib=8),
    )
    train.run(config)
    lines = (Path(config.out) / "history.jsonl").read_text(encoding="utf-8").splitlines()
    logged = [one for one in map(json.loads, lines) if "loss" in one]
    ratios = {round(one["mfu"] / one["tokens_per_second"] * 1e12) for one in logged}  # operations a token
    (operations,) = ratios
    draft = json.loads((Path(config.out) / "draft" / "manifest.json").read_text(encoding="utf-8"))
    assert draft and 1e4 < operations < 1e8  # six a parameter and more, of some tens of thousands


def test_a_described_machine_needs_no_weights(model: Path, config: Config, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for path in model.iterdir():
        if path.suffix != ".safetensors":
            (bare / path.name).write_bytes(path.read_bytes())
    config.target.path, config.hardware, config.data.answers = str(bare), BOX, Answers.regenerated
    plan.run(config)
    seen = found(config)
    assert seen["devices"] == 8 and seen["free"] is None
    assert seen["generated_tokens"] == pytest.approx(16 * 160)  # as long as they may be
    assert all(seconds > 0 for seconds in seen["seconds"].values())
    config.plan.answer_tokens = 4
    plan.run(config)
    assert found(config)["generated_tokens"] == pytest.approx(4 * 160, rel=0.1)


@pytest.fixture
def large(config: Config, tmp_path: Path) -> Config:
    """A target of 8 B parameters, of which nothing but a configuration and a tokenizer is there."""
    folder = tmp_path / "large"
    transformers.LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
    ).save_pretrained(folder)  # fmt: skip
    chatml().save_pretrained(folder)
    config.target.path, config.target.dtype, config.hardware = str(folder), Dtype.bfloat16, BOX
    return config


def test_a_target_far_too_large_for_this_machine(large: Config) -> None:
    plan.run(large)
    seen = found(large)
    assert seen["parameters"]["target"] == pytest.approx(8.03e9, rel=0.01)  # as published
    assert seen["memory"]["prepare"]["target"] == 2 * seen["parameters"]["target"]


def test_what_does_not_fit_is_refused_with_the_knob(large: Config) -> None:
    large.hardware = HardwareConfig("small", flops=1e14, bandwidth=1e12, memory_gib=18)
    large.data.answers, large.data.batch_size = Answers.regenerated, 512
    large.data.max_new_tokens = 256
    with pytest.raises(UserError, match=r"does not fit.*prepare takes .* GiB of 18\.00 GiB.*data\."):
        plan.run(large)
    assert found(large)["problems"]


def test_a_full_disk_is_foreseen(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr(plan.shutil, "disk_usage", lambda path: Usage)
    with pytest.raises(UserError, match=r"of disk, and 0\.0 MiB are free: .*train\.keep_last=1"):
        plan.run(config)


def test_an_unreachable_hub_is_one_sentence(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> Any:
        raise UserError("The target 'a/b' is no folder here, and the Hugging Face hub cannot be reached.")

    monkeypatch.setattr(plan, "load_outline", unreachable)
    config.hardware = BOX
    with pytest.raises(
        UserError, match=r"hub cannot be reached.*lacks.*layers.*vocabulary.*target\.path=\./FOLDER"
    ):
        plan.run(config)


def test_a_machine_described_too_little_is_refused(config: Config) -> None:
    config.hardware = HardwareConfig("box", memory_gib=8)
    with pytest.raises(UserError, match=r"hardware=box lacks hardware\.flops"):
        plan.run(config)
    config.hardware = HardwareConfig("box", flops=1e12, bandwidth=1e12)
    with pytest.raises(UserError, match=r"hardware=box lacks hardware\.memory_gib"):
        plan.run(config)


def test_numbers_for_people() -> None:
    assert [size(x) for x in (3 * 2**20, 5 * 2**30, 2 * 2**40)] == ["3.0 MiB", "5.00 GiB", "2.00 TiB"]
    assert [duration(x) for x in (None, 7, 600, 7380, 400_000)] == [
        "?",
        "7 s",
        "10 min",
        "2 h 03 min",
        "4 d 15 h",
    ]
