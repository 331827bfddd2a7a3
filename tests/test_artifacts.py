"""Artifact folders: whole or not there, and every later change of a byte is noticed."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepspec.artifacts import MANIFEST, check_places, check_whole, damage, new_artifact, read_manifest
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


# Writes an artifact where no file may grow beyond 20,000 bytes: the libraries' own errors of failed writes.
NO_ROOM = """
import resource, signal, sys
from pathlib import Path
import datasets, pyarrow, torch
from safetensors.torch import save_file
from deepspec.artifacts import new_artifact
from deepspec.errors import UserError

folder = Path(sys.argv[1])
tensor = torch.arange(100_000)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
table = datasets.Dataset(pyarrow.table({"x": tensor.numpy()}))
for write in (
    lambda file: torch.save({"x": tensor}, file),
    lambda file: save_file({"x": tensor}, file),
    lambda file: table.save_to_disk(str(file), num_shards=1),
):
    try:
        with new_artifact(folder, {}) as new:
            write(new / "big")
    except UserError as error:
        print(error)
"""


def test_a_write_that_fails_is_a_sentence_and_leaves_what_was_there(artifact: Path) -> None:
    before = {path: path.read_bytes() for path in artifact.rglob("*") if path.is_file()}
    done = subprocess.run(
        [sys.executable, "-c", NO_ROOM, artifact], capture_output=True, text=True, check=False
    )
    of_torch, of_safetensors, of_datasets = done.stdout.splitlines()
    for said in (of_torch, of_safetensors, of_datasets):
        assert said.startswith(f"Could not write {artifact}") and "GiB free" in said and "untouched" in said
    assert {path: path.read_bytes() for path in artifact.rglob("*") if path.is_file()} == before
    assert [path.name for path in artifact.parent.iterdir()] == ["data"]


def test_a_defect_while_an_artifact_is_written_is_no_full_disk(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="mat1"), new_artifact(tmp_path / "data", {}):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    with new_artifact(folder, {}) as new:
        (new / "rows").write_bytes(b"rows")
        (new / "deep").mkdir()
        (new / "deep" / "more").write_bytes(b"\0" * 5000)
    return folder


def test_the_manifest_has_the_sum_of_every_file(artifact: Path) -> None:
    manifest = json.loads((artifact / MANIFEST).read_text())
    expected = {"rows": b"rows", "deep/more": b"\0" * 5000}
    assert manifest["sha256"] == {name: hashlib.sha256(text).hexdigest() for name, text in expected.items()}
    assert damage(artifact, manifest) is None


def test_one_flipped_bit_and_a_lost_file_are_named_with_the_remedy(artifact: Path) -> None:
    manifest = read_manifest(artifact, "make it")
    path = artifact / "deep" / "more"
    path.write_bytes(b"\0" * 4999 + b"\1")
    with pytest.raises(UserError, match=rf"{path} is damaged.*Remove {artifact} .*: make it"):
        check_whole(artifact, manifest, "make it")
    check_whole(artifact, manifest, "make it", only="rows")
    path.unlink()
    with pytest.raises(UserError, match=rf"{path} is missing.*make it"):
        check_whole(artifact, manifest, "make it")


def test_an_artifact_of_before_the_sums_is_read(artifact: Path) -> None:
    manifest = read_manifest(artifact, "make it")
    del manifest["sha256"]
    (artifact / "rows").unlink()
    check_whole(artifact, manifest, "make it")
    check_whole(artifact, manifest, "make it", only="rows")


@pytest.mark.parametrize(
    "manifest",
    [
        *('{"inputs": 5}', '{"inputs": {"target": null}}', "{}", "[]", "{", "\x00"),
        *(
            f'{{"inputs": {{"target": {{"name": "x"}}}}, "{key}": {value}}}'
            for key, value in (("sha256", 5), ("recipe", '"x"'), ("warnings", '"x"'))
        ),
    ],
)
def test_a_manifest_without_what_is_needed_is_damaged(artifact: Path, manifest: str) -> None:
    (artifact / MANIFEST).write_text(manifest)
    with pytest.raises(UserError, match=rf"{artifact / MANIFEST} is damaged.*Remove .* make it"):
        read_manifest(artifact, "make it", ("inputs.target.name",))


@pytest.mark.parametrize("name", ["data", "draft", "checkpoints", "evaluation", "evaluation/partial"])
def test_a_file_in_a_folders_place_is_named(tmp_path: Path, name: str) -> None:
    check_places(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(UserError, match=rf"{tmp_path / name} is a file, .* Move it away"):
        check_places(tmp_path)


@pytest.mark.parametrize(
    "name", ["history.jsonl", "evaluation/result.json", "evaluation/report.html", ".lock"]
)
def test_a_folder_in_a_files_place_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir(parents=True)
    with pytest.raises(UserError, match=rf"{tmp_path / name} is a folder, .* Move it away"):
        check_places(tmp_path)
