"""A user's prompts file: JSONL in the usual shapes, or plain text with one prompt a line."""

import hashlib
import json
from pathlib import Path
from typing import Any

from deepspec.data.conversation import (
    ROLES,
    BadRow,
    Conversation,
    Message,
    Tally,
    check_messages,
    content_key,
)
from deepspec.errors import UserError

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
PAIRS = (("prompt", "response"), ("question", "answer"))


def prompts_sha256(path: Path) -> str:
    """sha256 of the file's bytes; `UserError` if it cannot be read."""
    return hashlib.sha256(_read(path)).hexdigest()


def read_prompts(path: Path, tally: Tally) -> list[Conversation]:
    """The file's conversations in its order.

    JSONL rows are `{"messages": [{"role", "content"}, …]}`, `{"prompt", "response"?}`, `{"question",
    "answer"?}` or a bare string; `category`, `group` and `id` are optional. Any other suffix than .jsonl,
    .ndjson or .json is plain text. Bad lines go to `tally` (an error with the line's number if it is strict);
    blank lines are counted. `UserError` if the file is missing, empty or unreadable.
    """
    content = _read(path)
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UserError(f"{path} is UTF-16, and UTF-8 is expected: convert it, for instance with iconv.")
    content = content.removeprefix(b"\xef\xbb\xbf")
    if not content.strip():
        raise UserError(f"{path} is empty: one prompt a line is expected.")
    parse = _parse_json if path.suffix.lower() in JSON_SUFFIXES else _parse_text
    found: list[Conversation] = []
    ids: dict[str, Conversation] = {}
    for number, raw in enumerate(content.split(b"\n"), start=1):
        if not raw.strip():
            if number <= content.count(b"\n"):
                tally.drop("blank line", path.name, number)
            continue
        try:
            conversation = parse(_decode(raw), path.name, number)
            first = ids.setdefault(conversation.id, conversation)
            if first.key != conversation.key:
                raise BadRow("repeated id", f"{conversation.id!r} is also the id of line {first.line}")
        except BadRow as error:
            tally.bad(error, str(path), number)
        else:
            found.append(conversation)
    return found


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise UserError(f"The prompts file {path} does not exist (data.prompts).") from error
    except OSError as error:
        raise UserError(
            f"The prompts file {path} cannot be read (data.prompts): {error.strerror}."
        ) from error


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8").rstrip("\r")
    except UnicodeDecodeError as error:
        raise BadRow(
            "not UTF-8", f"byte {error.start + 1} of the line is 0x{raw[error.start]:02x}"
        ) from error


def _parse_text(text: str, source: str, line: int) -> Conversation:
    return _conversation([{"role": "user", "content": text.strip()}], {}, source, line)


def _parse_json(text: str, source: str, line: int) -> Conversation:
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadRow("broken JSON", f"{error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise BadRow("broken JSON", "nested too deeply") from error
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, dict):
        raise BadRow("not a JSON object", "each line is one object with `messages`, `prompt` or `question`")
    return _conversation(_messages(row), row, source, line)


def _messages(row: dict[str, Any]) -> list[Message]:
    shapes = [key for key in ("messages", "prompt", "question") if row.get(key) is not None]
    if not shapes:
        raise BadRow("missing field", "`messages`, `prompt` or `question` is expected")
    if len(shapes) > 1:
        raise BadRow("ambiguous row", f"it has both `{shapes[0]}` and `{shapes[1]}`")
    if shapes[0] == "messages":
        turns = row["messages"]
        if not isinstance(turns, list) or not turns:
            raise BadRow("wrong type", "`messages` is not a list of messages")
        return [_message(turn, index) for index, turn in enumerate(turns)]
    for prompt_key, answer_key in PAIRS:
        if shapes[0] == prompt_key:
            messages = [{"role": "user", "content": _text(row, prompt_key)}]
            if row.get(answer_key) is not None:
                messages.append({"role": "assistant", "content": _text(row, answer_key)})
    return messages


def _message(turn: Any, index: int) -> Message:
    where = f"`messages[{index}]`"
    if not isinstance(turn, dict):
        raise BadRow("wrong type", f"{where} is not an object")
    role = turn.get("role")
    if role not in ROLES:
        raise BadRow(
            "unknown role", f"{where} has the role {role!r}, and one of {', '.join(ROLES)} is expected"
        )
    if turn.get("tool_calls"):
        raise BadRow("tool calls", f"{where} calls tools, which is not supported")
    content = turn.get("content")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise BadRow("not text", f"the content of {where} has parts that are not text")
        content = "".join(str(part) for part in parts)
    return {"role": role, "content": _text({"content": content}, "content", where)}


def _text(row: dict[str, Any], key: str, where: str = "") -> str:
    value = row.get(key)
    name = f"the content of {where}" if where else f"`{key}`"
    if not isinstance(value, str):
        raise BadRow("wrong type", f"{name} is {type(value).__name__}, and text is expected")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow("not text", f"{name} holds half of a surrogate pair") from error
    return value


def _label(row: dict[str, Any], key: str) -> str | None:
    value = row.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise BadRow("wrong type", f"`{key}` is {type(value).__name__}, and text is expected")
    return _text({key: str(value)}, key)


def _conversation(messages: list[Message], row: dict[str, Any], source: str, line: int) -> Conversation:
    check_messages(messages)
    first_user = next(message for message in messages if message["role"] == "user")
    return Conversation(
        messages=tuple(messages),
        id=_label(row, "id") or content_key(messages),
        group=_label(row, "group") or content_key([first_user]),
        category=_label(row, "category") or "prompts",
        source=source,
        line=line,
    )
