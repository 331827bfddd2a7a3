"""Answers of servers as they come in: each committed by itself, under the name of what was asked.

Whatever the order of completion and wherever a run is killed, a name is answered once and a finished answer
is never touched again. Failures wait in a table of their own until somebody asks for them again.
"""

import json
import sqlite3
from pathlib import Path
from threading import Lock
from typing import Any

from deepspec.errors import UserError

FILES = {"answer": "servers.jsonl", "failure": "failures.jsonl"}


class Ledger:
    """The file at `path`, made if it is not there; safe to use from several threads of one process."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.lock = Lock()
        # nolock: one process uses it (the run's folder is locked), and not every file system has locks
        name = f"{path.absolute().as_uri()}?nolock=1"
        self.database = sqlite3.connect(name, uri=True, isolation_level=None, check_same_thread=False)
        try:
            self.database.execute("CREATE TEMP TABLE used (name TEXT PRIMARY KEY) WITHOUT ROWID")
            for table in FILES:
                self.database.execute(
                    f"CREATE TABLE IF NOT EXISTS {table} (name TEXT PRIMARY KEY, body TEXT) WITHOUT ROWID"
                )
        except sqlite3.DatabaseError as error:
            raise UserError(
                f"{path} is damaged ({error}). Remove it; its answers are then asked for again."
            ) from error

    def answer(self, name: str) -> dict[str, Any] | None:
        return self._get("answer", name)

    def failure(self, name: str) -> dict[str, Any] | None:
        return self._get("failure", name)

    def keep_answer(self, name: str, body: dict[str, Any]) -> None:
        """On disk when this returns. The first answer of a name stays."""
        with self.lock:
            self.database.execute("DELETE FROM failure WHERE name = ?", (name,))
            self.database.execute("INSERT OR IGNORE INTO answer VALUES (?, ?)", (name, json.dumps(body)))

    def keep_failure(self, name: str, body: dict[str, Any]) -> None:
        with self.lock:
            self.database.execute("INSERT OR REPLACE INTO failure VALUES (?, ?)", (name, json.dumps(body)))

    def forget_failures(self) -> None:
        """What failed is to be asked again."""
        with self.lock:
            self.database.execute("DELETE FROM failure")

    def take_over(self, folder: Path) -> None:
        """What an artifact made before has (`keep`); lines that cannot be read are asked for again."""
        for table, name in FILES.items():
            if not (folder / name).is_file():
                continue
            with (folder / name).open(encoding="utf-8", errors="replace") as file:
                self.database.execute("BEGIN")
                for line in file:
                    try:
                        body = json.loads(line)
                        values = (body.pop("name"), json.dumps(body))
                    except (ValueError, KeyError, TypeError, AttributeError):
                        continue
                    self.database.execute(f"INSERT OR IGNORE INTO {table} VALUES (?, ?)", values)
                self.database.execute("COMMIT")

    def keep(self, folder: Path) -> None:
        """Write the answers and failures that this run has used into `folder`, ordered by name."""
        folder.mkdir()
        for table, file_name in FILES.items():
            used = f"SELECT name, body FROM {table} JOIN used USING (name) ORDER BY name"
            with (folder / file_name).open("w", encoding="utf-8") as file:
                for name, body in self.database.execute(used):
                    file.write(json.dumps({"name": name, **json.loads(body)}, ensure_ascii=False) + "\n")

    def close(self) -> None:
        self.database.close()

    def _get(self, table: str, name: str) -> dict[str, Any] | None:
        with self.lock:
            self.database.execute("INSERT OR IGNORE INTO used VALUES (?)", (name,))
            row = self.database.execute(f"SELECT body FROM {table} WHERE name = ?", (name,)).fetchone()
        return None if row is None else json.loads(row[0])
