"""A tiny target on disk."""

from pathlib import Path

import pytest

from tests.planning.tiny import save_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))
