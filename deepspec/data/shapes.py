"""What a row is: recognised by its columns, and read as a conversation.

In this order: ready-made tokens, a list of turns (OpenAI's or ShareGPT's), Alpaca's columns, a prompt or a
question with its answer, bare text. A column map renames columns first and so settles every doubt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from deepspec.data.conversation import (
    INSTRUCTIONS,
    ROLES,
    BadRow,
    Conversation,
    Message,
    Row,
    Tally,
    content_key,
    normalise,
)
from deepspec.data.readers import parse_json
from deepspec.errors import UserError

TOKENS = ("tokens", "input_ids")
TURNS = ("messages", "conversations", "conversation")
ASKED = ("instruction", "prompt", "question")
ANSWERS = ("response", "completion", "answer", "output")
LABELS = ("id", "group", "category")
ASIDE = (*LABELS, "system", "tools", "functions")
FIELDS = (*TOKENS, "loss_mask", "labels", *TURNS, *ASKED, "input", *ANSWERS, *ASIDE)
SPEAKERS = {
    **{role: role for role in ROLES},
    **{"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant"},
    **{"observation": "tool", "function": "tool", "function_response": "tool", "function_call": "assistant"},
}
IGNORED_LABEL = -100  # of Hugging Face's `labels`: not learned


def check_columns(columns: Mapping[str, str]) -> None:
    """`UserError` unless `columns` maps fields that a row can have to column names."""
    for field in columns:
        if field not in FIELDS:
            raise UserError(
                f"data.columns has no field {field!r}: it maps one of {', '.join(FIELDS)} to a column."
            )


def conversation(
    row: Any, source: str, line: int, tally: Tally, columns: Mapping[str, str] | None = None
) -> Conversation:
    """The conversation of a row (a JSON value); `BadRow` if it is none.

    columns: field → the file's own column name. The row's shape and the columns without a use are counted in
    `tally`.
    """
    bare = isinstance(row, str)
    if bare:
        row = {"prompt": row}
    if not isinstance(row, dict):
        raise BadRow("not a JSON object", "each line is one object with `messages`, `prompt` or `question`")
    fields = _renamed(row, columns or {})
    shape, used, messages, tokens = _read(fields)
    shape = "bare text" if bare else shape
    tools = _tools(fields)
    if messages and fields.get("system") is not None and messages[0]["role"] not in INSTRUCTIONS:
        messages.insert(0, {"role": "system", "content": _text(fields["system"], "`system`")})
    messages = normalise(messages, tally) if tokens is None else []
    unnamed = Conversation(tuple(messages), "", "", "", source, line, tools, tokens)
    asked = next((content_key([message]) for message in messages if message["role"] == "user"), unnamed.key)
    found = replace(
        unnamed,
        id=_label(fields, "id") or unnamed.key,
        group=_label(fields, "group") or asked,
        category=_label(fields, "category") or "prompts",
    )
    tally.shapes[shape] += 1
    for name in fields.keys() - {*used, *ASIDE}:
        tally.notes[f"column not used: {name}"] += 1
    return found


def _renamed(row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """The row by our fields, missing values left out. Once a map names a field of the content, only what it
    names is content."""
    present = {str(name): value for name, value in row.items() if value is not None}
    if not columns:
        return present
    taken = set(columns.values())
    content = set(columns) - set(ASIDE)
    found = {}
    for name, value in present.items():
        if name in taken:
            continue
        hidden = name in columns or (content and name in FIELDS and name not in ASIDE)
        found[f"{name} (as it is in the file)" if hidden else name] = value
    for field, name in columns.items():
        if name not in row and field in (*TOKENS, *TURNS, *ASKED):
            raise BadRow("missing field", f"`{name}`, which data.columns takes for `{field}`")
        if name in present:
            found[field] = present[name]
    return found


def _read(fields: dict[str, Any]) -> tuple[str, set[str], list[Message], Row | None]:
    """Shape, the fields it took, messages, or else ready-made tokens."""
    for name in TOKENS:
        if name in fields:
            return "tokens", {name, "loss_mask", "labels", "attention_mask"}, [], _tokens(fields, name)
    turns = [name for name in TURNS if name in fields]
    if turns:
        _one_of(turns)
        shape, messages = read_turns(fields[turns[0]], turns[0])
        return shape, {turns[0]}, messages, None
    asked = [name for name in ASKED if name in fields]
    if not asked:
        raise BadRow(
            "missing field",
            "`messages`, `prompt` or `question` is expected (other names: +data.columns={prompt: your_column})",
        )
    _one_of(asked)
    name = asked[0]
    answers = [answer for answer in ANSWERS if answer in fields]
    _one_of(answers)
    used = {name, *answers}
    if isinstance(fields[name], list):
        shape, messages = read_turns(fields[name], name)
    else:
        text = _text(fields[name], f"`{name}`")
        if name == "instruction":
            used.add("input")
            more = _text(fields.get("input", ""), "`input`")
            text = f"{text}\n\n{more}" if more.strip() else text
        messages = [{"role": "user", "content": text}]
        shape = "Alpaca columns" if name == "instruction" else f"`{name}`"
    for answer in answers:
        shape = f"{shape} and `{answer}`" if name != "instruction" else shape
        value = fields[answer]
        if isinstance(value, list) and isinstance(fields[name], list):
            messages += read_turns(value, answer)[1]
        else:
            messages.append({"role": "assistant", "content": _text(value, f"`{answer}`")})
    return shape, used, messages, None


def _one_of(names: Sequence[str]) -> None:
    if len(names) > 1:
        raise BadRow(
            "ambiguous row",
            f"it has both `{names[0]}` and `{names[1]}` (data.columns can name the right one)",
        )


def read_turns(value: Any, name: str) -> tuple[str, list[Message]]:
    """The shape and the messages of a list of turns, OpenAI's or ShareGPT's; `BadRow` if it is none."""
    if isinstance(value, str):
        value = parse_json(value)
    if not isinstance(value, list) or not value:
        raise BadRow("wrong type", f"`{name}` is not a list of messages")
    shapes, messages = [], []
    for index, turn in enumerate(value):
        where = f"`{name}[{index}]`"
        if not isinstance(turn, dict):
            raise BadRow("wrong type", f"{where} is not an object")
        shared = turn.get("from") is not None
        shapes.append(shared)
        messages.append(_shared(turn, where) if shared else _message(turn, where))
    return "ShareGPT turns" if any(shapes) else "OpenAI messages", messages


def _role(value: Any, where: str) -> str:
    role = SPEAKERS.get(value.lower()) if isinstance(value, str) else None
    if role is None:
        raise BadRow(
            "unknown role", f"{where} has the role {value!r}, and one of {', '.join(ROLES)} is expected"
        )
    return role


def _shared(turn: dict[str, Any], where: str) -> Message:
    """ShareGPT: `from` and `value`; a `function_call` is an assistant's turn that only calls."""
    role = _role(turn["from"], where)
    text = _text(turn.get("value"), f"the value of {where}")
    if str(turn["from"]).lower() != "function_call":
        return {"role": role, "content": text}
    call = parse_json(text)
    calls = call if isinstance(call, list) else [call]
    return {"role": role, "content": "", "tool_calls": [_call(item, where) for item in calls]}


