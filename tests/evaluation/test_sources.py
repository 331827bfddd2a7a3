"""Prompts on their way into an evaluation: thinking on or off, system prompts, what is left out."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepspec.config.schema import Config
from deepspec.errors import UserError
from deepspec.evaluation.sources import check_prompts, prompts_of, read_source
from tests.data.test_templates import qwen3


@pytest.fixture
def asked(config: Config, tmp_path: Path) -> Config:
    file = tmp_path / "questions.jsonl"
    rows = [{"question_id": 1, "category": "c", "turns": ["Why?"]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config.evaluate = replace(config.evaluate, tasks=["mtbench"], task_files={"mtbench": str(file)})
    return config


def texts(config: Config) -> list[str]:
    tokenizer = qwen3()
    target: Any = SimpleNamespace(tokenizer=tokenizer, eos=(), max_positions=10_000)
    prompts, _ = prompts_of(read_source(config, ""), config, target)
    return [tokenizer.decode(list(prompt.tokens)) for prompt in prompts]


def test_thinking_is_the_templates_argument(asked: Config) -> None:
    (on,) = texts(asked)
    asked.data.template_args = {"enable_thinking": False}
    (off,) = texts(asked)
    assert "Why?" in on and "</think>" not in on
    assert off.startswith(on) and "</think>" in off[len(on) :]


def test_a_system_prompt_goes_before_questions_that_have_none(asked: Config) -> None:
    assert "Be brief." not in texts(asked)[0]
    asked.data.system = "Be brief."
    (text,) = texts(asked)
    assert 0 < text.index("Be brief.") < text.index("Why?")


def test_tasks_and_a_file_of_prompts_are_not_mixed(asked: Config) -> None:
    asked.evaluate.prompts = asked.evaluate.task_files["mtbench"]
    with pytest.raises(UserError, match=r"evaluate\.tasks and evaluate\.prompts are both set"):
        check_prompts(asked)


def test_an_empty_task_alone_stops_with_its_file(asked: Config) -> None:
    Path(asked.evaluate.task_files["mtbench"]).write_text("\n", encoding="utf-8")
    with pytest.raises(
        UserError, match=r"No evaluation set can be had: mtbench: .*questions\.jsonl is empty"
    ):
        read_source(asked, "")
