"""Built-in prompts: real code with its own docstrings, and several hundred different questions."""

import ast
import inspect
import textwrap
from collections import Counter
from functools import cache

import pytest

from deepspec.config.schema import Answers, DataConfig
from deepspec.data import gather
from deepspec.data.conversation import Conversation, check_messages
from deepspec.data.questions import question_prompts
from deepspec.data.selection import builtin_prompts
from deepspec.data.stdlib import stdlib_prompts
from deepspec.errors import UserError


@cache
def tasks() -> list[Conversation]:
    return stdlib_prompts(0)[0]


def answer(task: Conversation) -> str:
    return task.messages[1]["content"]


def fenced(text: str) -> str:
    return text.split("```python\n", 1)[1].rsplit("\n```", 1)[0]


def test_every_kind_of_task_is_there_and_functions_come_once_before_twice() -> None:
    kinds = Counter(task.category for task in tasks())
    assert set(kinds) == {"code_completion", "docstring", "explain", "unit_test", "returns"}
    assert min(kinds.values()) >= 20 and kinds["code_completion"] > 1000
    functions = [task.id.split(":")[1] for task in tasks()[:1000]]
    assert Counter(functions).most_common(1)[0][1] <= 3  # methods of one name in one module, not one function
    for task in tasks():
        check_messages(task.messages)
        assert task.group == "stdlib:" + task.id.split(":")[1].rsplit(".", 1)[0]
        assert len(task.messages[0]["content"]) < 2600
        assert task.has_answer == (task.category != "unit_test")


def test_known_functions_have_their_own_docstring_and_source_as_answers() -> None:
    mine = {task.category: task for task in tasks() if task.id.startswith("stdlib:textwrap.indent:")}
    code = textwrap.dedent(inspect.getsource(textwrap.indent)).rstrip()
    assert fenced(answer(mine["code_completion"])) == code
    assert code.startswith(fenced(mine["code_completion"].messages[0]["content"]))
    explained = mine["explain"]
    assert answer(explained) == (inspect.getdoc(textwrap.indent) or "").strip()
    shown = ast.parse(fenced(explained.messages[0]["content"]))
    whole = ast.parse(code)
    whole.body[0].body = whole.body[0].body[1:]  # type: ignore[attr-defined]
    assert ast.dump(shown) == ast.dump(whole)


def test_what_a_call_returns_is_what_it_returns() -> None:
    import statistics

    checked = 0
    for task in tasks():
        if task.category == "returns" and task.group == "stdlib:statistics":
            call = task.messages[0]["content"].split("`")[
                1 if "What does" in task.messages[0]["content"] else 3
            ]
            value = eval(call, vars(statistics).copy())
            want = answer(task).split("```\n")[1].rstrip("\n").rstrip("`").rstrip()
            assert repr(value) == want, task.id
            checked += 1
    assert checked >= 3


def test_order_depends_on_the_seed_alone() -> None:
    again, digest = stdlib_prompts(0)
    other, same = stdlib_prompts(1)
    assert [task.id for task in again] == [task.id for task in tasks()]
    assert [task.id for task in other] != [task.id for task in again] and digest == same
    assert Counter(task.category for task in other) == Counter(task.category for task in again)


def test_questions_are_many_and_different() -> None:
    found, _ = question_prompts(0)
    texts = [item.messages[0]["content"] for item in found]
    assert len(texts) >= 400 and len(set(texts)) == len(texts)
    assert len({item.category for item in found}) >= 6
    assert min(Counter(item.category for item in found).values()) >= 40
    starts = Counter(" ".join(text.split()[:5]).lower() for text in texts)
    assert starts.most_common(1)[0][1] <= len(texts) // 20
    assert all(text == text.strip() and 10 <= len(text) <= 200 for text in texts)


def test_as_many_as_asked_half_of_them_questions() -> None:
    found, hashes = builtin_prompts(100, None, seed=0)
    assert len({item.id for item in found}) == 100
    assert Counter(item.source for item in found) == {"questions": 50, "stdlib": 50}
    assert set(hashes) == {"questions", "stdlib"}
    few, _ = builtin_prompts(100, 10, seed=0)
    assert len(few) == 100 and sum(not item.has_answer for item in few) == 10
    assert max(Counter(item.category for item in found if item.source == "stdlib").values()) == 10
    with pytest.raises(UserError, match="builtin_prompts=1000000"):
        builtin_prompts(1_000_000, None, seed=0)


def test_mixed_data_takes_no_more_unanswered_prompts_than_it_can_use() -> None:
    settings = DataConfig(
        builtin_prompts=200, answers=Answers.mixed, regenerated_prompts=40, held_out_prompts=10
    )
    found = [item for _, item in gather(settings).store.conversations()]
    assert len(found) == 200 and sum(not item.has_answer for item in found) == 25
