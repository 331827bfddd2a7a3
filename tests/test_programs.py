"""The stages as real programs: what a person sees at once, before torch is imported."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.config.processes import ROOT, environment

STAGES = ("prepare", "train", "evaluate", "pipeline", "generate", "verify")
# Runs a stage's module as `python -m` does, and tells afterwards whether the slow packages were imported.
WATCHED = """
import runpy, sys
try:
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
finally:
    print("slow:", sorted({"torch", "transformers", "datasets", "accelerate"} & sys.modules.keys()))
"""


def program(folder: Path, stage: str, *arguments: str, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WATCHED, f"deepspec.{stage}", *arguments],
        cwd=folder,
        env=environment(path, ROOT),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("stage", STAGES)
def test_help_and_mistakes_do_not_wait_for_torch(tmp_path: Path, stage: str) -> None:
    helped = program(tmp_path, stage, "--help")
    assert f"python -m deepspec.{stage} +recipe=NAME" in helped.stdout and "ttt_steps" in helped.stdout
    mistaken = program(tmp_path, stage, "+recipe=quickstart", "draft.start=nowhere")
    assert mistaken.returncode == 1 and mistaken.stderr == (
        "error: draft.start is 'nowhere'; it must be random or target.\n"
    )
    assert helped.stdout.splitlines()[-1] == mistaken.stdout.splitlines()[-1] == "slow: []"


def test_the_first_line_comes_before_the_slow_imports(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')")
    done = program(tmp_path, "train", "+recipe=quickstart", path=tmp_path)
    assert done.stdout.splitlines()[0] == "deepspec train: quickstart in runs/quickstart"
    assert done.stderr == "torch is imported\n"


def test_every_program_is_a_command_too() -> None:
    commands = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    programs = [one.stem for one in (ROOT / "deepspec").glob("*.py") if "__main__" in one.read_text()]
    assert sorted(commands) == sorted(f"deepspec-{name.replace('_', '-')}" for name in programs)
    for place in commands.values():
        module, _, function = place.partition(":")
        assert f"def {function}(" in (ROOT / f"{module.replace('.', '/')}.py").read_text()
