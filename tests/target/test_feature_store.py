"""Feature stores: what is read back is what the target says; what is damaged, missing or another's is refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspec.config.schema import FeaturesConfig, FeatureSource, StoreFormat
from deepspec.errors import UserError
from deepspec.target import Target
from deepspec.target.features import (
    Estimate,
    FeatureStore,
    Group,
    StoredRows,
    check_store,
    chosen,
    complete,
    make_store,
)
from deepspec.target.features import estimate as estimate_module
from tests.models import tiny_target
from tests.target.stores import columns, order, row, rows

LAYERS = [0, 2]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama")


def quiet(line: str) -> None:
    """Says nothing."""


def reader(folder: Path, target: Target, layers: list[int]) -> StoredRows:
    store = FeatureStore(folder, "python -m deepspec.capture")
    return StoredRows(store, layers, target.device, target.dtype)


def kept(mask: torch.Tensor, documents: torch.Tensor, reach: int | None) -> torch.Tensor:
    """[B, T] positions before a supervised one of their document, by a plain loop."""
    found = torch.zeros_like(mask, dtype=torch.bool)
    for b, j in torch.ones_like(mask).nonzero().tolist():
        ahead = range(j + 1, mask.shape[1] if reach is None else min(mask.shape[1], j + 1 + reach))
        found[b, j] = any(mask[b, i] and documents[b, i] == documents[b, j] for i in ahead)
    return found & (documents >= 0)


@pytest.mark.parametrize("layers", [[0, 2], [1, 3], [3], []], ids=str)
def test_an_exact_store_gives_what_the_target_says(target: Target, layers: list[int], tmp_path: Path) -> None:
    made = order(tmp_path / "features", target, layers)
    make_store(made, target, say=quiet)
    read = reader(made.folder, target, layers)
    for split in made.splits.values():
        for together in (split[:1], [split[2], split[0], split[3]]):
            length = max(len(one["tokens"]) for one in together)
            several = [
                {
                    name: one[name] + [-1 if name == "documents" else 0] * (length - len(one[name]))
                    for name in one
                }
                for one in together
            ]
            now = columns(several)
            found = read.read(now["tokens"], now["loss_mask"], now["documents"])
            real = target.capture(now["tokens"], now["positions"], now["documents"], layers)
            anywhere = kept(now["loss_mask"], now["documents"], None)
            taught = kept(now["loss_mask"], now["documents"], 1)
            torch.testing.assert_close(
                found.features[anywhere], real.features[anywhere], rtol=1e-5, atol=1e-5
            )
            torch.testing.assert_close(
                found.last_hidden[taught], real.last_hidden[taught], rtol=1e-5, atol=1e-5
            )
            assert not found.features[~anywhere].any()
            assert found.features.shape == real.features.shape
            assert found.last_hidden.shape == real.last_hidden.shape


@pytest.mark.parametrize("format", [StoreFormat.int8, StoreFormat.fp8, StoreFormat.bf16, StoreFormat.int4])
def test_rounded_stores_are_off_by_their_rounding(
    target: Target, format: StoreFormat, tmp_path: Path
) -> None:
    made = order(tmp_path / "features", target, LAYERS, format)
    make_store(made, target, say=quiet)
    now = columns(made.splits["train"][:1])
    found = reader(made.folder, target, LAYERS).read(now["tokens"], now["loss_mask"], now["documents"])
    real = target.capture(now["tokens"], now["positions"], now["documents"], LAYERS)
    at = kept(now["loss_mask"], now["documents"], None)
    off = (found.features[at] - real.features[at]).norm() / real.features[at].norm()
    most = {StoreFormat.int8: 0.02, StoreFormat.fp8: 0.04, StoreFormat.bf16: 0.004, StoreFormat.int4: 0.15}
    assert 0 < off < most[format]
    told = found.last_hidden.abs().sum(-1) > 0  # where it is a teacher
    last = (found.last_hidden - real.last_hidden)[told].norm() / real.last_hidden[told].norm()
    assert last < min(most[format], 0.04)  # beside int4 too
    manifest = json.loads((made.folder / "manifest.json").read_text(encoding="utf-8"))
    quality = manifest["quality"]
    assert set(quality["layers"]) == {"0", "2", "last"}
    assert 0 <= quality["kl"] < 0.1
    assert 0.9 <= quality["top1_agreement"] <= 1


def test_the_gate_measures_the_teacher_and_stops_a_bad_format(target: Target, tmp_path: Path) -> None:
    made = order(tmp_path / "features", target, LAYERS, StoreFormat.fp8, max_kl=1e-9)
    with pytest.raises(UserError, match=r"off by .* nats .*features\.format=bf16"):
        make_store(made, target, say=quiet)
    assert not (made.folder / "manifest.json").exists()
    make_store(order(made.folder, target, LAYERS, StoreFormat.bf16), target, say=quiet)
    assert FeatureStore(made.folder, "x").made_of["format"] == "bf16"


def test_a_short_reach_and_all_positions(target: Target, tmp_path: Path) -> None:
    sizes = {}
    for name, positions in (("all", "all"), ("needed", "needed"), ("one", 1)):
        made = order(tmp_path / name, target, LAYERS, positions=positions)
        make_store(made, target, say=quiet)
        now = columns(made.splits["train"][3:4])
        found = reader(made.folder, target, LAYERS).read(now["tokens"], now["loss_mask"], now["documents"])
        sizes[name] = int((found.features != 0).any(-1).sum())
    now_kept = [kept(now["loss_mask"], now["documents"], reach).sum() for reach in (None, 1)]
    assert sizes == {"all": (now["documents"] >= 0).sum(), "needed": now_kept[0], "one": now_kept[1]}


@pytest.mark.parametrize("format", [StoreFormat.int8, StoreFormat.fp8, StoreFormat.int4])
def test_a_draft_may_read_some_of_the_layers(target: Target, format: StoreFormat, tmp_path: Path) -> None:
    made = order(tmp_path / "features", target, [0, 2, 3], format)
    make_store(made, target, say=quiet)
    now = columns(made.splits["train"][:1])
    some = reader(made.folder, target, [2]).read(now["tokens"], now["loss_mask"], now["documents"])
    every = reader(made.folder, target, [0, 2, 3]).read(now["tokens"], now["loss_mask"], now["documents"])
    size = target.hidden_size
    assert torch.equal(some.features, every.features[..., size : 2 * size])
    assert torch.equal(some.last_hidden, every.last_hidden)
    check_store(FeatureStore(made.folder, "x"), {**made.made_of, "layers": [2], "positions": 1}, made.data)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


def many(seed: int = 0) -> list[Any]:
    return rows(40, seed)


def small_shards(folder: Path, target: Target, **more: Any) -> Any:
    """Two rows a shard."""
    return order(folder, target, LAYERS, StoreFormat.int8, **more)


def test_any_number_of_processes_writes_the_same_bytes(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepspec.target.features.making.Order.shard_bytes", 4096)
    alone = order(tmp_path / "alone", target, LAYERS, StoreFormat.int8)
    make_store(alone, target, say=quiet)
    together = order(tmp_path / "together", target, LAYERS, StoreFormat.int8)
    from deepspec.target.features import making

    making._settle(together, target, quiet)
    for rank in (2, 1, 0):  # in any order; each without the others' shards
        making.write_own(together, target, Group(rank, 3))
    making._finish(together, quiet)
    assert len(contents(alone.folder)) > 4
    assert contents(together.folder) == contents(alone.folder)


KILLED = """
import os, signal, sys
from pathlib import Path
import tests.target.test_feature_store as t
from deepspec.target.features import make_store, making, writer
from tests.models import tiny_target
from tests.target.stores import order
from deepspec.config.schema import StoreFormat
making.Order.shard_bytes = 4096
at, calls = int(sys.argv[2]), 0
real = writer.write_shard
def write(path, contents, sha256):
    global calls
    calls += 1
    if calls == at:  # a half written shard under its temporary name, and no time to tidy up
        path.with_name(f".{path.name}.partial-{os.getpid()}").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    real(path, contents, sha256)