def _message(turn: dict[str, Any], where: str) -> Message:
    """OpenAI: `role`, `content` (text, null, or parts), tool calls and their results, a separate thought."""
    role = _role(turn.get("role"), where)
    calls = turn.get("tool_calls") or ([turn["function_call"]] if turn.get("function_call") else [])
    if not isinstance(calls, list) or (calls and role != "assistant"):
        raise BadRow("wrong type", f"the tool calls of {where} are not a list in an assistant's message")
    content = turn.get("content")
    if content is None and calls:
        content = ""
    if isinstance(content, list):
        content = _parts(content, where)
    message: Message = {"role": role, "content": _text(content, f"the content of {where}")}
    if calls:
        message["tool_calls"] = tool_calls(calls, where)
    thought = turn.get("reasoning_content") or turn.get("reasoning") or turn.get("thinking")
    if role == "assistant" and thought:
        message["reasoning_content"] = _text(thought, f"the reasoning of {where}")
    for key in ("name", "tool_call_id") if role == "tool" else ():
        if turn.get(key) is not None:
            message[key] = _text(turn[key], f"`{key}` of {where}")
    return message


def _parts(parts: list[Any], where: str) -> str:
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise BadRow("not text", f"the content of {where} has parts that are not text")
        texts.append(text)
    return "".join(texts)


def tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """OpenAI's tool calls as templates want them; `BadRow` if they are none."""
    if not isinstance(calls, list):
        raise BadRow("wrong type", f"the tool calls of {where} are not a list")
    return [_call(call, where) for call in calls]


def _call(call: Any, where: str) -> dict[str, Any]:
    """A call as templates want it: the arguments an object, not its text."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow("wrong type", f"a tool call of {where} names no function")
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = parse_json(arguments or "{}")
    if not isinstance(arguments, dict):
        raise BadRow("wrong type", f"the arguments of a tool call of {where} are not an object")
    found = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if isinstance(call.get("id"), str):
        found["id"] = call["id"]
    return found


def _tools(fields: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    tools = fields.get("tools", fields.get("functions"))
    if tools is None:
        return ()
    if isinstance(tools, str):
        tools = parse_json(tools) if tools.strip() else []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow("wrong type", "`tools` is not a list of objects")
    return tuple(tool if "function" in tool else {"type": "function", "function": tool} for tool in tools)


def _tokens(fields: dict[str, Any], name: str) -> Row:
    tokens = _numbers(fields[name], name)
    if "loss_mask" in fields:
        mask = _numbers(fields["loss_mask"], "loss_mask")
        if not set(mask) <= {0, 1}:
            raise BadRow("wrong type", "`loss_mask` has other numbers than 0 and 1")
    elif "labels" in fields:
        mask = [int(label != IGNORED_LABEL) for label in _numbers(fields["labels"], "labels")]
    else:
        raise BadRow("missing field", f"`{name}` needs `loss_mask` or `labels` beside it")
    if len(mask) != len(tokens):
        raise BadRow("wrong type", f"`{name}` has {len(tokens)} numbers, and its mask {len(mask)}")
    return Row(tokens, mask)


def _numbers(value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or any(isinstance(n, bool) or not isinstance(n, int) for n in value):
        raise BadRow("wrong type", f"`{name}` is not a list of whole numbers")
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BadRow("wrong type", f"{name} is {type(value).__name__}, and text is expected")
    if "\x00" in value:
        raise BadRow("not text", f"{name} holds a NUL character")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow("not text", f"{name} holds half of a surrogate pair") from error
    return value


def _label(fields: dict[str, Any], key: str) -> str | None:
    value = fields.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise BadRow("wrong type", f"`{key}` is {type(value).__name__}, and text is expected")
    return _text(str(value), f"`{key}`")
