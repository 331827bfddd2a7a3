"""The page: self-contained, escaped, true to the result; made again from the file alone."""

import os
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from deepspec import report as command
from deepspec.errors import UserError
from deepspec.evaluation.quality.score import QualityPlan, judge
from deepspec.evaluation.result import EvaluationResult, Metric, save_result
from deepspec.evaluation.summary import summarise_result
from deepspec.reporting.html import render
from deepspec.reporting.markdown import to_markdown
from deepspec.reporting.plots import Axis, Plot, ticks
from deepspec.reporting.words import summary_lines, verdict
from tests.reporting.synthetic import make_records, make_result, spoil

EVIL = "<script>alert(1)</script>\"'><img src=https://evil.example/x onerror=alert(2)>{{ 7 * 7 }}"
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Elements and attributes of a page; complains about tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str]] = []
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def result() -> EvaluationResult:
    records = make_records(9)
    spoil(records[2], proven=True)
    return make_result(records)


def test_the_page_loads_nothing(result: EvaluationResult) -> None:
    html = render(result)
    page = Page(html)
    assert not page.tags & {"script", "iframe", "object", "embed", "img", "base", "form"}
    for tag, name, value in page.attributes:
        assert not name.startswith("on")
        if name in ("src", "href", "action", "data", "srcset", "xlink:href"):
            beside = tag == "a" and value in ("result.json", "report.csv", "report.md")  # only on a click
            assert value.startswith("#") or value == "data:," or beside, (tag, name, value)
    style = html[html.index("<style>") : html.index("</style>")]
    assert not re.search(r"url\(|@import|@font-face", style)
    assert "default-src 'none'" in html


def test_whatever_comes_from_outside_is_escaped(result: EvaluationResult) -> None:
    records = make_records(5)
    for record in records:
        record.prompt, record.id, record.category = EVIL, EVIL, EVIL + record.category
        record.speculative[0].text = record.plain[0].text = EVIL
    spoil(records[1], proven=False)
    evil = make_result(records)
    evil.name = evil.command = EVIL
    evil.target = {"name": EVIL, "weights": EVIL}
    evil.draft = {"algorithm": EVIL}
    evil.settings = {EVIL: EVIL}
    evil.warnings = [EVIL]
    evil.conditions.excluded = {EVIL: 2}
    evil.conditions.machine.cpu = EVIL
    evil.conditions.fastest_plain = EVIL
    page = Page(render(evil))
    assert not page.tags & {"script", "img"}
    assert not any("evil.example" in value and name in ("src", "href") for _, name, value in page.attributes)
    assert "<script>alert(1)</script>" in page.text  # as words
    assert "{{ 7 * 7 }}" in page.text


def test_verdict_comes_first_and_says_slower_when_it_is(result: EvaluationResult) -> None:
    assert "faster" in verdict(result)
    slow = make_result(make_records(9, skill=0.2))
    text = Page(render(slow)).text
    assert "Decoding is slower with the draft" in verdict(slow)
    assert text.index("slower with the draft") < text.index("Tokens a round")
    level = make_result(make_records(9))
    level.summary.speedup = Metric(1.02, 0.97, 1.08, 9)
    assert "No difference" in verdict(level)
    level.summary.speedup = Metric(None, None, None, 0, "no tokens after the first")
    assert "not measured: no tokens" in verdict(level)


def test_nothing_is_called_the_fastest_where_no_other_was_tried() -> None:
    alone = make_result(make_records(9, fastest=False))
    alone.conditions.fastest_plain = (
        "plain decoding by the same loop without a draft (float32; no other was tried)"
    )
    assert "fastest plain decoding tried" not in Page(render(alone)).text


def test_every_measure_of_our_own_is_explained_where_it_stands() -> None:
    records = make_records(9)
    found = make_result(records)
    found.quality = judge(records, {}, QualityPlan(), sampled=False)
    assert {row.metric for row in found.quality.rows} == {"repetition"}
    for text in (Page(render(found)).text, to_markdown(found)):
        assert "Repetition: the share of an answer's sequences of 4 tokens" in text
        assert "Solved" not in text


def test_an_unproven_difference_is_the_first_thing_said() -> None:
    records = make_records(6)
    spoil(records[3], proven=False)
    html = render(make_result(records))
    body = html[html.index("<main>") :]
    assert 0 < body.index('class="alarm"') < body.index("<h1")
    assert "1 of 6 greedy outputs differ" in body
    assert "alarm" not in render(make_result(make_records(6))).split("<main>")[1]


def test_warnings_stand_on_the_page_and_in_the_terminal(result: EvaluationResult) -> None:
    warned = make_result(make_records(3))
    warned.warnings = ["7 of 9 steps were skipped"]
    assert Page(render(warned)).text.count("7 of 9 steps were skipped") == 1
    assert summary_lines(warned)[0] == "warning   7 of 9 steps were skipped"


