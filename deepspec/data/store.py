"""Conversations and documents on their way, in one working file: memory stays flat however many there are.

The file is SQLite's. It is made anew by every run, so nothing in it needs to survive a kill; what must, the
target's answers, lies elsewhere (`answers`, `ledger`).
"""

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np

from deepspec.data.conversation import BadRow, Conversation, Message, Row, place
from deepspec.errors import UserError

Split = Literal["train", "held_out"]

TABLES = """
CREATE TABLE conversation (
    n INTEGER PRIMARY KEY, id TEXT, key TEXT, grp TEXT, category TEXT, source TEXT, line INTEGER,
    answered INTEGER, ready INTEGER, side TEXT DEFAULT 'train', anew INTEGER DEFAULT 0, draw INTEGER, body TEXT
);
CREATE INDEX by_id ON conversation (id);
CREATE INDEX by_category ON conversation (category, draw, n);
CREATE INDEX by_key ON conversation (key);
CREATE TABLE seen (key TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE held_group (grp TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE band (name BLOB, signature BLOB);
CREATE INDEX by_band ON band (name);
CREATE TABLE document (
    n INTEGER PRIMARY KEY, split TEXT, id TEXT, conversation INTEGER, origin TEXT, truncated INTEGER,
    supervised INTEGER, answers INTEGER, messages TEXT, tokens BLOB, mask BLOB
);
CREATE INDEX by_document_id ON document (id, n);
CREATE TABLE turn (conversation INTEGER, sample INTEGER, turn INTEGER, body TEXT,
    PRIMARY KEY (conversation, sample, turn)) WITHOUT ROWID;
"""
CHUNK = 500


def store_file(work: Path, rank: int = 0) -> Path:
    """The working file of a run's process, in its work folder."""
    return work / f"conversations-{rank}.sqlite"


@dataclass(frozen=True)
class Document:
    """One training document: a conversation, or one turn of it where the template rewrites history.

    origin: whose answers, "given" or "regenerated". truncated: its last answer ran into the generation limit.
    """

    conversation: Conversation
    messages: Sequence[Message]
    tokens: list[int]
    loss_mask: list[int]
    origin: str
    split: Split
    truncated: bool = False


