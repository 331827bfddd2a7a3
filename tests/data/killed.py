"""As a script: prepares data again and again, killed at another file operation each time, then once more.

Every change of the disk raises an audit event of the interpreter, so "any moment" can be counted: the parent
learns how many events a whole run has, forks a child for each chosen one, and the child kills itself there.
"""

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from deepspec.config.schema import Answers, DataConfig
from deepspec.data import build, gather, work_folder
from tests.data.toy_target import ToyAnswers, toy_facts

EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree", "sqlite3.connect")
TARGET = toy_facts()


def prepare(folder: Path, prompts: str) -> None:
    settings = DataConfig(
        prompts=prompts,
        answers=Answers.mixed,
        regenerated_prompts=10,
        held_out_prompts=4,
        max_length=128,
        batch_size=4,
        near_duplicates=0.95,
    )
    gathered = gather(settings, work_folder(folder))
    build(
        folder,
        settings,
        gathered,
        TARGET,
        draft_vocab_size=300,
        generate=ToyAnswers(TARGET),
        say=lambda _: None,
    )


def in_child(folder: Path, prompts: str, last: int | None) -> tuple[int, int]:
    """Prepare in a fork that dies at event number `last`; its exit status and how many events it saw."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        seen = 0

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal seen
            changes = event != "open" or (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR)
            if event in EVENTS and changes:
                if seen == last:
                    os.kill(os.getpid(), signal.SIGKILL)
                seen += 1

        sys.addaudithook(hook)
        prepare(folder, prompts)
        os.write(writer, str(seen).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    return os.waitpid(child, 0)[1], int(text or 0)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


if __name__ == "__main__":
    root, source, trials = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    status, events = in_child(root / "whole", source, None)
    assert status == 0 and events > 20, (status, events)
    points = sorted({round(n * (events - 1) / (trials - 1)) for n in range(trials)})
    for point in points:
        place = root / f"killed{point}"
        status, _ = in_child(place, source, point)
        assert os.WIFSIGNALED(status), f"event {point} did not come"
        half = place.exists() and not (place / "manifest.json").is_file()
        status, _ = in_child(place, source, None)
        same = tree(place) == tree(root / "whole")
        left = [path.name for path in root.iterdir() if path.name.startswith(".")]
        assert status == 0 and same and not half and not left, (point, status, same, half, left)
        shutil.rmtree(place)
    print("killed at", len(points), "of", events)
