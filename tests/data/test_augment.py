"""Changed prompts: still the same conversation's, told where they come from, on the training side alone."""

import ast
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspec.config.schema import Answers
from deepspec.data.augment import read_augmentations
from deepspec.data.augment.rename import Rename, renamed
from deepspec.data.augment.rules import Rules
from deepspec.data.augment.synonyms import TABLE, Synonyms
from deepspec.data.augment.system import System
from deepspec.data.augment.truncate import Truncate
from deepspec.data.augment.typos import Typos
from deepspec.data.conversation import Message, check_messages
from deepspec.errors import UserError
from tests.data.faulty_server import FaultyServer
from tests.data.test_build_data import conversations, make
from tests.data.test_servers import config as server_config
from tests.data.test_servers import prepare
from tests.data.toy_target import ToyAnswers, toy_facts

CODE = "```python\ndef explain(begin):\n    important = begin\n    return important\n```"
TEXT = f"Please explain the important difference. What is it? It is a quick test.\n{CODE}\nWrite a short summary."


def asked(*texts: str) -> list[Message]:
    turns: list[Message] = []
    for text in texts:
        turns += [{"role": "user", "content": text}, {"role": "assistant", "content": "an answer"}]
    return turns[:-1]


def lines(text: str) -> int:
    return len(text.split("\n"))


@pytest.mark.parametrize(
    "kind", [Typos(rate=1.0), Synonyms(rate=1.0), Rules(rate=1.0)], ids=lambda kind: kind.name
)
def test_words_change_and_code_and_answers_do_not(kind: Callable[..., list[Message] | None]) -> None:
    changed = kind(asked(TEXT, "Explain the important idea"), random.Random(1))
    assert changed is not None
    first = changed[0]["content"]
    assert first != TEXT and CODE in first and lines(first) == lines(TEXT)
    assert [message["role"] for message in changed] == ["user", "assistant", "user"]
    assert changed[1]["content"] == "an answer"


def test_each_typo_is_one_slip_away() -> None:
    words = TEXT.replace(CODE, "").split()
    (changed,) = Typos(rate=0.5)(asked(" ".join(words)), random.Random(3)) or []
    pairs = list(zip(words, changed["content"].split(), strict=True))
    different = [(old, new) for old, new in pairs if old != new]
    assert different and all(len(re.sub(r"\W", "", old)) >= 4 for old, _ in different)
    for old, new in different:
        assert (
            abs(len(old) - len(new)) <= 1
            and old[0] == new[0]
            and set(new) - set(old) <= set("qwertyuiopasdfghjklzxcvbnm")
        )


def test_synonyms_are_of_one_group() -> None:
    assert all(word in TABLE[other] for word, others in TABLE.items() for other in others)
    (changed,) = Synonyms(rate=1.0)(asked("Explain the quick test"), random.Random(0)) or []
    first, _, third, fourth = changed["content"].split()
    assert first == "Clarify" and third in TABLE["quick"] and fourth in TABLE["test"]


def test_truncation_keeps_a_beginning() -> None:
    text = " ".join(str(n) for n in range(50))
    shares = set()
    for seed in range(30):
        changed = Truncate(0.4, 0.8)(asked("first question of some words", text), random.Random(seed))
        assert changed is not None and changed[0]["content"] == "first question of some words"
        short = changed[2]["content"]
        assert text.startswith(short + " ")
        shares.add(len(short.split()))
    assert min(shares) >= 20 and max(shares) <= 40 and len(shares) > 5
    assert Truncate()(asked("only three words"), random.Random(0)) is None


def test_another_system_prompt_takes_the_first_ones_place() -> None:
    kind = System(prompts=["one", "two"])
    bare = kind(asked("a"), random.Random(0))
    assert bare is not None and bare[0]["role"] == "system" and bare[1:] == asked("a")
    other = kind([{"role": "system", "content": "old"}, *asked("a")], random.Random(0))
    assert other is not None and [message["role"] for message in other] == ["system", "user"]
    assert (
        System(prompts=["old"])([{"role": "system", "content": "old"}, *asked("a")], random.Random(0)) is None
    )


