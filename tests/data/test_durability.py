"""Killed anywhere, the same command ends in the same bytes; many rows need no more memory than few."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from deepspec.config.schema import Answers, DataConfig
from deepspec.data import build, gather
from deepspec.errors import UserError
from tests.data.toy_target import ToyAnswers, toy_facts


def script(name: str, *arguments: str) -> str:
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", f"tests.data.{name}", *arguments],
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def kill_everywhere(folder: Path, points: int) -> str:
    prompts = folder / "prompts.jsonl"
    rows = [
        {"prompt": f"question {n} {'x' * n}", "response": f"answer {n}", "group": n // 2} for n in range(30)
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "out").mkdir()
    return script("killed", str(folder / "out"), str(prompts), str(points))


def test_a_kill_at_a_change_of_the_disk_leaves_a_run_that_ends_in_the_same_bytes(tmp_path: Path) -> None:
    assert "killed at 5 of" in kill_everywhere(tmp_path, 5)


@pytest.mark.slow
def test_a_kill_at_any_change_of_the_disk(tmp_path: Path) -> None:
    assert "killed at 40 of" in kill_everywhere(tmp_path, 40)


def growth(folder: Path, kind: str, few: int, many: int) -> int:
    lines = script("memory", str(folder), kind, str(few), str(many)).splitlines()
    first, second = (int(line.split(":")[1]) for line in lines if line.startswith("MiB:"))
    return second - first


def test_ten_times_the_rows_need_the_same_memory(tmp_path: Path) -> None:
    assert (
        growth(tmp_path, "tokens", 1000, 10_000) < 24
    )  # 9,000 rows as Python objects would take 30 and more


@pytest.mark.slow
def test_100_000_rows_need_the_memory_of_10_000(tmp_path: Path) -> None:
    assert growth(tmp_path, "text", 10_000, 100_000) < 60


def test_a_full_disk_is_said_and_harms_nothing(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"q {n} " + "word " * 2000}) + "\n" for n in range(300)))
    settings = DataConfig(prompts=str(prompts), answers=Answers.given, max_length=64)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    child = os.fork()
    if child == 0:
        import signal

        signal.signal(
            signal.SIGXFSZ, signal.SIG_IGN
        )  # a write beyond the limit then fails as a full disk does
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
        try:
            gather(settings, tmp_path / "work")
        except UserError as error:
            os._exit(7 if "could not be written" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    gathered = gather(settings, tmp_path / "work")
    assert gathered.read == 300
    with pytest.raises(UserError, match="No prompt"):
        build(
            tmp_path / "data",
            settings,
            gathered,
            toy_facts(),
            draft_vocab_size=300,
            generate=ToyAnswers(toy_facts()),
        )
