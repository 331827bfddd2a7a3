"""Unit tests on a model's code: in a process of its own, with limits, and only when that was allowed.

What a model writes is run. The limits (time, memory, processes, file size, no network where the system lets a
process give it up, an empty folder and environment) keep accidents small; they are no wall against malice. Use a
throw-away machine for models you do not trust.
"""

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from deepspec.evaluation.tasks.item import Check

# The process limits itself before it becomes the program. What a system does not know (macOS: memory) is left:
# 2 GiB of address space, files (the output is one) up to 16 MiB.
LIMITED = """
import os, resource, sys
seconds = int(sys.argv[1])
for what, limit in (
    ("RLIMIT_CPU", seconds), ("RLIMIT_AS", 2 << 30), ("RLIMIT_FSIZE", 16 << 20), ("RLIMIT_CORE", 0)
):
    try:
        resource.setrlimit(getattr(resource, what), (limit, limit))
    except (AttributeError, OSError, ValueError):
        pass
os.execv(sys.executable, [sys.executable, "-I", "-S", "-B", sys.argv[2]])
"""
BLOCK = re.compile(r"```(?:python|py)?[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Ran:
    """How a program ended. outcome: "passed", "failed" or "timeout"."""

    outcome: str
    output: str


def code_of(answer: str, check: Check) -> str:
    """The program in an answer: its last code block (else all of it), after whatever the prompt began.

    The prompt's own lines go first where the answer does not define the function itself, as a body alone then
    completes them; its imports always do.
    """
    blocks = BLOCK.findall(answer)
    code = blocks[-1] if blocks else answer
    if not check.entry:
        return code
    if re.search(rf"^\s*(async\s+)?def\s+{re.escape(check.entry)}\b", code, re.MULTILINE):
        imports = [line for line in check.head.splitlines() if re.match(r"(import|from)\s", line)]
        return "\n".join([*imports, code])
    return check.head + code


def passes(answer: str, check: Check, seconds: float) -> Ran:
    """Run an answer's code against its tests; of several cases the first that is not passed decides."""
    code = code_of(answer, check)
    if not check.cases:
        # A program may end with status 0 before its tests; what they print at their end it cannot know.
        done = secrets.token_hex(16)
        ran = run(f"{code}\n\n{check.tests}\n\nprint({done!r})", "", seconds)
        told = ran.output.strip().endswith(done)
        return ran if ran.outcome != "passed" or told else Ran("failed", ran.output)
    for given, wanted in check.cases:
        ran = run(code, given, seconds)
        if ran.outcome != "passed":
            return ran
        if ran.output.split() != wanted.split():
            return Ran("failed", ran.output)
    return Ran("passed", "")


def run(program: str, given: str, seconds: float) -> Ran:
    """Run a Python program with `given` as its input, at most `seconds` long."""
    folder = Path(tempfile.mkdtemp(prefix="deepspec-code-"))
    try:
        (folder / "program.py").write_text(program, encoding="utf-8", errors="replace")
        (folder / "input").write_text(given, encoding="utf-8", errors="replace")
        with (folder / "input").open("rb") as stdin, (folder / "output").open("wb") as stdout:
            process = subprocess.Popen(
                [*_alone(), sys.executable, "-I", "-S", "-c", LIMITED, str(int(seconds) + 1), "program.py"],
                cwd=folder,
                env={"PATH": os.defpath, "HOME": str(folder), "TMPDIR": str(folder)},
                stdin=stdin,
                stdout=stdout,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return Ran("timeout", "")
        finally:
            _end(process)
        output = (folder / "output").read_text(encoding="utf-8", errors="replace")
        if code == -signal.SIGXCPU:
            return Ran("timeout", output)
        return Ran("passed" if code == 0 else "failed", output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """The program and whatever it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@cache
def _alone() -> tuple[str, ...]:
    """The words that start a program without a network, if this system lets us."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return ()
    for words in ((unshare, "--net"), (unshare, "--user", "--net")):
        tried = subprocess.run([*words, "true"], capture_output=True, check=False)
        if tried.returncode == 0:
            return words
    return ()


def isolation() -> str:
    """How the programs were confined, for the result."""
    network = "no network" if _alone() else "network not cut off: this system does not allow it"
    return f"subprocess with limits on time, memory and files; {network}"