PROGRAMS = [
    "def f(values, scale=2):\n    total = 0\n    for value in values:\n"
    "        total += value * scale\n    return total\n",
    "def f(values):\n    return sorted((v for v in values if v > 1), key=lambda v: -v)[0]\n",
    "import math\nlimit = 3\ndef f(values):\n    limit_two = math.sqrt(sum(values)) + limit\n"
    "    return f'{limit_two:.2f}'\n",
    "class Box:\n    def __init__(self, items):\n        self.items = items\n    def size(self):\n"
    "        items = self.items\n        return len(items)\ndef f(values):\n    return Box(items=values).size()\n",
    "def f(values):\n    try:\n        first, *rest = values\n        return {'rest': rest}\n"
    "    except ValueError as rest_error:\n        return str(rest_error)\n",
]


@pytest.mark.parametrize("program", PROGRAMS, ids=[str(n) for n in range(len(PROGRAMS))])
def test_renamed_code_computes_the_same(program: str) -> None:
    outputs = []
    for seed in range(6):
        other = renamed(program, random.Random(seed), 1.0)
        ast.parse(other)
        for code in (program, other):
            scope: dict[str, Any] = {}
            exec(code, scope)
            outputs.append(scope["f"]([3, 1, 2]))
        assert other.count("\n") == program.count("\n")
    assert len({repr(output) for output in outputs}) == 1
    assert program == PROGRAMS[3] or renamed(program, random.Random(0), 1.0) != program


def test_only_python_that_parses_is_renamed() -> None:
    for code in ("def f(:\n", "SELECT value FROM t\n", ""):
        assert renamed(code, random.Random(0), 1.0) == code
    text = "```js\nlet value = 1\n```\n```\ndef f(value):\n    return value\n```"
    (changed,) = Rename(share=1.0)(asked(text), random.Random(0)) or []
    assert (
        changed["content"].startswith("```js\nlet value = 1\n```")
        and "def f(value)" not in changed["content"]
    )


TEXTS = st.text(alphabet=st.sampled_from(list("abz EX.?'`\né漢\t")), min_size=1, max_size=60).filter(
    str.strip
)
KINDS = [Typos(1.0), Synonyms(1.0), Truncate(0.1, 0.9, 1), System(), Rename(1.0), Rules(1.0)]


@settings(max_examples=60, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=3), st.sampled_from(KINDS), st.integers(0, 1000))
def test_whatever_the_text_the_result_is_a_conversation(
    texts: list[str], kind: Callable[..., list[Message] | None], seed: int
) -> None:
    changed = kind(asked(*texts), random.Random(seed))
    assert changed == kind(asked(*texts), random.Random(seed))
    if changed is not None:
        assert changed != asked(*texts)
        check_messages(changed)