writer.write_shard = write
target = tiny_target("llama")
made = order(Path(sys.argv[1]), target, t.LAYERS, StoreFormat.int8)
make_store(made, target, say=t.quiet)
"""


def test_a_killed_capture_goes_on_to_the_same_bytes(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepspec.target.features.making.Order.shard_bytes", 4096)
    whole = order(tmp_path / "whole", target, LAYERS, StoreFormat.int8)
    make_store(whole, target, say=quiet)
    folder = tmp_path / "killed"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    call = [sys.executable, "-c", KILLED, str(folder)]
    done = subprocess.run([*call, "3"], env=environment, check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr[-800:]
    left = sorted(path.name for path in folder.glob("train-*.safetensors"))
    assert 0 < len(left) < len(list(whole.folder.glob("train-*.safetensors")))
    assert not (folder / "manifest.json").exists()
    with pytest.raises(UserError, match=r"not complete. Make it first: python -m deepspec.capture"):
        FeatureStore(folder, "python -m deepspec.capture")
    stamps = {name: (folder / name).stat().st_mtime_ns for name in left}
    again = order(folder, target, LAYERS, StoreFormat.int8)
    make_store(again, target, say=quiet)
    assert contents(folder) == contents(whole.folder)
    assert {name: (folder / name).stat().st_mtime_ns for name in left} == stamps
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        path.name for path in whole.folder.iterdir()
    )
    ours, theirs = (json.loads((one / "manifest.json").read_text()) for one in (folder, whole.folder))
    assert ours["sha256"] == theirs["sha256"]


def test_new_rows_are_added_and_old_shards_stay(target: Target, tmp_path: Path) -> None:
    first = order(tmp_path / "features", target, LAYERS, splits={"train": rows(4)})
    make_store(first, target, say=quiet)
    old = contents(first.folder)
    # the same documents in other rows, and a new one
    new = row([(5, 7, 0)], 77)
    repacked = [new, *reversed(rows(4))]
    second = order(tmp_path / "features", target, LAYERS, splits={"train": repacked})
    assert complete(first) and not complete(second)
    make_store(second, target, say=quiet)
    assert complete(first) and complete(second)
    now = contents(first.folder)
    grown = {name for name in now if name not in old and not name.startswith("index")}
    assert len(grown) == 1 and all(now[name] == old[name] for name in old if not name.startswith("index"))
    manifest = json.loads((first.folder / "manifest.json").read_text())
    assert manifest["shards"][grown.pop()]["documents"] == 1
    seen = columns([new])
    found = reader(first.folder, target, LAYERS).read(seen["tokens"], seen["loss_mask"], seen["documents"])
    real = target.capture(seen["tokens"], seen["positions"], seen["documents"], LAYERS)
    torch.testing.assert_close(found.features[:, :-1], real.features[:, :-1], rtol=1e-5, atol=1e-5)


def test_a_flipped_byte_and_a_missing_shard_are_named(target: Target, tmp_path: Path) -> None:
    made = order(tmp_path / "features", target, LAYERS)
    make_store(made, target, say=quiet)
    now = columns(made.splits["train"][:1])
    shard = next(made.folder.glob("train-*.safetensors"))
    good = shard.read_bytes()
    bad = bytearray(good)
    bad[len(bad) // 2] ^= 1
    shard.write_bytes(bad)
    with pytest.raises(UserError, match=rf"{shard} is damaged.*make it again: python -m deepspec.capture"):
        reader(made.folder, target, LAYERS).read(now["tokens"], now["loss_mask"], now["documents"])
    shard.write_bytes(good)
    reader(made.folder, target, LAYERS).read(now["tokens"], now["loss_mask"], now["documents"])
    shard.unlink()
    with pytest.raises(UserError, match=rf"{shard} is missing.*make it again: python -m deepspec.capture"):
        reader(made.folder, target, LAYERS)


def test_checksums_are_read_once_a_shard(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = order(tmp_path / "features", target, LAYERS)
    make_store(made, target, say=quiet)
    asked: list[str] = []
    from deepspec.target.features import store

    real = store.check_whole

    def counted(folder: Path, manifest: Any, made_by: str, only: str | None = None) -> None:
        asked.append(str(only))
        real(folder, manifest, made_by, only)

    monkeypatch.setattr(store, "check_whole", counted)
    monkeypatch.setattr(store, "OPEN", 1)  # shards are closed and opened again and again
    read = reader(made.folder, target, LAYERS)
    for _ in range(3):
        for split in made.splits.values():
            now = columns(split[:1])
            read.read(now["tokens"], now["loss_mask"], now["documents"])
    shards = [name for name in asked if name.startswith(("train", "held_out"))]
    assert sorted(shards) == sorted(set(shards)) and len(shards) == 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"target": {"weights": "xyz"}}, r"target.weights was 'abc', is 'xyz'"),
        ({"target": {"tokenizer": "other"}}, r"target.tokenizer was 'words', is 'other'"),
        ({"target": {"dtype": "bfloat16"}}, r"target.dtype was 'float64', is 'bfloat16'"),
        ({"template": "other"}, r"template was 'none', is 'other'"),
        ({"format": "int8"}, r"format was 'fp32', is 'int8'"),
        ({"layers": [0, 1]}, r"lacks layer 1 and has \[0, 2\]"),
        ({"positions": "all"}, r"positions was 'needed', is 'all'"),
    ],
    ids=str,
)
def test_another_store_is_refused_by_what_differs(
    target: Target, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    made = order(tmp_path / "features", target, LAYERS)
    make_store(made, target, say=quiet)
    wanted = {**made.made_of, **change, "target": {**made.made_of["target"], **change.get("target", {})}}
    with pytest.raises(UserError, match=named):
        check_store(FeatureStore(made.folder, "python -m deepspec.capture"), wanted, made.data)


def test_other_data_and_unknown_documents_are_refused(target: Target, tmp_path: Path) -> None:
    made = order(tmp_path / "features", target, LAYERS)
    make_store(made, target, say=quiet)
    store = FeatureStore(made.folder, "python -m deepspec.capture")
    with pytest.raises(UserError, match=r"captured from other data.*python -m deepspec.capture"):
        check_store(store, made.made_of, "0123")
    stranger = columns([row([(5, 7, 0)], 991)])
    with pytest.raises(UserError, match="no features of a document of these data"):
        reader(made.folder, target, LAYERS).read(
            stranger["tokens"], stranger["loss_mask"], stranger["documents"]
        )


def test_a_store_of_other_settings_is_replaced_only_when_asked(target: Target, tmp_path: Path) -> None:
    make_store(order(tmp_path / "features", target, LAYERS), target, say=quiet)
    with pytest.raises(UserError, match=r"layers was \[0, 2\], is \[1\].*overwrite=true"):
        make_store(order(tmp_path / "features", target, [1]), target, say=quiet)
    make_store(order(tmp_path / "features", target, [1], overwrite=True), target, say=quiet)
    assert FeatureStore(tmp_path / "features", "x").made_of["layers"] == [1]


def test_files_of_others_are_never_removed(target: Target, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(UserError, match=r"no feature store's \(model.safetensors\).*features.folder"):
        make_store(order(tmp_path, target, LAYERS, overwrite=True), target, say=quiet)
    assert (tmp_path / "model.safetensors").read_bytes() == b"weights"


def test_too_little_disk_is_said_before_anything_runs(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate_module.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(
        UserError, match=r"features would take .*features.format=int8.*features.source=online"
    ):
        make_store(order(tmp_path / "features", target, LAYERS), target, say=quiet)


def test_a_full_disk_in_the_middle_keeps_what_is_finished(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspec.target.features import files

    monkeypatch.setattr("deepspec.target.features.making.Order.shard_bytes", 4096)
    made = order(tmp_path / "features", target, LAYERS)
    real, calls = files.save_file, 0

    def full(tensors: Any, path: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        real(tensors, path)

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(UserError, match=r"could not be written: No space left.*features.format=int8"):
        make_store(made, target, say=quiet)
    assert not list(made.folder.glob(".*partial*"))
    monkeypatch.setattr(files, "save_file", real)
    make_store(made, target, say=quiet)
    assert complete(made)


def test_the_estimate_is_what_is_written(target: Target, tmp_path: Path) -> None:
    for format in (StoreFormat.int8, StoreFormat.int4, StoreFormat.bf16):
        made = order(tmp_path / format.value, target, LAYERS, format, splits={"train": rows(200)})
        make_store(made, target, say=quiet)
        written = json.loads((made.folder / "manifest.json").read_text())["total"]
        assert made.size().tokens >= written["tokens"]  # rows without supervision have none stored
        assert made.size().bytes == pytest.approx(written["bytes"], rel=0.1)


GIB = 2**30


@pytest.mark.parametrize(
    ("size", "free", "passes", "memory", "expected"),
    [
        (10 * GIB, 100, 4, 1, FeatureSource.store),
        (60 * GIB, 100, 4, 1, FeatureSource.online),  # more than half of the disk
        (10 * GIB, 100, 1, 1, FeatureSource.online),  # seen once
        (10 * GIB, 100, 4, 64, FeatureSource.online),  # fits into memory
    ],
)
def test_auto_weighs_size_disk_and_epochs(
    size: int,
    free: int,
    passes: float,
    memory: float,
    expected: FeatureSource,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usage = shutil._ntuple_diskusage(200 * GIB, 0, free * GIB)
    monkeypatch.setattr(estimate_module.shutil, "disk_usage", lambda path: usage)
    auto = FeaturesConfig(source=FeatureSource.auto)
    source, why = chosen(auto, Estimate(bytes=size), tmp_path / "not" / "there", passes, memory)
    assert source is expected
    assert why
