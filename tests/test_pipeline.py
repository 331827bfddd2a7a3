"""The pipeline calls the three stages in order and stops where one stops."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

import deepspec
from deepspec import pipeline
from deepspec.config.schema import (
    Config,
    EvaluateConfig,
    FeaturesConfig,
    FeatureSource,
    Precision,
    TargetConfig,
    Tracker,
    TrainConfig,
)
from deepspec.errors import UserError

CONFIG = Config(name="x", target=TargetConfig(name="t", path="p"))


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Config]]:
    """The stages, replaced by ones that only write down that they were called."""
    calls: list[tuple[str, Config]] = []
    for name in ("prepare", "capture", "train", "evaluate"):
        stage = ModuleType(f"deepspec.{name}")
        vars(stage)["run"] = lambda config, name=name: calls.append((name, config))
        monkeypatch.setitem(sys.modules, stage.__name__, stage)
        monkeypatch.setattr(deepspec, name, stage, raising=False)
    return calls


def test_three_stages_in_order(called: list[tuple[str, Config]], capsys: pytest.CaptureFixture[str]) -> None:
    pipeline.run(CONFIG)
    assert called == [("prepare", CONFIG), ("train", CONFIG), ("evaluate", CONFIG)]
    said = capsys.readouterr().out
    assert "[1/3] prepare" in said and "[3/3] evaluate" in said
    assert said.splitlines()[-1].startswith("total ")


def test_a_feature_store_is_captured_before_training(called: list[tuple[str, Config]]) -> None:
    pipeline.run(replace(CONFIG, features=FeaturesConfig(source=FeatureSource.store)))
    assert [name for name, _ in called] == ["prepare", "capture", "train", "evaluate"]


def test_a_stage_that_stops_stops_the_rest(
    called: list[tuple[str, Config]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(config: Config) -> None:
        raise UserError("No prompts.")

    monkeypatch.setattr(sys.modules["deepspec.train"], "run", broken)
    with pytest.raises(UserError, match="No prompts"):
        pipeline.run(CONFIG)
    assert [name for name, _ in called] == ["prepare"]


@pytest.mark.parametrize(
    ("train", "evaluate", "words"),
    [
        (TrainConfig(precision=Precision.fp16), EvaluateConfig(), "fp16 needs a GPU"),
        (TrainConfig(tracker=Tracker.trackio), EvaluateConfig(), r"pip install trackio"),
        (TrainConfig(), EvaluateConfig(prompts="nowhere.jsonl"), r"evaluate\.prompts: .*nowhere\.jsonl"),
        (TrainConfig(), EvaluateConfig(prompts="broken.jsonl"), r"broken\.jsonl, line 2"),
    ],
)
def test_what_would_stop_a_later_stage_stops_the_first(
    called: list[tuple[str, Config]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    train: TrainConfig,
    evaluate: EvaluateConfig,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "trackio", None)
    (tmp_path / "broken.jsonl").write_text('{"prompt": "Why?"}\n{\n')
    target = TargetConfig(name="t", path="p", device="cpu")
    with pytest.raises(UserError, match=words):
        pipeline.run(Config(name="x", target=target, train=train, evaluate=evaluate))
    assert called == []


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3599.7, "1 h 00 min"),
        (3725, "1 h 02 min"),
    ],
)
def test_time_in_words(seconds: float, words: str) -> None:
    assert pipeline.minutes(seconds) == words
