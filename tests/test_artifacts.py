"""Artifact folders stay whole when a rename fails."""

import os
from pathlib import Path

import pytest

from deepspec.artifacts import MANIFEST, new_artifact
from deepspec.errors import UserError


def test_a_failed_rename_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data"
    with new_artifact(folder, {"which": "old"}) as new:
        (new / "rows").write_text("old rows")
    before = (folder / MANIFEST).read_bytes()
    rename = os.replace

    def failing(source: Path, to: Path) -> None:
        if ".partial-" in Path(source).name and Path(to) == folder:
            raise OSError(5, "Input/output error")
        rename(source, to)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(UserError, match="untouched"), new_artifact(folder, {"which": "new"}) as new:
        (new / "rows").write_text("new rows")
    assert (folder / "rows").read_text() == "old rows" and (folder / MANIFEST).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
