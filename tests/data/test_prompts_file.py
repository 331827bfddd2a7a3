"""The prompts file: every usual shape is read, every bad line named or counted."""

import json
from pathlib import Path
from typing import Any

import pytest

from deepspec.data.conversation import Conversation, Tally
from deepspec.data.prompts import read_prompts
from deepspec.errors import UserError


def write(path: Path, *rows: Any) -> Path:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8"
    )
    return path


def read(path: Path, strict: bool = True) -> tuple[list[Conversation], Tally]:
    tally = Tally(strict=strict)
    return read_prompts(path, tally), tally


def turns(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in conversation.messages]


def test_every_shape_of_row(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl",
        {"prompt": "one"},
        json.dumps("bare"),
        {"prompt": "two", "response": "2", "category": "c", "group": "g", "id": 7},
        {"question": "three", "answer": "3"},
        {"question": "four", "answer": None},
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "fi"}, {"type": "text", "text": "ve"}]},
                {"role": "assistant", "content": "5"},
                {"role": "user", "content": "six"},
            ]
        },
    )
    found, tally = read(path)
    assert [turns(item) for item in found] == [
        [("user", "one")],
        [("user", "bare")],
        [("user", "two"), ("assistant", "2")],
        [("user", "three"), ("assistant", "3")],
        [("user", "four")],
        [("system", "s"), ("user", "five"), ("assistant", "5"), ("user", "six")],
    ]
    assert (found[2].category, found[2].group, found[2].id, found[2].line) == ("c", "g", "7", 3)
    assert [item.has_answer for item in found] == [False, False, True, True, False, False]
    assert not tally.counts


def test_plain_text_has_a_prompt_a_line_and_only_newlines_end_lines(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes("\ufefffirst\r\n\n  second\u2028still second \n{not json".encode())
    found, tally = read(path)
    assert [turns(item)[0][1] for item in found] == ["first", "second\u2028still second", "{not json"]
    assert [item.line for item in found] == [1, 3, 4]
    assert tally.counts == {"blank line": 1}


def test_same_question_with_two_answers_is_one_group(tmp_path: Path) -> None:
    found, _ = read(
        write(tmp_path / "p.jsonl", {"prompt": "q", "response": "a"}, {"prompt": "q", "response": "b"})
    )
    assert found[0].group == found[1].group and found[0].id != found[1].id


BAD = [
    ('{"prompt": "x"', "broken JSON"),
    ('{"prompt": "x', "broken JSON: Unterminated string starting at column 12"),
    ("[" * 100_000, "broken JSON"),
    ("[1]", "not a JSON object"),
    ({"text": "x"}, "missing field"),
    ({"prompt": "a", "question": "b"}, "ambiguous row"),
    ({"prompt": 3}, "wrong type"),
    ({"prompt": "a", "response": ["b"]}, "wrong type"),
    ({"prompt": "a", "category": {}}, "wrong type"),
    ({"prompt": "a", "id": True}, "wrong type"),
    ({"prompt": "  "}, "an empty user message"),
    ({"prompt": "a", "response": ""}, "an empty assistant message"),
    ('{"prompt": "\\ud800"}', "not text"),
    ({"messages": []}, "wrong type"),
    ({"messages": ["a"]}, "wrong type"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "unknown role"),
    ({"messages": [{"role": "user"}]}, "wrong type"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "not text"),
    ({"messages": [{"role": "system", "content": "a"}]}, "no user message"),
    ({"messages": [{"role": "assistant", "content": "a"}]}, "no user message"),
    (
        {"messages": [{"role": "tool", "content": "a"}, {"role": "user", "content": "a"}]},
        "the first message",
    ),
    (
        {"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "a"}]},
        "a tool's result without a call",
    ),
    ('{"prompt": "a\x00b"}', "NUL byte"),
    ('{"prompt": "a\\u0000b"}', "not text"),
    ('{"prompt": ' + "9" * 5000 + "}", "broken JSON"),
    ('{"prompt": ' + "[" * 900 + "]" * 900 + "}", "wrong type"),
    ('{"prompt": "' + "x" * 10_000_000 + '"}', "row too long"),
    ({"prompt": "a", "answer": "b", "response": "c"}, "ambiguous row"),
    ({"tokens": [1, 2]}, "missing field"),
    ({"tokens": [1, 2], "loss_mask": [1]}, "wrong type"),
    ({"input_ids": [1, "2"], "labels": [1, 2]}, "wrong type"),
    ({"prompt": "a", "tools": "{"}, "broken JSON"),
    (
        {"messages": [{"role": r, "content": "a"} for r in ("user", "assistant", "assistant")]},
        "two assistant",
    ),
    (
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "", "tool_calls": [1]},
            ]
        },
        "wrong type",
    ),
    ({"prompt": "other", "id": "first"}, "repeated id"),
]


@pytest.mark.parametrize(
    ("row", "reason"), BAD, ids=[f"{index}-{reason}" for index, (_, reason) in enumerate(BAD)]
)
def test_a_bad_line_stops_with_its_number_or_is_counted_with_its_reason(
    tmp_path: Path, row: Any, reason: str
) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "good", "id": "first"}, row, {"prompt": "good too"})
    with pytest.raises(UserError, match=rf"p\.jsonl, line 2: {reason}"):
        read(path)
    found, tally = read(path, strict=False)
    assert [item.line for item in found] == [1, 3]
    (reject,) = tally.rejects
    assert reject["line"] == 2 and reject["reason"].startswith(reason)
    assert sum(tally.counts.values()) == 1


def test_a_line_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes(b"fine\ncaf\xe9\n")
    with pytest.raises(UserError, match=r"line 2: not UTF-8: byte 4 of the line is 0xe9"):
        read(path)
    found, tally = read(path, strict=False)
    assert len(found) == 1 and tally.counts == {"not UTF-8": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "does not exist"), (b"", "is empty"), (b" \n\n", "is empty"), ("x\n".encode("utf-16"), "UTF-16")],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "p.jsonl"
    if content is not None:
        path.write_bytes(content)
    for strict in (True, False):
        with pytest.raises(UserError, match=message):
            read(path, strict)
