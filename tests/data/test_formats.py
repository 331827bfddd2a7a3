"""Every format and every shape of row says the same thing; what is changed on the way is counted."""

import csv
import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from deepspec.config.schema import HubConfig
from deepspec.data.conversation import BadRow, Conversation, Tally
from deepspec.data.prompts import iter_prompts, prompts_sha256, read_prompts
from deepspec.data.shapes import check_columns, conversation
from deepspec.errors import UserError

PAIRS = [("What is 1, 2?", 'Three,\n"I think"'), ("naïve 漢?", "oui"), ("007", "1e5")]


def said(item: Conversation) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in item.messages]


EXPECTED = [[("user", question), ("assistant", answer)] for question, answer in PAIRS]


def table() -> pa.Table:
    return pa.table({"prompt": [q for q, _ in PAIRS], "response": [a for _, a in PAIRS]})


def lines() -> bytes:
    return "".join(json.dumps({"prompt": q, "response": a}) + "\n" for q, a in PAIRS).encode()


def write(path: Path) -> Path:
    name = path.name
    objects = [{"prompt": q, "response": a} for q, a in PAIRS]
    if name.endswith((".jsonl", ".ndjson", "lines.json")):
        path.write_bytes(lines())
    elif name.endswith("array.json"):
        path.write_text(json.dumps(objects, indent=1))
    elif name.endswith("object.json"):
        path.write_text(json.dumps({"version": 1, "data": objects}, indent=1))
    elif name.endswith((".csv", ".tsv")):
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, "excel-tab" if name.endswith("tsv") else "excel")
            writer.writerows([("prompt", "response"), *PAIRS])
    elif name.endswith(".parquet"):
        pq.write_table(table(), path)
    elif name.endswith("stream.arrow"):
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table().schema) as writer:
            writer.write_table(table())
    elif name.endswith((".arrow", ".feather")):
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table().schema) as writer:
            writer.write_table(table())
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines()))
    elif name.endswith(".zst"):
        with pa.CompressedOutputStream(str(path), "zstd") as sink:
            sink.write(lines())
    return path


NAMES = [
    *("a.jsonl", "a.ndjson", "lines.json", "array.json", "object.json", "a.csv", "a.tsv", "a.parquet"),
    *("stream.arrow", "file.arrow", "a.feather", "a.jsonl.gz", "a.jsonl.zst"),
]


@pytest.mark.parametrize("name", NAMES)
def test_the_same_rows_from_every_format(tmp_path: Path, name: str) -> None:
    tally = Tally(strict=True)
    found = read_prompts(write(tmp_path / name), tally)
    assert [said(item) for item in found] == EXPECTED
    assert not tally.counts and tally.shapes == {"`prompt` and `response`": 3}
    assert {item.source for item in found} == {name}


def test_a_folder_and_a_pattern_are_their_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    write(tmp_path / "b.parquet")
    write(tmp_path / "deep" / "c.jsonl.gz")
    (tmp_path / "a.txt").write_text("hello\n")
    (tmp_path / "README.md").write_text("not prompts")
    tally = Tally(strict=True)
    found = list(iter_prompts(str(tmp_path), tally))
    assert [item.source for item in found] == ["a.txt", *["b.parquet"] * 3, *["c.jsonl.gz"] * 3]
    some = list(iter_prompts(str(tmp_path / "**" / "*.jsonl*"), tally))
    assert [item.source for item in some] == ["c.jsonl.gz"] * 3
    before = prompts_sha256(tmp_path)
    assert before != prompts_sha256(str(tmp_path / "*.txt"))
    (tmp_path / "a.txt").write_text("hello again\n")
    assert prompts_sha256(tmp_path) != before
    for wrong in (tmp_path / "deep" / "*.csv", tmp_path / "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(UserError, match=r"No file matches|has no file of prompts"):
            list(iter_prompts(str(wrong), tally))


def test_a_hub_data_set_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def load_dataset(name: str, subset: str | None, **options: Any) -> Any:
        asked.append((name, subset, options))
        rows = Dataset.from_dict({"prompt": [q for q, _ in PAIRS], "response": [a for _, a in PAIRS]})
        return rows.to_iterable_dataset() if options["streaming"] else rows

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    for streaming in (True, False):
        hub = HubConfig(subset="en", split="test", revision="abc", streaming=streaming)
        found = list(iter_prompts("hf:some/set", Tally(strict=True), hub=hub))
        assert [said(item) for item in found] == EXPECTED
        assert asked[-1] == (
            "some/set",
            "en",
            {"split": "test", "revision": "abc", "streaming": streaming},
        )
        assert found[1].place == "hf:some/set, row 2"


def test_a_hub_data_set_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError("no such set\nand a traceback")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(UserError, match=r"The data set x/y cannot be loaded .*: no such set$"):
        list(iter_prompts("hf:x/y", Tally(strict=True)))


CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}

