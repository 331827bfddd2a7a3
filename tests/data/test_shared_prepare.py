"""Data made by two processes are the bytes that one makes, also when one of them is killed on the way."""

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from deepspec.artifacts import MANIFEST
from tests.config.processes import ROOT, environment
from tests.planning.tiny import save_model, save_prompts

SECONDS = 240


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations of two turns, so that the second waits for the first's answers."""
    folder = tmp_path_factory.mktemp("prompts")
    rows = []
    for line in save_prompts(folder / "one.jsonl", 30).read_text().splitlines():
        (asked, answer), more = json.loads(line)["messages"], {"role": "user", "content": "and then?"}
        rows.append(json.dumps({"messages": [asked, answer, more, answer]}))
    (folder / "two.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder / "two.jsonl"


def command(model: Path, prompts: Path, out: Path, processes: int) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    call = [sys.executable, *(launcher if processes > 1 else []), "-m", "deepspec.prepare", "name=shared"]
    call += [
        "target=hf",
        f"target.path={model}",
        "target.name=tiny",
        "target.dtype=float32",
        "target.device=cpu",
    ]
    call += ["draft=eagle3", "draft.vocab_size=280", f"out={out}", f"data.prompts={prompts}"]
    call += ["data.held_out_prompts=4", "data.max_length=128", "data.max_new_tokens=24", "data.batch_size=4"]
    return [*call, "data.temperature=1.0", "data.samples=2", "decode.max_new_tokens=8"]


def made(model: Path, prompts: Path, out: Path, processes: int) -> dict[str, bytes]:
    done = subprocess.run(
        command(model, prompts, out, processes),
        env=environment(ROOT),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return contents(out / "data")


def contents(folder: Path) -> dict[str, bytes]:
    """Every file; of the manifest what does not tell the time."""
    found = {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }
    manifest = json.loads(found[MANIFEST])
    found[MANIFEST] = json.dumps({key: manifest[key] for key in ("fingerprint", "counts", "inputs")}).encode()
    return found


@pytest.fixture(scope="module")
def alone(model: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return made(model, prompts, tmp_path_factory.mktemp("alone"), 1)


def same(one: dict[str, bytes], other: dict[str, bytes]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if one[name] != other[name]] == []


def test_two_processes_make_the_bytes_of_one(
    model: Path, prompts: Path, alone: dict[str, bytes], tmp_path: Path
) -> None:
    same(alone, made(model, prompts, tmp_path, 2))
    assert [path.name for path in tmp_path.iterdir() if "work" in path.name] == []


def test_a_process_killed_on_the_way_loses_nothing_that_was_answered(
    model: Path, prompts: Path, alone: dict[str, bytes], tmp_path: Path
) -> None:
    work = tmp_path / ".data.work"
    with subprocess.Popen(
        command(model, prompts, tmp_path, 2),
        env=environment(ROOT),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        until = time.monotonic() + SECONDS
        while len(list(work.glob("*.json"))) < 4:  # the number format and three batches
            assert process.poll() is None and time.monotonic() < until
        for one in [*psutil.Process(process.pid).children(recursive=True), process]:
            one.kill()
    kept = {path.name: path.stat().st_mtime_ns for path in work.glob("*.json") if path.name != "target.json"}
    assert kept and not (tmp_path / "data").exists()
    same(alone, made(model, prompts, tmp_path, 1))
