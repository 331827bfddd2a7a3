"""The shell scripts, with a Python that only pretends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

# Passes for a fitting interpreter with a working pip, has no torch, and, when asked to look at the index (a script
# on standard input), answers Ctrl-C the way pip does: by failing, not by dying of the signal.
PRETENDER = """#!/usr/bin/env bash
case "$*" in
  "-m pip --version") exit 0 ;;
  *torch.__version__*) exit 1 ;;
  "- "*) trap 'exit 1' INT; echo LOOKING; while :; do sleep 0.1; done ;;
  "-c import sys"*) exit 0 ;;
  *) echo "WENT ON: $*"; exit 0 ;;
esac
"""

# Where the tests run in the background, Ctrl-C may be ignored, and a shell cannot trap what it was started ignoring.
INTERRUPTIBLE = """
import os, signal
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execvp("bash", ["bash", "scripts/setup.sh"])
"""


def test_ctrl_c_stops_the_installation(tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PRETENDER)
    python.chmod(0o755)
    for name, text in (("uname", "#!/bin/sh\necho Linux\n"), ("nvidia-smi", "#!/bin/sh\nexit 1\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE],
        cwd=ROOT,
        env={
            **os.environ,
            "DEEPSPEC_VENV": str(tmp_path / "venv"),
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    seen = ""
    while "LOOKING" not in seen:
        line = process.stdout.readline()
        assert line, seen
        seen += line
    os.killpg(process.pid, signal.SIGINT)
    rest, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "WENT ON" not in rest
    assert "default index" not in rest
    assert "Stopped. The same command continues." in rest
    assert not (tmp_path / "venv.lock").exists()


def _setup(venv: Path) -> subprocess.CompletedProcess[str]:
    """setup.sh with a pretender in `venv`, as on a Mac with Apple silicon: no index of PyTorch's own is asked."""
    python = venv / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PRETENDER)
    python.chmod(0o755)
    return subprocess.run(
        ["bash", "scripts/setup.sh"],
        cwd=ROOT,
        env={**os.environ, "DEEPSPEC_VENV": str(venv), "DEEPSPEC_TORCH_INDEX": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_second_installation_into_the_same_environment_is_refused(tmp_path: Path) -> None:
    lock = tmp_path / "venv.lock"
    lock.write_text(str(os.getpid()))
    done = _setup(tmp_path / "venv")
    assert done.returncode == 1
    assert f"Process {os.getpid()} is installing into" in done.stderr
    assert "WENT ON" not in done.stdout
    assert lock.exists()


def test_the_lock_of_an_installation_that_was_killed_does_not_count(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    (tmp_path / "venv.lock").write_text(str(gone.pid))
    done = _setup(tmp_path / "venv")
    assert done.returncode == 0, done.stderr
    assert "Installed." in done.stdout
    assert not (tmp_path / "venv.lock").exists()


def test_the_projects_folder_is_found_whatever_the_shell_searches() -> None:
    """Where CDPATH is set, `cd` with a relative name prints the folder it went to."""
    done = subprocess.run(
        ["bash", "-c", "source scripts/common.sh && printf '%s' \"$root\""],
        cwd=ROOT,
        env={**os.environ, "CDPATH": f".:{ROOT}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == str(ROOT)
