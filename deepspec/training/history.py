"""`history.jsonl`: one JSON object a line for every logged step and evaluation, whatever the tracker."""

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any


class History:
    """Opened at `step`: lines of later steps (from before a kill) and broken ones are dropped."""

    def __init__(self, path: Path, step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read(path) if line["step"] <= step] if step else []
        partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
        partial.write_text("".join(_line(one) for one in kept), encoding="utf-8")
        os.replace(partial, path)
        self._file = path.open("a", encoding="utf-8")

    def add(self, record: dict[str, Any]) -> None:
        """`record` has a `step`."""
        self._file.write(_line(record))
        self._file.flush()

    def __enter__(self) -> "History":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def read(path: Path) -> list[dict[str, Any]]:
    """All whole records of a history; none if the file does not exist."""
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # cut by a kill in the middle of a write
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            found.append(record)
    return found


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"
