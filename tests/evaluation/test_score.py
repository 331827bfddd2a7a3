"""Scores of answers, side by side."""

import pytest

from deepspec.evaluation.quality.score import ALL, QualityPlan, judge
from deepspec.evaluation.result import PromptRecord
from deepspec.evaluation.tasks.item import Check
from tests.reporting.synthetic import make_records


def answers(record: PromptRecord, plain: str, speculative: str) -> None:
    record.plain[0].text, record.speculative[0].text = plain, speculative


@pytest.fixture
def records() -> list[PromptRecord]:
    found = make_records(10)
    for number, record in enumerate(found):
        record.category = "maths" if number % 2 else "code"
        record.references = ["the answer is two"] if number % 2 else []
        answers(record, "the answer is \\boxed{2}", "the answer is \\boxed{2}")
    answers(found[1], "\\boxed{2}", "\\boxed{3}")
    return found


def test_sides_are_compared_prompt_by_prompt(records: list[PromptRecord]) -> None:
    checks = {r.id: Check("number", "2") for r in records if r.category == "maths"}
    quality = judge(records, checks, QualityPlan(("exact_match",), resamples=200), sampled=False)
    of = {(row.metric, row.task): row for row in quality.rows}
    solved = of["solved", ALL]
    assert (solved.plain.value, solved.speculative.value) == (1.0, 0.8)
    assert solved.difference.value == pytest.approx(-0.2) and solved.plain.prompts == 5
    assert of["exact_match", "maths"].corpus_plain == 0.0
    assert ("solved", "code") not in of and ("repetition", "code") in of
    assert quality.identical == 9 and quality.compared == 10 and quality.isolation is None
    assert any("5 prompts that have a reference" in note for note in quality.notes)
    assert quality.two_sample is None


def test_an_interval_of_a_difference_may_be_negative(records: list[PromptRecord]) -> None:
    for record in records[::3]:
        answers(record, "\\boxed{2}", "\\boxed{1}")
    checks = {r.id: Check("number", "2") for r in records}
    (row,) = [
        row
        for row in judge(records, checks, QualityPlan(), sampled=False).rows
        if (row.metric, row.task) == ("solved", ALL)
    ]
    low, value, high = row.difference.low, row.difference.value, row.difference.high
    assert low is not None and value is not None and high is not None
    assert low < value < high and low < 0


def test_programs_run_only_when_that_is_allowed(records: list[PromptRecord]) -> None:
    checks = {r.id: Check("code", tests="assert x == 2") for r in records}
    for record in records:
        answers(record, "```python\nx = 2\n```", "```python\nx = 2\n```")
    answers(records[0], "```python\nx = 2\n```", "```python\nwhile True: pass\n```")
    careful = judge(records[:3], checks, QualityPlan(), sampled=False)
    assert not any(row.metric == "solved" for row in careful.rows)
    assert any("allow_code_execution" in note for note in careful.notes)
    quality = judge(records[:3], checks, QualityPlan(allow_code=True, code_seconds=1), sampled=False)
    assert quality.timeouts == 1 and quality.isolation is not None
    assert records[0].plain[0].scores["solved"] == 1.0 and records[0].speculative[0].scores["solved"] == 0.0


def test_sampled_answers_are_tested_for_one_distribution(records: list[PromptRecord]) -> None:
    quality = judge(records, {}, QualityPlan(), sampled=True)
    assert quality.two_sample is not None
    assert quality.two_sample.p_value == 1.0 and quality.two_sample.prompts == 10  # the same tokens both ways


def test_metrics_without_references_are_said_and_not_loaded(records: list[PromptRecord]) -> None:
    for record in records:
        record.references = []
    quality = judge(records, {}, QualityPlan(("bleu",)), sampled=False)
    assert {row.metric for row in quality.rows} == {"repetition"}
    assert "no prompt has a reference" in quality.notes[0]
