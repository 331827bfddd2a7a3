"""One conversation, what can be wrong with it, and the tally of everything that was left out."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from deepspec.errors import UserError

Message = dict[str, str]

ROLES = ("system", "developer", "user", "assistant", "tool")


class BadRow(Exception):
    """This conversation cannot be used; the text says why, for a person. The caller stops or counts it."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclass(frozen=True)
class Conversation:
    """Messages with a name and a place.

    messages: `{"role", "content"}` each, ending with a user's (or tool's) turn when there is no given answer.
    id: unique. group: conversations of one group are never on both sides of the split. source: where it
    comes from (a file's name, "stdlib", "questions"); line: 1-based, in that file.
    """

    messages: tuple[Message, ...]
    id: str
    group: str
    category: str
    source: str
    line: int | None = None

    @property
    def has_answer(self) -> bool:
        return self.messages[-1]["role"] == "assistant"

    @property
    def key(self) -> str:
        """The content's own name: what decides batches and seeds, whatever the order of the files."""
        return content_key(self.messages)

    @property
    def place(self) -> str:
        return self.source if self.line is None else f"{self.source}, line {self.line}"

    def with_system(self, system: str | None) -> "Conversation":
        """The same with `system` in front, unless it has a system prompt already."""
        if not system or self.messages[0]["role"] in ("system", "developer"):
            return self
        return replace(self, messages=({"role": "system", "content": system}, *self.messages))

    def prompts(self) -> Iterator[tuple[Message, ...]]:
        """The messages before each answer, given or still to be written."""
        for index, message in enumerate(self.messages):
            if message["role"] == "assistant":
                yield self.messages[:index]
        if not self.has_answer:
            yield self.messages


def content_key(messages: Sequence[Message]) -> str:
    """32 hex digits of sha256 over the messages."""
    text = json.dumps([[m["role"], m["content"]] for m in messages], ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def hash_order(seed: int, text: str) -> int:
    """A number in [0, 2**63) that depends on nothing but its arguments: a seeded shuffle, or a seed."""
    return int.from_bytes(hashlib.sha256(f"{seed}\n{text}".encode()).digest()[:8], "big") >> 1


def check_messages(messages: Sequence[Message]) -> None:
    """Raise `BadRow` unless the turns make a conversation somebody could have with a model."""
    start = 0
    while start < len(messages) and messages[start]["role"] in ("system", "developer"):
        start += 1
    if start == len(messages):
        raise BadRow("no user message")
    if messages[start]["role"] != "user":
        raise BadRow("the first message after the system prompt is not the user's")
    for before, after in pairwise(messages):
        if before["role"] == after["role"] == "assistant":
            raise BadRow("two assistant messages in a row")
    for message in messages:
        if message["role"] in ("user", "assistant") and not message["content"].strip():
            raise BadRow(f"an empty {message['role']} message")


@dataclass
class Tally:
    """What was left out and why. `strict`: a bad row stops everything instead.

    counts: conversations or lines by reason. rejects: one record each (source, line, id, reason).
    """

    strict: bool
    counts: Counter[str] = field(default_factory=Counter)
    rejects: list[dict[str, Any]] = field(default_factory=list)

    def bad(self, error: BadRow, source: str, line: int | None = None, id: str | None = None) -> None:
        """A row that is wrong: stop here (strict) or count it."""
        if self.strict:
            place = source if line is None else f"{source}, line {line}"
            raise UserError(
                f"{place}: {error}. Mend the row, or leave such rows out with data.on_error=skip."
            )
        self.drop(error.reason, source, line, id, str(error))

    def drop(
        self, reason: str, source: str, line: int | None = None, id: str | None = None, detail: str = ""
    ) -> None:
        """A row that is right but of no use here: counted, never an error."""
        self.counts[reason] += 1
        self.rejects.append({"source": source, "line": line, "id": id, "reason": detail or reason})

    def drop_conversation(self, conversation: Conversation, reason: str) -> None:
        self.drop(reason, conversation.source, conversation.line, conversation.id)