def test_text_of_another_decoder_that_differs_is_said() -> None:
    records = make_records(5)
    records[1].fastest[0].tokens = [*records[1].fastest[0].tokens[:-1], 7]
    told = make_result(records)
    told.baselines[3].differing = 2
    told.baselines[3].tokens_per_second = Metric(11.6, None, None, 3)
    text = Page(render(told)).text
    assert "gave another greedy text than the same loop on 1 of 5 prompts" in text
    assert "2 of 3 greedy answers differ from the same loop's in float32" in text
    assert "same text as the same loop on every prompt" in Page(render(make_result(make_records(5)))).text


def test_numbers_of_the_page_are_the_summarys(result: EvaluationResult) -> None:
    text = Page(render(result)).text
    speedup, tau = result.summary.speedup, result.summary.tau
    assert speedup.value is not None and speedup.low is not None and tau.value is not None
    assert f"{speedup.value:.2f}×" in text and f"{speedup.low:.2f}" in text and f"{tau.value:.2f}" in text
    assert "8 of 9" in text and "1 proven tie" in text
    assert result.command in text


def test_a_difference_shows_both_answers(result: EvaluationResult) -> None:
    html = render(result)
    assert html.count("<mark>") == 2
    assert "something else altogether</mark>" in html


def test_every_prompt_is_listed_and_reachable(result: EvaluationResult) -> None:
    page = Page(render(result))
    ids = {value for _, name, value in page.attributes if name == "id"}
    links = {
        value[1:]
        for tag, name, value in page.attributes
        if tag == "a" and name == "href" and value.startswith("#")
    }
    assert ids == links == {f"prompt-{i}" for i in range(9)}


@pytest.mark.parametrize("prompts", [0, 1, 2])
def test_few_or_no_prompts_make_a_page_all_the_same(prompts: int) -> None:
    result = make_result(make_records(prompts))
    result.sweep, result.training, result.step_times = [], [], None
    result.summary, result.categories = summarise_result(result)
    text = Page(render(result)).text
    assert "nan" not in text.lower().replace("nanotube", "")
    assert len(summary_lines(result)) == 3


def test_history_rows_of_any_kind_do_not_break_the_page(result: EvaluationResult) -> None:
    odd = make_result(make_records(3))
    odd.training = [
        {"step": 1, "loss": None, "accuracy": [None, None]},
        {"step": 2, "loss": 3.0, "accuracy": [0.5, None]},
        {"step": 3, "loss": 2.0, "accuracy": [0.6]},
        {"step": 3, "tau": None, "acceptance": []},
        {"step": 4, "tau": 1.5, "held_out_loss": 2.5, "acceptance": [0.4, None]},
    ]
    text = Page(render(odd)).text
    assert "Offline τ" in text and "Loss" in text


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (0.83, 2.07), (-4.0, 17.0), (0.0012, 0.0019), (0.0, 81234.0)]
)
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 2 <= len(found) <= 11
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in found)
    steps = {round(b - a, 9) for a, b in pairwise(found)}
    assert len(steps) == 1
    assert f"{steps.pop():e}"[0] in "125"


def test_a_plot_puts_points_where_its_scale_says() -> None:
    plot = Plot(Axis(0, 10), Axis(0, 100))
    left, right = plot.px(0), plot.px(10)
    assert plot.px(5) == pytest.approx((left + right) / 2)
    assert plot.py(100) < plot.py(0)
    plot.dot(5, 50, "spec", EVIL, link=EVIL)
    plot.label(50, EVIL)
    page = Page(plot.svg(EVIL))
    assert page.tags <= {"svg", "line", "text", "title", "circle", "a"}


def test_the_command_makes_the_page_again_from_the_file_alone(
    result: EvaluationResult,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        command.main([])
    assert caught.value.code == 1 and "no result" in capsys.readouterr().err
    for number, name in enumerate(("old", "new")):
        file = tmp_path / "runs" / name / "evaluation" / "result.json"
        save_result(result, file)
        os.utime(file, (number, number))
    command.main([])
    page = tmp_path / "runs" / "new" / "evaluation" / "report.html"
    assert page.read_text(encoding="utf-8") == render(result)
    assert str(Path("runs/new/evaluation/report.html")) in capsys.readouterr().out
    kept = tmp_path / "results" / "smollm2.json"
    save_result(result, kept)
    command.main([str(kept), "runs/old"])
    assert kept.with_suffix(".html").is_file()
    assert (tmp_path / "runs" / "old" / "evaluation" / "report.html").is_file()


def test_the_command_refuses_what_is_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="no evaluation"):
        command.find_result(tmp_path)
    bad = tmp_path / "result.json"
    bad.write_text('{"schema_version": 9}', encoding="utf-8")
    with pytest.raises(SystemExit):
        command.main([str(bad)])
    assert "schema version 9" in capsys.readouterr().err
