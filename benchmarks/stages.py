"""The stages that a benchmark runs, each in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def run_stage(stage: str, recipe: str, out: Path, settings: Sequence[str]) -> dict[str, float]:
    """Run it; its peak memory. Ends the benchmark where it fails."""
    print(f"\n{stage} {recipe} in {out}", flush=True)
    call = [sys.executable, "-m", f"deepspec.{stage}", f"+recipe={recipe}", f"out={out}", *settings]
    child = subprocess.Popen(call)
    _, status, usage = os.wait4(child.pid, 0)
    if code := os.waitstatus_to_exitcode(status):
        raise SystemExit(f"error: deepspec.{stage} ended with {code}; the same command goes on from there.")
    unit = 1 if sys.platform == "darwin" else 1024
    return {"peak_gib": usage.ru_maxrss * unit / 2**30}
