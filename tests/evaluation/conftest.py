"""A run's folder to evaluate."""

from functools import partial
from pathlib import Path

import pytest

from deepspec import evaluate as stage
from deepspec import pair
from deepspec.config.schema import Config
from deepspec.target import Target
from tests.evaluation.tiny import load_as, make_config, make_run, make_target


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make_config(tmp_path / "runs" / "tiny")


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Target:
    target = make_target()
    monkeypatch.setattr(stage, "load_target", partial(load_as, target))
    monkeypatch.setattr(pair, "load_target", partial(load_as, target))
    return target


@pytest.fixture
def trained(config: Config, target: Target) -> Path:
    return make_run(config, target)