SHAPES: list[tuple[dict[str, Any], list[tuple[str, str]], str]] = [
    (
        {
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            "prompt": "a",
        },
        [("user", "a"), ("assistant", "b")],
        "OpenAI messages",
    ),
    (
        {
            "conversations": [
                {"from": "system", "value": "s"},
                {"from": "human", "value": "a"},
                {"from": "gpt", "value": "b"},
            ]
        },
        [("system", "s"), ("user", "a"), ("assistant", "b")],
        "ShareGPT turns",
    ),
    (
        {
            "system": "s",
            "conversations": [
                {"from": "human", "value": "a"},
                {"from": "function_call", "value": json.dumps(CALL["function"])},
                {"from": "observation", "value": "sun"},
                {"from": "gpt", "value": "b"},
            ],
        },
        [("system", "s"), ("user", "a"), ("assistant", ""), ("tool", "sun"), ("assistant", "b")],
        "ShareGPT turns",
    ),
    (
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        [("user", "Add.\n\n1 2"), ("assistant", "3")],
        "Alpaca columns",
    ),
    (
        {"instruction": "Say hi.", "input": "", "output": "hi", "system": "s"},
        [("system", "s"), ("user", "Say hi."), ("assistant", "hi")],
        "Alpaca columns",
    ),
    ({"prompt": "a", "answer": "b"}, [("user", "a"), ("assistant", "b")], "`prompt` and `answer`"),
    ({"prompt": "a", "completion": "b"}, [("user", "a"), ("assistant", "b")], "`prompt` and `completion`"),
    (
        {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]},
        [("user", "a"), ("assistant", "b")],
        "`prompt` and `completion`",
    ),
    ({"question": "a", "response": "b"}, [("user", "a"), ("assistant", "b")], "`question` and `response`"),
    ({"messages": json.dumps([{"role": "user", "content": "a"}])}, [("user", "a")], "OpenAI messages"),
]


@pytest.mark.parametrize(("row", "expected", "shape"), SHAPES, ids=[str(n) for n in range(len(SHAPES))])
def test_shapes_are_recognised_and_reported(
    row: dict[str, Any], expected: list[tuple[str, str]], shape: str
) -> None:
    tally = Tally(strict=True)
    assert said(conversation(row, "x", 1, tally)) == expected
    if shape.startswith("`prompt`") and isinstance(row["prompt"], list):
        shape = "OpenAI messages and `completion`"
    assert tally.shapes == {shape: 1}


def test_tools_calls_and_thoughts_are_kept() -> None:
    called = {**CALL, "function": {"name": "weather", "arguments": json.dumps({"city": "Paris"})}}
    row = {
        "tools": [TOOL["function"]],
        "messages": [
            {"role": "user", "content": "Sun?"},
            {"role": "assistant", "content": None, "tool_calls": [called], "reasoning_content": "ask"},
            {"role": "tool", "content": "yes", "tool_call_id": "c1", "name": "weather"},
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "Yes"}, {"type": "text", "text": "."}],
            },
        ],
    }
    found = conversation(row, "x", 1, Tally(strict=True))
    assert found.tools == (TOOL,)
    assert found.messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [CALL],
        "reasoning_content": "ask",
    }
    assert found.messages[2] == {"role": "tool", "content": "yes", "name": "weather", "tool_call_id": "c1"}
    assert found.messages[3]["content"] == "Yes."
    plain = {**row, "messages": row["messages"][:1], "tools": None}
    assert conversation(plain, "x", 1, Tally(strict=True)).key != found.key


