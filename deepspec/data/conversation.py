"""One conversation, what can be wrong with it, and the tally of everything that was left out."""

import hashlib
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from deepspec.errors import UserError

Message = dict[str, Any]
"""`role` and `content`, both text; an assistant's may have `tool_calls` and `reasoning_content`, a tool's
`name` and `tool_call_id`."""

ROLES = ("system", "developer", "user", "assistant", "tool")
INSTRUCTIONS = ("system", "developer")
ROW_FORMATS = (".json", ".parquet", ".arrow", ".feather")


class BadRow(Exception):
    """This conversation cannot be used; the text says why, for a person. The caller stops or counts it."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


Event = tuple[bool, str, str]
"""Of a conversation: whether it is wrong (else it is of no use), the reason, the detail."""


@dataclass
class Row:
    """Tokens, and `loss_mask` of the same length, 1 where the assistant wrote the token."""

    tokens: list[int]
    loss_mask: list[int]


@dataclass(frozen=True)
class Conversation:
    """Messages with a name and a place.

    messages: ending with a user's (or tool's) turn when there is no given answer; none for a row that came as
    tokens. id: unique. group: conversations of one group are never on both sides of the split. source: where
    it comes from (a file's name, "stdlib", "questions"); line: 1-based, in that file. tools: JSON schemas of
    the functions the assistant may call. row: tokens that came ready made. changed_by: the augmentations that
    wrote these prompts; the answers between them are then only places for new ones.
    """

    messages: tuple[Message, ...]
    id: str
    group: str
    category: str
    source: str
    line: int | None = None
    tools: tuple[dict[str, Any], ...] = ()
    row: Row | None = None
    changed_by: tuple[str, ...] = ()

    @property
    def has_answer(self) -> bool:
        """Whether its last answer is given, and an answer to just these prompts."""
        return bool(self.messages) and self.messages[-1]["role"] == "assistant" and not self.changed_by

    @property
    def key(self) -> str:
        """The content's own name: what decides batches and seeds, whatever the order of the files."""
        if self.row is not None:
            return _digest([self.row.tokens, self.row.loss_mask])
        return content_key(self.messages, self.tools)

    @property
    def place(self) -> str:
        return place(self.source, self.line)

    def with_system(self, system: str | None) -> "Conversation":
        """The same with `system` in front, unless it has a system prompt already."""
        if not system or not self.messages or self.messages[0]["role"] in INSTRUCTIONS:
            return self
        return replace(self, messages=({"role": "system", "content": system}, *self.messages))

    def prompts(self) -> Iterator[tuple[Message, ...]]:
        """The messages before each answer, given or still to be written."""
        for index, message in enumerate(self.messages):
            if message["role"] == "assistant":
                yield self.messages[:index]
        if self.messages and self.messages[-1]["role"] != "assistant":
            yield self.messages

    def user_text(self) -> str:
        """All that the user says, a blank line between turns."""
        return "\n\n".join(message["content"] for message in self.messages if message["role"] == "user")


def place(source: str, number: int | None) -> str:
    """`a.jsonl, line 3`; rows where the format has no lines."""
    if number is None:
        return source
    return (
        f"{source}, {'row' if source.endswith(ROW_FORMATS) or source.startswith('hf:') else 'line'} {number}"
    )


def content_key(messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> str:
    """32 hex digits of sha256 over the messages and the tools."""
    content: list[Any] = []
    for message in messages:
        more = {key: value for key, value in message.items() if key not in ("role", "content")}
        content.append([message["role"], message["content"], *([more] if more else [])])
    return _digest([*content, {"tools": list(tools)}] if tools else content)


def _digest(content: Any) -> str:
    text = json.dumps(content, ensure_ascii=True, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def hash_order(seed: int, text: str) -> int:
    """A number in [0, 2**63) that depends on nothing but its arguments: a seeded shuffle, or a seed."""
    return int.from_bytes(hashlib.sha256(f"{seed}\n{text}".encode()).digest()[:8], "big") >> 1


def normalise(messages: Sequence[Message], tally: "Tally") -> list[Message]:
    """The messages as a conversation somebody could have with a model; `BadRow` if they are none.

    Rules, each counted in `tally.notes`: blank system messages are left out; what the assistant says before
    the first question is left out; questions that follow each other are one, joined by a blank line. Refused:
    no user message, blank user or assistant messages, two answers in a row, a tool's turn without a call.
    """
    found: list[Message] = []
    for message in messages:
        role = message["role"]
        if role in INSTRUCTIONS and not message["content"].strip():
            tally.notes["blank system messages left out"] += 1
        elif role == "assistant" and not any(earlier["role"] == "user" for earlier in found):
            tally.notes["assistant messages before the first question left out"] += 1
        elif role == "user" and found and found[-1]["role"] == "user":
            tally.notes["questions in a row joined"] += 1
            found[-1] = {**found[-1], "content": f"{found[-1]['content']}\n\n{message['content']}"}
        else:
            found.append(message)
    check_messages(found)
    return found


def check_messages(messages: Sequence[Message]) -> None:
    """Raise `BadRow` for turns that nobody could have with a model (see `normalise`)."""
    asked = [message for message in messages if message["role"] not in INSTRUCTIONS]
    if not any(message["role"] == "user" for message in messages):
        raise BadRow("no user message")
    if asked[0]["role"] != "user":
        raise BadRow("the first message after the system prompt is not the user's")
    for before, after in pairwise(asked):
        if before["role"] == after["role"] == "assistant":
            raise BadRow("two assistant messages in a row")
        if after["role"] == "tool" and before["role"] == "user":
            raise BadRow("a tool's result without a call")
    for message in messages:
        silent = not message["content"].strip() and not message.get("tool_calls")
        if message["role"] in ("user", "assistant") and silent:
            raise BadRow(f"an empty {message['role']} message")


class Rejects:
    """Records of rows left out; beyond a megabyte they wait on disk, however many there are."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=1 << 20, mode="w+", encoding="utf-8")  # noqa: SIM115
        self._count = 0

    def append(self, record: dict[str, Any]) -> None:
        self._file.seek(0, 2)
        self._file.write(json.dumps(record) + "\n")
        self._count += 1

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._file.seek(0)
        for line in self._file:
            yield json.loads(line)


@dataclass
class Tally:
    """What was left out or changed, and why. `strict`: a bad row stops everything instead.

    counts: conversations or lines by reason. rejects: one record each (source, line, id, reason). notes: what
    happened to rows that were kept. shapes: rows read by the shape they were recognised as.
    """

    strict: bool
    counts: Counter[str] = field(default_factory=Counter)
    rejects: Rejects = field(default_factory=Rejects)
    notes: Counter[str] = field(default_factory=Counter)
    shapes: Counter[str] = field(default_factory=Counter)

    def bad(self, error: BadRow, source: str, line: int | None = None, id: str | None = None) -> None:
        """A row that is wrong: stop here (strict) or count it."""
        if self.strict:
            raise UserError(
                f"{place(source, line)}: {error}. Mend the row, or leave such rows out with data.on_error=skip."
            )
        self.drop(error.reason, source, line, id, str(error))

    def drop(
        self, reason: str, source: str, line: int | None = None, id: str | None = None, detail: str = ""
    ) -> None:
        """A row that is right but of no use here: counted, never an error."""
        self.counts[reason] += 1
        self.rejects.append({"source": source, "line": line, "id": id, "reason": detail or reason})

    def drop_conversation(self, conversation: Conversation, reason: str, detail: str = "") -> None:
        self.drop(reason, conversation.source, conversation.line, conversation.id, detail)

    def repeat(self, events: Sequence[Event], conversation: Conversation) -> None:
        """What another process has noted of a conversation."""
        for wrong, reason, detail in events:
            if wrong:
                found = (conversation.source, conversation.line, conversation.id)
                self.bad(BadRow(reason, detail), *found)
            else:
                self.drop_conversation(conversation, reason, detail)


@dataclass
class Events(Tally):
    """Counts nothing: `noted` is for the tally of whoever asked for the work."""

    strict: bool = False
    noted: list[Event] = field(default_factory=list)

    def bad(self, error: BadRow, source: str, line: int | None = None, id: str | None = None) -> None:
        self.noted.append((True, error.reason, error.detail))

    def drop(
        self, reason: str, source: str, line: int | None = None, id: str | None = None, detail: str = ""
    ) -> None:
        self.noted.append((False, reason, detail))