def prompts(folder: Path, count: int = 24) -> str:
    path = folder / "prompts.jsonl"
    rows = [
        {
            "prompt": f"Please explain the important thing number {n}",
            "response": "given answer",
            "id": f"p{n}",
        }
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_rows_are_added_to_train_with_their_origin(tmp_path: Path) -> None:
    entries = [
        {"name": "typos", "probability": 1.0, "rate": 0.5},
        {"name": "synonyms", "probability": 0.5, "seed": 3},
    ]
    made = make(tmp_path / "data", prompts=prompts(tmp_path), augment=entries)
    rows = conversations(tmp_path / "data")
    by = {name: [row for row in rows if row["changed_by"] == name] for name in ("", "typos", "synonyms")}
    assert len(by[""]) == 24 and {row["split"] for row in by["typos"] + by["synonyms"]} == {"train"}
    held = {row["group"] for row in rows if row["split"] == "held_out"}
    assert not held & {row["group"] for row in by["typos"]}
    notes = made["counts"]["noted"]
    assert len(by["typos"]) == notes["prompts added by typos"] > 10
    assert 3 <= len(by["synonyms"]) == notes["prompts added by synonyms"] <= 15
    originals = {row["id"]: row for row in by[""]}
    for row in by["typos"]:
        original = originals[row["id"].removesuffix("+typos")]
        assert row["group"] == original["group"] and row["origin"] == "regenerated"
        assert json.loads(row["messages"])[0] != json.loads(original["messages"])[0]
    plain = make(tmp_path / "plain", prompts=prompts(tmp_path))
    kept = {tuple(row["tokens"]) for row in conversations(tmp_path / "plain")}
    assert kept == {tuple(row["tokens"]) for row in by[""]} and plain["fingerprint"] != made["fingerprint"]


def test_with_mixed_answers_a_changed_prompt_never_keeps_the_old_one(tmp_path: Path) -> None:
    entries = [{"name": "typos", "rate": 0.5}]
    settings = {"answers": Answers.mixed, "regenerated_prompts": 5, "augment": entries}
    made = make(tmp_path / "data", prompts=prompts(tmp_path), **settings)
    for row in conversations(tmp_path / "data"):
        assert row["origin"] == "regenerated" or not row["changed_by"]
    assert made["counts"]["left_out"]["no given answer, and not regenerated"] > 5
    with pytest.raises(UserError, match="has no answers to the changed ones"):
        make(tmp_path / "given", prompts=prompts(tmp_path), answers=Answers.given, augment=entries)


def test_a_paraphrase_and_a_translation_are_what_the_target_says(tmp_path: Path) -> None:
    toy = ToyAnswers(toy_facts())
    make(
        tmp_path / "data",
        toy,
        prompts=prompts(tmp_path, 8),
        held_out_prompts=2,
        max_length=300,
        augment=[{"name": "paraphrase", "question": "Again: {text}"}, {"name": "back_translation"}],
    )
    rows = [row for row in conversations(tmp_path / "data") if row["changed_by"]]
    told = {}
    for prompt, seed in zip((p for batch in toy.batches for p in batch), toy.seeds, strict=True):
        answer = toy.answer(prompt, seed)
        text = toy.facts.tokenizer.decode(prompt)
        told[text] = toy.facts.tokenizer.decode([t for t in answer if t not in toy.facts.eos])
    paraphrases = [row for row in rows if row["changed_by"] == "paraphrase"]
    assert paraphrases and any(row["changed_by"] == "back_translation" for row in rows)
    for row in paraphrases:
        number = row["id"].removesuffix("+paraphrase")[1:]
        question = f"Again: Please explain the important thing number {number}"
        (answer,) = [said for text, said in told.items() if f"user\n{question}<" in text]
        assert json.loads(row["messages"])[0]["content"] == answer


def test_servers_translate_too(tmp_path: Path) -> None:
    with FaultyServer() as server:
        settings = server_config(
            tmp_path, server, augment=[{"name": "back_translation", "via": "French"}], max_length=200
        )
        made = prepare(tmp_path / "data", settings)
        sent = [body["messages"][-1]["content"] for body in server.requests]
    assert made["counts"]["noted"]["prompts added by back_translation"] >= 1
    assert any("into French" in text for text in sent) and any("into English" in text for text in sent)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"name": "typo"}, "name is one of typos, synonyms"),
        ({}, "name is one of"),
        ({"name": "typos", "rat": 1}, r"typos has no option 'rat', only name, probability, seed, rate"),
        ({"name": "typos", "rate": "much"}, "rate is a number"),
        ({"name": "typos", "probability": 2}, "probability is between 0 and 1"),
        ({"name": "typos", "seed": "x"}, "seed is a whole number"),
    ],
)
def test_an_entry_that_cannot_be_used_is_named(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=rf"data\.augment\[0\]: .*{message}"):
        read_augmentations([entry])