def test_ready_made_tokens() -> None:
    tally = Tally(strict=True)
    found = conversation({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, "x", 1, tally)
    assert found.row is not None
    assert (found.row.tokens, found.row.loss_mask) == ([5, 6, 7], [0, 1, 1])
    assert found.messages == () and list(found.prompts()) == [] and not found.has_answer
    other = conversation({"tokens": [5, 6, 7], "loss_mask": [0, 1, 1]}, "x", 1, tally)
    assert other.id == found.id and tally.shapes == {"tokens": 2}


def test_the_column_map_names_what_is_content() -> None:
    tally = Tally(strict=True)
    row = {"query": "a", "reply": "b", "prompt": "something else", "topic": "t", "score": 3}
    columns = {"prompt": "query", "response": "reply", "category": "topic"}
    found = conversation(row, "x", 1, tally, columns)
    assert said(found) == [("user", "a"), ("assistant", "b")] and found.category == "t"
    assert {name for name in tally.notes if "prompt" in name} and tally.notes["column not used: score"] == 1
    with pytest.raises(BadRow, match="missing field: `query`"):
        conversation({"reply": "b"}, "x", 1, tally, columns)
    with pytest.raises(UserError, match=r"data.columns has no field 'promt'"):
        check_columns({"promt": "query"})


def messages(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def test_rules_for_odd_conversations_are_applied_and_counted() -> None:
    tally = Tally(strict=True)
    odd = messages(
        ("system", "  "),
        ("assistant", "Welcome!"),
        ("user", "a"),
        ("user", "b"),
        ("assistant", "c"),
        ("user", "d"),
    )
    assert said(conversation(odd, "x", 1, tally)) == [("user", "a\n\nb"), ("assistant", "c"), ("user", "d")]
    assert tally.notes == {
        "blank system messages left out": 1,
        "assistant messages before the first question left out": 1,
        "questions in a row joined": 1,
    }


ROLES = st.sampled_from(["system", "user", "assistant", "tool"])


@given(st.lists(st.tuples(ROLES, st.sampled_from(["", " ", "text", "more"])), min_size=1, max_size=6))
def test_whatever_is_kept_is_a_conversation(turns: list[tuple[str, str]]) -> None:
    try:
        found = conversation(messages(*turns), "x", 1, Tally(strict=True))
    except BadRow:
        return
    all_roles = [role for role, _ in said(found)]
    roles = [role for role in all_roles if role != "system"]
    assert roles[0] == "user" and all(text.strip() for role, text in said(found) if role != "tool")
    assert ("user", "user") not in pairwise(all_roles)
    assert not {("assistant", "assistant"), ("user", "tool")} & set(pairwise(roles))
    asked = "".join(text for role, text in turns if role == "user")
    assert "".join(found.user_text().split()) == "".join(asked.split())  # no question is lost


def test_an_array_in_a_jsonl_file_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('[\n{"prompt": "x"},\n{"prompt": "y"}\n]\n')
    for strict in (True, False):
        with pytest.raises(UserError, match=r"one JSON array, and a .jsonl file .* rename it to .json"):
            read_prompts(path, Tally(strict=strict))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'[{"prompt": "x"},\n {"prompt": ]', "is not valid JSON"),
        ("a.json", b'{\n"a": [], "b": []\n}', "it holds 2"),
        ("a.parquet", b"PAR1 not really", "is damaged or not what its suffix says"),
        ("a.arrow", b"not arrow", "is damaged or not what its suffix says"),
        ("a.jsonl.gz", b"plain text", "is damaged or not what its suffix says"),
        ("a.jsonl.gz", gzip.compress(lines())[:-9], "is damaged or not what its suffix says"),
        ("a.jsonl.zst", b"plain text", "damaged|cannot be read"),
        ("a.csv", b"prompt\n\xff\n", "line 2: not UTF-8"),
    ],
)
def test_a_file_that_is_broken_as_a_whole(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_prompts(tmp_path / name, Tally(strict=False))


def test_a_csv_row_of_other_width_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('prompt,response\na,b\nonly one\n"two\nlines",d\n')
    tally = Tally(strict=False)
    assert [item.line for item in read_prompts(path, tally)] == [2, 5]
    assert tally.counts == {"wrong number of cells": 1}
