"""A folder in which the documentation's commands find what they name."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from deepspec.config.store import register
from deepspec.drafts.registry import option_classes
from tests.docs.pages import ROOT, recipes


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the reader stands: the pages' own recipes, and a run that has been evaluated."""
    (tmp_path / "recipes").mkdir()
    for name, text in recipes().items():
        (tmp_path / "recipes" / f"{name}.yaml").write_text(text, encoding="utf-8")
    evaluation = tmp_path / "runs" / "quickstart" / "evaluation"
    evaluation.mkdir(parents=True)
    shutil.copy(ROOT / "results" / "quickstart" / "result.json", evaluation)
    monkeypatch.chdir(tmp_path)
    GlobalHydra.instance().clear()
    register("docs", option_classes())
    yield tmp_path
    GlobalHydra.instance().clear()
