"""Data prepared by any number of processes are the same bytes, also after one of them was killed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepspec.data import work_folder
from tests.data.killed import tree
from tests.data.test_durability import script
from tests.data.test_prepare import configuration, save_target

PLACES = ("kitchen", "garden", "office", "harbour", "library", "workshop", "station", "market")


def write_prompts(path: Path) -> str:
    """Questions of one and two turns, with and without answers, a duplicate, a near one, another language."""
    rows = []
    for n, where in enumerate(PLACES * 5):
        ask = {"role": "user", "content": f"What should I remember about the {where} on day {n * 37}?"}
        told = {"role": "assistant", "content": f"Write to me{n}@example.org about the {where} first."}
        more = [{"role": "user", "content": f"And what about tomorrow in the {where}?"}, told]
        rows.append({"messages": [ask, *([told] if n % 3 else []), *(more if n % 3 == 2 else [])]})
    rows += [
        rows[4],
        {"prompt": "Was soll ich morgen in der alten Werkstatt meines Großvaters noch erledigen?"},
        {
            "prompt": "What should I remember about the harbour on day 1112? Say it to me very briefly, please."
        },
        {
            "prompt": "What should I remember about the harbour on day 1113? Say it to me very briefly, please."
        },
        {"prompt": "word " * 200},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_any_number_of_processes_makes_the_same_and_one_that_dies_loses_nothing(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    runs = [["one", 1, None], ["three", 3, None], ["killed", 3, 1]]
    one, three, killed = told(tmp_path, prompts, runs)
    expected = tree(tmp_path / "one" / "data")
    left_out = json.loads(expected["manifest.json"])["counts"]["left_out"]
    assert {"near-duplicate", "prompt longer than data.max_length"} <= left_out.keys()
    assert any(reason.startswith("language de") for reason in left_out)
    assert three["ends"] == [0, 0, 0]
    assert tree(tmp_path / "three" / "data") == expected
    assert sum(three["made"]) == sum(one["made"]) and all(three["made"])  # every batch once, by all of them
    folder = tmp_path / "killed" / "data"
    assert killed["ends"][-1] == -9 and not folder.exists()
    written = {path.name for path in work_folder(folder).glob("*.json")}
    batches = {name for name in written if not name.endswith(".part.json")}
    assert len(batches) >= 2 and written > batches
    (again,) = told(tmp_path, prompts, [["killed", 2, None]])
    assert again["ends"] == [0, 0] and sum(again["made"]) == sum(one["made"]) - len(batches)
    assert tree(folder) == expected
    assert not work_folder(folder).exists()


def told(folder: Path, prompts: str, runs: list[list[Any]]) -> list[dict[str, list[int]]]:
    return [
        json.loads(line) for line in script("sharing", str(folder), prompts, json.dumps(runs)).splitlines()
    ]


@pytest.mark.slow
def test_the_stage_under_a_launcher(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target", "qwen3")
    found = {}
    for processes in (1, 2, 3):
        config = configuration(tmp_path, target)
        out = tmp_path / f"run{processes}"
        settings = [f"data.{key}={getattr(config.data, key)}" for key in ("prompts", "held_out_prompts")]
        settings += [f"data.{key}={getattr(config.data, key)}" for key in ("max_length", "max_new_tokens")]
        settings += ["data.batch_size=4", "data.augment=[{name: typos}]", "draft=eagle3"]
        settings += ["target=hf", f"target.path={target}", "target.dtype=float32", "target.device=cpu"]
        settings += ["decode.max_new_tokens=32", f"out={out}", "draft.vocab_size=300", "name=tiny"]
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
        done = subprocess.run(
            [sys.executable, *launcher, "-m", "deepspec.prepare", *settings],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("rows") <= 2  # the summary is printed once
        found[processes] = tree(out / "data")
    assert found[1] == found[2] == found[3]
