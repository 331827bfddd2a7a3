"""Work on rows shared by the processes of one launch: the same rows in the same chunks, however many there are.

Every process walks all rows in the same order and works on its own chunks; the results meet as files. What a row
becomes depends on that row alone, so that any number of processes ends with the same, and a chunk that was written
before a kill is not made again, by whichever process it falls to then.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from deepspec.artifacts import fingerprint, versions

CHUNK = 256  # rows

Item = TypeVar("Item")


@dataclass(frozen=True)
class Group:
    """This process among those of a launch that work together. wait: until all have come here."""

    rank: int = 0
    size: int = 1
    wait: Callable[[], None] = lambda: None

    def mine(self, number: int) -> bool:
        """Whether the `number`-th piece of the work is this process's."""
        return number % self.size == self.rank


ALONE = Group()


class Parts:
    """The group's results in the folder `work`, which all its processes can read.

    made_of: what decides the rows and their results; a part of other things is never read. A process alone
    writes no parts.
    """

    def __init__(self, work: Path, group: Group, made_of: Any) -> None:
        self.work = work
        self.group = group
        self.name = fingerprint([made_of, versions(), CHUNK])

    def each(
        self, step: str, rows: Callable[[], Iterable[Item]], result: Callable[[Item], Any]
    ) -> Iterator[tuple[Item, Any]]:
        """Every row with its result, which must be JSON; rows: they themselves, the same at every call."""
        self.make(step, rows, result)
        return self.join(step, rows, result)

    def join(
        self, step: str, rows: Callable[[], Iterable[Item]], result: Callable[[Item], Any]
    ) -> Iterator[tuple[Item, Any]]:
        """`each`, when all have made their share."""
        for number, chunk in enumerate(chunks(rows(), CHUNK)):
            found = None if self.group.size == 1 else self._read(step, number, len(chunk))
            for at, row in enumerate(chunk):
                yield row, result(row) if found is None else found[at]

    def make(self, step: str, rows: Callable[[], Iterable[Item]], result: Callable[[Item], Any]) -> None:
        """This process's share; after it that of all is there."""
        if self.group.size == 1:
            return
        for number, chunk in enumerate(chunks(rows(), CHUNK)):
            if self.group.mine(number) and self._read(step, number, len(chunk)) is None:
                write_whole(self._path(step, number), [result(row) for row in chunk])
        self.group.wait()

    def _path(self, step: str, number: int) -> Path:
        return self.work / f"{step}-{self.name}-{number:06}.part.json"

    def _read(self, step: str, number: int, count: int) -> list[Any] | None:
        return read_whole(self._path(step, number), count)


def chunks(rows: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Lists of `size` rows, the last one of what is left."""
    walk = iter(rows)
    while chunk := list(islice(walk, size)):
        yield chunk


def write_whole(path: Path, content: list[Any]) -> None:
    """A list as JSON, whole or not at all."""
    partial = path.with_suffix(f".partial-{os.getpid()}")
    partial.write_text(json.dumps(content), encoding="utf-8")
    os.replace(partial, path)


def read_whole(path: Path, count: int) -> list[Any] | None:
    """A list of `count`; None if there is none or a crash of the machine left it damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, UnicodeDecodeError, json.JSONDecodeError):
        return None
    return found if isinstance(found, list) and len(found) == count else None
