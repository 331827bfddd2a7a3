"""From a row of a published set to a question, with the instructions the field customarily adds to it."""

import json
import re
from typing import Any

from deepspec.evaluation.tasks.item import Check, Item, Row

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
COMPLETE = (
    "Complete the following Python function. Answer with the whole function in one ```python code block."
)
WRITE = "Write a Python function for this task. Answer with the function in one ```python code block."
PROGRAM = (
    "Write a Python program that reads the input from standard input and prints the answer. "
    "Answer with the whole program in one ```python code block."
)


class BadTaskRow(Exception):
    """A row lacks what its set should have."""


def first(row: Row, *names: str) -> Any:
    """The first of these fields that the row has; published copies of a set name them differently."""
    for name in names:
        if row.get(name) not in (None, ""):
            return row[name]
    raise BadTaskRow(f"it has none of {', '.join(names)}")


def _id(row: Row, task: str, number: int, *names: str) -> str:
    found = next((row[name] for name in names if row.get(name) not in (None, "")), number)
    return str(found) if str(found).startswith(task) else f"{task}/{found}"


def gsm8k(row: Row, number: int) -> Item:
    """Grade-school word problems (Cobbe et al. 2021); the answer's last line is `#### 42`."""
    answer = str(first(row, "upstream_answer", "answer", "expected"))
    expected = str(row.get("expected") or answer.rpartition("####")[2]).strip().replace(",", "")
    reference = re.sub(r"<<.*?>>", "", answer).replace("####", "The answer is")
    return Item(
        _id(row, "gsm8k", number, "id"),
        "gsm8k",
        (f"{first(row, 'question', 'prompt')}\n\n{BOXED}",),
        ((reference,),),
        Check("number", expected),
    )


def math500(row: Row, number: int) -> Item | None:
    """MATH-500 (Hendrycks et al. 2021; Lightman et al. 2023)."""
    if row.get("data_source", "MATH500") != "MATH500":
        return None
    return _mathematics(row, number, "math500")


def aime(row: Row, number: int) -> Item | None:
    """AIME problems; answers are whole numbers from 0 to 999."""
    if not str(row.get("data_source", "AIME")).startswith("AIME"):
        return None
    return _mathematics(row, number, "aime")


def _mathematics(row: Row, number: int, task: str) -> Item:
    expected = str(first(row, "answer", "Answer"))
    solution = row.get("solution")
    return Item(
        _id(row, task, number, "unique_id", "gid", "id", "ID"),
        task,
        (f"{first(row, 'problem', 'question', 'Problem')}\n\n{BOXED}",),
        ((str(solution),),) if solution else (),
        Check("math", expected),
    )


def humaneval(row: Row, number: int) -> Item:
    """HumanEval (Chen et al. 2021): complete a function from its signature and docstring."""
    prompt, entry = str(first(row, "prompt")), str(first(row, "entry_point"))
    check = Check("code", tests=f"{first(row, 'test')}\n\ncheck({entry})\n", head=prompt, entry=entry)
    return Item(
        _id(row, "humaneval", number, "task_id"),
        "humaneval",
        (f"{COMPLETE}\n\n```python\n{prompt.rstrip()}\n```",),
        ((prompt + str(row.get("canonical_solution", "")),),),
        check,
    )


def mbpp(row: Row, number: int) -> Item:
    """MBPP (Austin et al. 2021): a task in words, with the tests shown, as is customary."""
    tests = [str(test) for test in first(row, "test_list")]
    imports = "\n".join(str(line) for line in row.get("test_imports") or [])
    setup = str(row.get("test_setup_code") or "")
    text = first(row, "prompt", "text")
    return Item(
        _id(row, "mbpp", number, "task_id"),
        "mbpp",
        (f"{WRITE}\n\n{text}\n\nIt should pass these tests:\n" + "\n".join(tests),),
        ((str(row["code"]),),) if row.get("code") else (),
        Check("code", tests="\n".join([imports, setup, *tests])),
    )


def livecodebench(row: Row, number: int) -> Item:
    """LiveCodeBench (Jain et al. 2024): programs from standard input to standard output.

    Judged by the public tests alone: the private ones are pickles, which are not read.
    """
    tests = row.get("public_test_cases") or "[]"
    tests = json.loads(tests) if isinstance(tests, str) else tests
    cases = tuple((str(t["input"]), str(t["output"])) for t in tests if t.get("testtype", "stdin") == "stdin")
    starter = f"\n\nStart from:\n```python\n{row['starter_code']}\n```" if row.get("starter_code") else ""
    return Item(
        _id(row, "livecodebench", number, "question_id"),
        "livecodebench",
        (f"{PROGRAM}\n\n{first(row, 'question_content', 'prompt')}{starter}",),
        (),
        Check("code", cases=cases) if cases else None,
    )


def mtbench(row: Row, number: int) -> Item:
    """MT-Bench (Zheng et al. 2023): two turns; some have reference answers, one a turn."""
    item = _turns(row, number, "mtbench")
    kind = str(row.get("category", "")).replace("/", "-")
    name = first({**row, "number": number}, "question_id", "prompt_id", "number")
    return Item(f"mtbench/{kind}/{name}", "mtbench", item.turns, item.references)


def spec_bench(row: Row, number: int) -> Item:
    """Spec-Bench (Xia et al. 2024): six kinds of text, always reported apart."""
    item = _turns(row, number, "spec_bench")
    return Item(item.id, f"spec_bench: {row.get('category', 'all')}", item.turns, item.references, item.check)


def arena_hard(row: Row, number: int) -> Item:
    """Arena-Hard (Li et al. 2024): hard questions of real people, no references."""
    return _turns(row, number, "arena_hard")


def _turns(row: Row, number: int, task: str) -> Item:
    turns = first(row, "turns", "prompt")
    turns = turns if isinstance(turns, list | tuple) else [turns]
    said = [turn.get("content") if isinstance(turn, dict) else turn for turn in turns]
    texts = tuple(text for text in said if isinstance(text, str) and text.strip())
    if not texts or len(texts) < len(said):
        raise BadTaskRow("its turns must be texts, at least one and none empty")
    references = row.get("reference") or []
    references = [references] if isinstance(references, str) else references
    return Item(
        _id(row, task, number, "question_id", "uid", "prompt_id"),
        task,
        texts,
        tuple((str(text),) if str(text).strip() else () for text in references),
    )


def alpacaeval(row: Row, number: int) -> Item:
    """AlpacaEval (Li et al. 2023): instructions; the reference model's output is the reference."""
    output = row.get("output")
    return Item(
        f"alpacaeval/{number}",
        "alpacaeval",
        (str(first(row, "instruction")),),
        ((str(output),),) if output else (),
    )