class Store:
    """A fresh working file at `path`, or a private one that vanishes with the process (None)."""

    def __init__(self, path: Path | None = None) -> None:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
        # nolock: one process uses it (the run's folder is locked), and not every file system has locks
        name = "" if path is None else f"{path.absolute().as_uri()}?nolock=1"
        self.database = sqlite3.connect(
            name, uri=path is not None, isolation_level=None, check_same_thread=False
        )
        self.database.execute("PRAGMA journal_mode = OFF")
        self.database.execute("PRAGMA synchronous = OFF")
        self.database.execute("PRAGMA temp_store = FILE")
        self.database.executescript(TABLES)
        self.database.execute("BEGIN")  # and no end: pages go to the file as the cache fills
        self._walks = 0

    def close(self) -> None:
        self.database.close()

    def rows(self, query: str, values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        """A query's rows, one at a time. Not to be changed meanwhile: see `chunks`."""
        yield from self.database.execute(query, values)

    def one(self, query: str, values: Sequence[Any] = ()) -> Any:
        """The first column of the first row, or None."""
        row = self.database.execute(query, values).fetchone()
        return None if row is None else row[0]

    def run(self, query: str, values: Sequence[Any] = ()) -> None:
        self.database.execute(query, values)

    def seen(self, key: str) -> bool:
        """Whether `key` has been asked about before."""
        return self.database.execute("INSERT OR IGNORE INTO seen VALUES (?)", (key,)).rowcount == 0

    def add(self, conversation: Conversation) -> None:
        """`BadRow` if another content already has its id."""
        first = self.database.execute(
            "SELECT key, source, line FROM conversation WHERE id = ?", (conversation.id,)
        ).fetchone()
        key = conversation.key
        if first is not None and first[0] != key:
            raise BadRow("repeated id", f"{conversation.id!r} is also the id of {place(*first[1:])}")
        self.database.execute(
            "INSERT INTO conversation (id, key, grp, category, source, line, answered, ready, body)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                conversation.id,
                key,
                conversation.group,
                conversation.category,
                conversation.source,
                conversation.line,
                conversation.has_answer,
                conversation.row is not None,
                _body(conversation),
            ),
        )

    def replace(self, n: int, conversation: Conversation, draw: int) -> None:
        """Another content under row `n`, and its place in a seeded shuffle."""
        self.database.execute(
            "UPDATE conversation SET key = ?, answered = ?, body = ?, draw = ? WHERE n = ?",
            (conversation.key, conversation.has_answer, _body(conversation), draw, n),
        )

    def remove(self, n: int) -> None:
        self.database.execute("DELETE FROM conversation WHERE n = ?", (n,))

    def count(self, where: str = "1") -> int:
        return int(self.one(f"SELECT count(*) FROM conversation WHERE {where}"))

    def conversations(self, where: str = "1", order: str = "n") -> Iterator[tuple[int, Conversation]]:
        """(row, conversation) of those that fit when asked; rows may be changed or removed meanwhile."""
        self._walks += 1
        walk = f"walk{self._walks}"
        self.run(f"CREATE TEMP TABLE {walk} (at INTEGER PRIMARY KEY, row INTEGER)")
        self.run(f"INSERT INTO {walk} (row) SELECT n FROM conversation WHERE {where} ORDER BY {order}")
        at = 0
        while True:
            part = self.database.execute(
                f"SELECT at, n, id, grp, category, source, line, body FROM {walk} JOIN conversation ON n = row"
                " WHERE at > ? ORDER BY at LIMIT ?",
                (at, CHUNK),
            ).fetchall()
            if not part:
                break
            for _, n, *columns in part:
                yield n, _conversation(*columns)
            at = part[-1][0]
        self.run(f"DROP TABLE {walk}")

    def get(self, n: int) -> Conversation:
        return _conversation(
            *self.database.execute(
                "SELECT id, grp, category, source, line, body FROM conversation WHERE n = ?", (n,)
            ).fetchone()
        )

    def add_documents(self, n: int, documents: Iterable[Document]) -> None:
        """Documents of the conversation in row `n`."""
        self.database.executemany(
            "INSERT INTO document (split, id, conversation, origin, truncated, supervised, answers, messages,"
            " tokens, mask) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (
                    item.split,
                    item.conversation.id,
                    n,
                    item.origin,
                    item.truncated,
                    sum(item.loss_mask),
                    sum(mask > before for before, mask in pairwise([0, *item.loss_mask])),
                    json.dumps(list(item.messages), ensure_ascii=False),
                    np.asarray(item.tokens, dtype=np.int32).tobytes(),
                    np.asarray(item.loss_mask, dtype=np.int8).tobytes(),
                )
                for item in documents
            ],
        )

    def documents(self) -> "Documents":
        """All documents so far, in the order of their conversations' ids."""
        return Documents(self)


@contextmanager
def stored(place: Path) -> Iterator[None]:
    """A working file that cannot be written, in a sentence. `place`: the folder it is in."""
    try:
        yield
    except sqlite3.Error as error:
        raise UserError(
            f"The working file in {place} could not be written ({error}): is the disk full? Nothing finished is "
            "lost; the same command continues."
        ) from error


class Documents(Sequence[Document]):
    """The store's documents as a sequence; each is read when it is asked for."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.numbers = np.fromiter(
            (n for (n,) in store.rows("SELECT n FROM document ORDER BY id, n")), dtype=np.int64
        )

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> list[Document]: ...
    def __getitem__(self, index: int | slice) -> Document | list[Document]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        split, conversation, origin, truncated, messages, tokens, mask = self.store.database.execute(
            "SELECT split, conversation, origin, truncated, messages, tokens, mask FROM document WHERE n = ?",
            (int(self.numbers[index]),),
        ).fetchone()
        return Document(
            self.store.get(conversation),
            json.loads(messages),
            np.frombuffer(tokens, dtype=np.int32).tolist(),
            np.frombuffer(mask, dtype=np.int8).tolist(),
            origin,
            split,
            bool(truncated),
        )


def _body(conversation: Conversation) -> str:
    row = conversation.row
    body: dict[str, Any] = {"messages": conversation.messages}
    if conversation.tools:
        body["tools"] = conversation.tools
    if conversation.changed_by:
        body["changed_by"] = conversation.changed_by
    if row is not None:
        body["row"] = [row.tokens, row.loss_mask]
    return json.dumps(body)


def _conversation(
    id: str, group: str, category: str, source: str, line: int | None, body: str
) -> Conversation:
    content = json.loads(body)
    return Conversation(
        messages=tuple(content["messages"]),
        id=id,
        group=group,
        category=category,
        source=source,
        line=line,
        tools=tuple(content.get("tools", ())),
        row=Row(*content["row"]) if "row" in content else None,
        changed_by=tuple(content.get("changed_by", ())),
    )
