"""Starts the fake stage as a process of its own in an empty folder."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.config.processes import HERE, ROOT, environment

Started = subprocess.CompletedProcess[str]


@pytest.fixture
def stage(tmp_path: Path) -> Callable[..., Started]:
    """Run `python -m fake_stage <arguments>` in `tmp_path`; `launcher` replaces the `-m`."""

    def start(*arguments: str, launcher: tuple[str, ...] = ("-m",), **variables: str) -> Started:
        return subprocess.run(
            [sys.executable, *launcher, "fake_stage", *arguments],
            cwd=tmp_path,
            env={**environment(ROOT, HERE), **variables},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return start
