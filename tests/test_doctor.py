"""The doctor says what is there, what is not and what to do, and never hangs on a network."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepspec import doctor
from deepspec.doctor import MISSING, OK, WARNING, Finding


@pytest.fixture
def listening() -> Iterator[int]:
    """A port of this machine at which something answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def only(findings: list[Finding]) -> Finding:
    (one,) = findings
    return one


def test_missing_essentials_are_counted_and_their_cure_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    def good() -> list[Finding]:
        return [Finding(OK, "good", "1.0")]

    def bad() -> list[Finding]:
        return [Finding(MISSING, "bad", "none", "Install it."), Finding(WARNING, "so so", "2", "Mind it.")]

    def broken_check() -> list[Finding]:
        raise ImportError("no such module")

    assert doctor.diagnose((good,)) == 0
    assert doctor.diagnose((good, bad, broken_check)) == 2
    said = capsys.readouterr().out
    assert "→ Install it." in said and "→ Mind it." in said
    assert "broken check" in said and "no such module" in said


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ESSENTIAL", ("torch", "surely-not-a-package"))
    essential = doctor.packages()[0]
    assert essential.state == MISSING
    assert "torch " in essential.found and "surely-not-a-package" in essential.do


def test_old_python_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(doctor.python()).state == OK
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    assert only(doctor.python()).state == MISSING


def test_hub_that_answers_and_one_that_does_not(monkeypatch: pytest.MonkeyPatch, listening: int) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{listening}/")
    assert only(doctor.hub()).state == OK
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed}")
    assert only(doctor.hub()).state == WARNING


def test_hub_that_stays_silent_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://192.0.2.1")  # reserved for documentation: never answers
    monkeypatch.setattr(doctor, "HUB_SECONDS", 0.5)
    start = time.monotonic()
    assert only(doctor.hub()).state == WARNING
    assert time.monotonic() - start < 5


def test_offline_by_choice_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert only(doctor.hub()).state == OK


@pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler on this machine")
def test_compiler_that_works_and_one_that_does_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "c++")
    assert only(doctor.compiler()).state == OK
    fake = tmp_path / "broken-c++"
    fake.write_text("#!/bin/sh\necho 'cc1plus: not found' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    broken = only(doctor.compiler())
    assert broken.state == WARNING and "cc1plus: not found" in broken.found


def test_cache_is_looked_for_where_the_variable_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert str(tmp_path / "deepspec") in only(doctor.disk()).found
    assert "not there yet" in only(doctor.builtin_target()).found
    ready = tmp_path / "deepspec" / "targets" / "smollm2_135m-0123456789ab"
    ready.mkdir(parents=True)
    (ready / "config.json").write_text("{}")
    assert str(ready) in only(doctor.builtin_target()).found


def test_short_disk_and_memory_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "NEEDED_DISK", 2**80)
    monkeypatch.setattr(doctor, "NEEDED_MEMORY", 2**80)
    assert only(doctor.disk()).state == WARNING
    assert only(doctor.memory()).state == WARNING


def test_the_whole_of_it_on_this_machine() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deepspec.doctor"],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        cwd=Path(doctor.__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith((OK, WARNING, MISSING))]
    assert len(lines) >= len(doctor.CHECKS)
    assert not [line for line in lines if "failed:" in line]
