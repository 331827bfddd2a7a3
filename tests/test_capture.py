"""`deepspec.capture` and training from its store, on a small real target."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from deepspec import capture
from deepspec import train as stage
from deepspec.config.schema import Config, FeatureSource, StoreFormat
from deepspec.drafts.options import Eagle3Options, MedusaOptions, StandaloneOptions
from deepspec.errors import UserError
from deepspec.target import Edges
from deepspec.training import history
from tests.training.test_train_stage import VOCAB_SIZE, change, config, model

__all__ = ["config", "model"]  # fixtures
STORE = {"source": FeatureSource.store, "format": StoreFormat.fp32}


def trained(
    config: Config, tmp_path: Path, name: str
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """The weights and history of a run of this configuration in a copy of its folder."""
    folder = stage.run(config)
    records = history.read(Path(config.out) / "history.jsonl")
    kept = load_file(folder / "model.safetensors")
    folder.rename(tmp_path / name)
    for path in (Path(config.out) / "checkpoints").glob("*"):
        path.rename(tmp_path / f"{name}-{path.name}")
    (Path(config.out) / "history.jsonl").unlink()
    return kept, records


@pytest.mark.parametrize(
    "options",
    [
        Eagle3Options(vocab_size=VOCAB_SIZE, ttt_steps=2, start="target"),
        MedusaOptions(heads=2, vocab_size=VOCAB_SIZE),
        StandaloneOptions(layers=2, vocab_size=VOCAB_SIZE),
    ],
    ids=lambda options: options.algorithm,
)
def test_training_from_a_store_is_training_beside_the_target(
    options: Any, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.draft = options
    weights, records = trained(config, tmp_path, "online")
    assert capture.run(change(config, features=STORE)) == Path(config.out) / "features"
    seen: list[Any] = []
    others = [
        one for one in gc.get_objects() if type(one) is LlamaDecoderLayer
    ]  # of other tests of this process
    real = stage.train

    def watched(draft: Any, rows: Any, held_out: Any, run: Any) -> Any:
        gc.collect()
        layers = [one for one in gc.get_objects() if type(one) is LlamaDecoderLayer]
        known = {id(one) for one in [*others, *draft.modules()]}
        seen.append((run.target, [one for one in layers if id(one) not in known]))
        return real(draft, rows, held_out, run)

    monkeypatch.setattr(stage, "train", watched)
    stored, found = trained(change(config, features=STORE), tmp_path, "store")
    ((target, layers),) = seen
    assert isinstance(target, Edges)
    assert layers == []  # of the target's layers none is alive while the draft trains
    assert stored.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(stored[name], value, rtol=1e-4, atol=1e-4)
    assert [one["step"] for one in found] == [one["step"] for one in records]
    assert found[-1]["tau"] == pytest.approx(records[-1]["tau"])
    assert any("data_wait" in one.get("time", {}) for one in found)


def test_a_missing_store_stops_with_the_command_and_auto_prepare_makes_it(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = change(config, features={**STORE, "format": StoreFormat.int8})
    with pytest.raises(UserError, match=r"features does not exist.*python -m deepspec.capture"):
        stage.run(wanted)
    wanted.auto_prepare = True
    stage.run(wanted)
    said = capsys.readouterr().out
    assert "top-1 agreement" in said
    manifest = json.loads((Path(config.out) / "draft" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["recipe"]["features"] == "int8"
    capture.run(wanted)
    assert "complete already" in capsys.readouterr().out


def test_auto_says_what_it_takes(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    auto = change(config, features={"source": FeatureSource.auto})
    assert capture.run(auto) is None  # so little fits into memory
    assert (
        "features.source=auto: online, as all features fit into train.keep_features_gib=1"
        in capsys.readouterr().out
    )
    stage.run(auto)
    assert "online, as there is no store" in capsys.readouterr().out
    assert capture.run(change(auto, train={"keep_features_gib": 0.0})) is not None
    assert "a store, as it takes" in capsys.readouterr().out


def test_a_damaged_shard_stops_training(config: Config) -> None:
    wanted = change(config, features=STORE)
    capture.run(wanted)
    shard = next((Path(config.out) / "features").glob("train-*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-5] ^= 4
    shard.write_bytes(content)
    with pytest.raises(UserError, match=rf"{shard} is damaged.*python -m deepspec.capture"):
        stage.run(wanted)
    assert not (Path(config.out) / "draft").exists()


def test_a_store_of_another_target_is_refused_even_where_other_targets_are_allowed(config: Config) -> None:
    wanted = change(config, features=STORE)
    capture.run(wanted)
    manifest = Path(config.out) / "features" / "manifest.json"
    content = json.loads(manifest.read_text(encoding="utf-8"))
    content["made_of"]["target"]["weights"] = "others"
    manifest.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(UserError, match=r"target\.weights was 'others'"):
        stage.run(change(wanted, target={"allow_other_target": True}))


def test_a_layer_out_of_range_is_named(config: Config) -> None:
    config.draft = Eagle3Options(vocab_size=VOCAB_SIZE, ttt_steps=2, capture_layers=[0, 9])
    with pytest.raises(UserError, match=r"Layer 9 does not exist.*0 to 3.*draft\.capture_layers"):
        capture.run(change(config, features=STORE))


def test_the_targets_own_device_trains_the_same(config: Config, tmp_path: Path) -> None:
    weights, _ = trained(config, tmp_path, "one")
    others, _ = trained(change(config, features={"devices": ["cpu"]}), tmp_path, "two")
    for name, value in weights.items():
        assert torch.equal(others[name], value)
