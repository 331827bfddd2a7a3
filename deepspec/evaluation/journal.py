"""What a measurement has finished so far, on disk: killed, it goes on; several processes share the work by it.

A folder beside the result to be: `decision.json`, what was decided before the main run (K, the fastest plain
decoding), and for each process a `records-<rank>.jsonl` with a line a prompt, written when it is done. Everything
carries the measurement's fingerprint; what belongs to another measurement is not read. On several machines the
folder must be on a file system that they share.
"""

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deepspec.artifacts import write_json
from deepspec.evaluation.result import Baseline, PromptRecord, SweepPoint, ThreadSpeed
from deepspec.evaluation.typed_json import build

FOLDER = "partial"
DECISION = "decision.json"


def remove(folder: Path) -> None:
    """Forget what is partial beside the result in `folder`."""
    shutil.rmtree(folder / FOLDER, ignore_errors=True)


@dataclass
class Decision:
    """Made once, for all processes and for whoever goes on. fastest: (decoder, dtype) of the third way, if any."""

    k: int
    sweep: list[SweepPoint]
    baselines: list[Baseline]
    fastest: list[str] | None
    threads: list[ThreadSpeed] = field(default_factory=list)


class Journal:
    """folder: of the result. rank, processes: this process among those that share the prompts."""

    def __init__(self, folder: Path, fingerprint: str, rank: int = 0, processes: int = 1) -> None:
        self.folder, self.fingerprint = folder / FOLDER, fingerprint
        self.rank, self.processes = rank, processes
        self.folder.mkdir(parents=True, exist_ok=True)

    def records(self) -> dict[str, PromptRecord]:
        """Every finished prompt's record by id, of all processes. A line that a kill cut off counts as not there."""
        found: dict[str, PromptRecord] = {}
        for path in sorted(self.folder.glob("records-*.jsonl")):
            for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
                record = self._build(PromptRecord, line)
                if record is not None:
                    found[record.id] = record
        return found

    def append(self, record: PromptRecord) -> None:
        """One finished prompt, on disk before this returns."""
        line = json.dumps({"fingerprint": self.fingerprint, "content": asdict(record)}, ensure_ascii=False)
        path = self.folder / f"records-{self.rank}.jsonl"
        # What a kill left of a line must not swallow this one.
        broken = path.is_file() and not path.read_bytes().endswith(b"\n")
        with path.open("ab") as file:
            file.write(b"\n" * broken + line.encode() + b"\n")

    def decision(self) -> Decision | None:
        """What was decided before the main run; None if nothing was."""
        path = self.folder / DECISION
        if not path.is_file():
            return None
        return self._build(Decision, path.read_text(encoding="utf-8", errors="replace"))

    def decide(self, decision: Decision) -> None:
        """Keep it for all."""
        write_json(self.folder / DECISION, {"fingerprint": self.fingerprint, "content": asdict(decision)})

    def mine(self, number: int) -> bool:
        """Whether the `number`-th of the prompts that are left is this process's."""
        return number % self.processes == self.rank

    def remove(self) -> None:
        """The result is written: nothing is partial any more."""
        remove(self.folder.parent)

    def _build(self, kind: Any, text: str) -> Any:
        try:
            content = json.loads(text)
            if not isinstance(content, dict) or content.get("fingerprint") != self.fingerprint:
                return None
            return build(kind, content["content"])
        except (ValueError, KeyError):
            return None
