"""What stands beside the page: Markdown, CSV, comparisons, sheets for people."""

import copy
import csv
import math
from io import StringIO
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest

from deepspec import report as command
from deepspec.errors import UserError
from deepspec.evaluation.calibration import calibrate
from deepspec.evaluation.findings import Resources
from deepspec.evaluation.metric import Metric
from deepspec.evaluation.result import EvaluationResult, save_result
from deepspec.evaluation.seeds import over_seeds
from deepspec.reporting import review
from deepspec.reporting.comparison import grouped, headline, lines
from deepspec.reporting.comparison import render as render_comparison
from deepspec.reporting.html import environment, render
from deepspec.reporting.markdown import escape, to_markdown
from deepspec.reporting.sweeps import swept
from deepspec.reporting.tables import HEAD, csv_text, to_csv
from tests.reporting.synthetic import make_records, make_result, spoil
from tests.reporting.test_report import EVIL, Page


@pytest.fixture(scope="module")
def result() -> EvaluationResult:
    records = make_records(16)
    generator = np.random.default_rng(0)
    for record in records:
        for r in record.speculative[0].rounds:
            r.confidence = generator.uniform(0.3, 0.9, r.drafted).round(3).tolist()
    found = make_result(records)
    found.calibration = calibrate(records, "temperature=0,rule=greedy")
    found.resources = Resources(
        "process", 1 << 30, (1 << 30) + (1 << 28), 1 << 27, 0.25, 1.5, 1.75, 0.5, 0.625
    )
    return found


def test_every_number_of_the_csv_is_the_results(result: EvaluationResult) -> None:
    found = list(csv.DictReader(StringIO(to_csv(result))))
    assert list(found[0]) == list(HEAD)
    by = {(row["group"], row["metric"]): row for row in found}
    assert len(by) == len(found)
    tau = by["all prompts", "tau"]
    assert (float(tau["value"]), float(tau["low"])) == (result.summary.tau.value, result.summary.tau.low)
    p95 = by["all prompts", "speculative tpot p95"]
    assert p95["value"] == "" and "at least 20 prompts" in p95["reason"]
    assert {row["group"] for row in found} > {f"category: {name}" for name in result.categories}


def test_a_spreadsheet_takes_no_text_for_a_formula() -> None:
    text = csv_text(("a", "b"), [["=1+1", -2.5], ["@x", None]])
    assert list(csv.reader(StringIO(text))) == [["a", "b"], ["'=1+1", "-2.5"], ["'@x", ""]]


def test_markdown_says_what_the_page_says(result: EvaluationResult) -> None:
    text = to_markdown(result)
    assert text.startswith(f"# {result.name}: Decoding is faster")
    assert result.command in text and "16 prompts" in text
    tables = [part for part in text.split("\n\n") if part.startswith("|")]
    for table in tables:
        assert len({line.replace("\\|", "").count("|") for line in table.splitlines()}) == 1
    spoiled = copy.deepcopy(result)
    spoil(spoiled.records[0], proven=False)
    spoiled.summary.equality.unproven = 1
    spoiled.name = EVIL
    assert "**Not lossless" in to_markdown(spoiled) and "<script" not in to_markdown(spoiled)
    assert escape("a|b\n*c*") == "a\\|b \\*c\\*"


def test_the_page_has_detail_confidence_and_resources(result: EvaluationResult) -> None:
    text = Page(render(result)).text
    for words in ("Acceptance in detail", "tenths of the answers", "Does the draft know how sure it is?"):
        assert words in text
    assert result.calibration is not None
    assert f"{result.calibration.before[0].ece:.3f}" in text and "1.25 GiB with it" in text
    assert "1.5 logical cores" in text and "in use 50% of that time without it, 62% with it" in text
    assert "prompt length: below 256 tokens" in text


def other(result: EvaluationResult, **changes: object) -> EvaluationResult:
    found = copy.deepcopy(result)
    for path, value in changes.items():
        *nodes, leaf = path.split("__")
        node = found
        for name in nodes:
            node = getattr(node, name)
        setattr(node, leaf, value)
    return found


def test_what_cannot_be_compared_stands_apart(result: EvaluationResult) -> None:
    hot = other(result, conditions__temperature=1.0)
    groups = grouped([("a", result), ("hot", hot), ("b", copy.deepcopy(result))])
    assert [[name for name, _ in group.results] for group in groups] == [["a", "b"], ["hot"]]
    assert groups[0].apart == [] and "another temperature: 0.0 and 1.0" in groups[1].apart[0]
    assert "cannot be compared" in headline(groups)
    assert "None of these 2" in headline(grouped([("a", result), ("hot", hot)]))


def test_seeds_are_put_together_and_never_prompts_averaged(result: EvaluationResult) -> None:
    runs = []
    for seed, tau in enumerate((2.0, 2.2, 2.4)):
        run = other(result, settings={"name": f"s{seed}", "train": {"seed": seed, "epochs": 1}})
        run.summary.tau = run.summary.tau.__class__(tau, None, None, 16)
        runs.append((f"s{seed}", run))
    (group,) = grouped([*runs, ("more", other(result, settings={"train": {"seed": 0, "epochs": 2}}))])
    (seeds,) = group.seeds
    assert seeds.names == ["s0", "s1", "s2"] and seeds.tau.value == pytest.approx(2.2)
    # Student's t with 2 degrees of freedom: 4.303 · 0.2 / √3
    assert seeds.tau.high == pytest.approx(2.2 + 4.303 * 0.2 / math.sqrt(3))
    assert any("over the seeds of s0, s1, s2" in line for line in lines([group]))
    (alone,) = grouped([("a", result), ("again", copy.deepcopy(result))])
    assert alone.seeds == []  # one run listed twice is no second seed
    assert over_seeds([1.0]).reason and over_seeds([]).value is None


def test_a_swept_setting_is_drawn_in_its_order(result: EvaluationResult) -> None:
    def run(**train: object) -> EvaluationResult:
        return other(result, settings={"name": str(train), "train": {"seed": 0, "epochs": 1, **train}})

    rates = [1e-2, 1e-4, 1e-3]
    results = [(f"r{rate:g}", run(learning_rate=rate)) for rate in rates]
    for value, (_, one) in enumerate(results):
        one.summary.speedup = Metric(1.0 + value / 10, 0.9 + value / 10, 1.1 + value / 10, 16)
    found = swept(results)
    assert found is not None and found[0] == "train.learning_rate"
    assert [value for value, _ in found[1]] == sorted(rates)
    assert [r.summary.speedup.value for _, r in found[1]] == [1.1, 1.2, 1.0]
    page = Page(render_comparison(grouped(results), environment()))
    assert "Speedup by train.learning_rate" in page.text and "0.0001" in page.text
    # Two settings, a word, a value twice or the seed alone are no sweep.
    assert swept([*results, ("x", run(learning_rate=1e-5, epochs=2))]) is None
    assert swept([(k, run(optimizer=k)) for k in ("a", "b", "c")]) is None
    assert swept([*results, ("again", run(learning_rate=1e-2))]) is None
    assert swept([(str(seed), run(seed=seed)) for seed in range(3)]) is None
    assert swept(results[:2]) is None


def test_the_page_and_its_markdown_lead_to_the_records(result: EvaluationResult, tmp_path: Path) -> None:
    file = tmp_path / "my result.json"
    save_result(result, file)
    page = Page(command.report(file).read_text(encoding="utf-8"))
    links = {
        value for tag, name, value in page.attributes if (tag, name) == ("a", "href") and value[0] != "#"
    }
    assert {unquote(link) for link in links} == {"my result.json", "my result.csv", "my result.md"}
    assert all((tmp_path / unquote(link)).is_file() for link in links)
    assert "](<my%20result.json>)" in (tmp_path / "my result.md").read_text(encoding="utf-8")


def test_how_prompts_were_put_is_said(result: EvaluationResult) -> None:
    data = {"system": "Be brief.", "template_args": {"enable_thinking": False}}
    text = Page(render(other(result, settings={"data": data}))).text
    assert "'Be brief.'" in text and "enable_thinking=False" in text
    assert "chat template was given" not in Page(render(result)).text


def test_intervals_over_seeds_cover_the_truth() -> None:
    generator = np.random.default_rng(1)
    for n in (2, 4, 9):
        found = [over_seeds(generator.normal(2, 0.1, n).tolist()) for _ in range(800)]
        hits = np.mean([m.low <= 2 <= m.high for m in found if m.low is not None and m.high is not None])
        assert hits == pytest.approx(0.95, abs=0.025)


def test_several_results_make_a_comparison(
    result: EvaluationResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worse = make_records(16, skill=0.5)
    runs = {"good": result, "bad": make_result(worse)}
    for name, one in runs.items():
        save_result(one, tmp_path / "runs" / name / "evaluation" / "result.json")
    (tmp_path / "runs" / "empty").mkdir()
    command.main([str(tmp_path / "runs" / name) for name in ("good", "bad", "empty")])
    out = capsys.readouterr().out
    assert "empty: no result, left out" in out
    assert "good has the higher speedup, same loop" in out
    page = Page((tmp_path / "runs" / "comparison.html").read_text(encoding="utf-8"))
    assert "good has the higher speedup" in page.text and not page.tags & {"script", "img"}
    table = list(csv.DictReader((tmp_path / "runs" / "comparison.csv").open()))
    assert [(row["result"], float(row["tau"])) for row in table] == [
        (name, one.summary.tau.value) for name, one in runs.items()
    ]
    for kind in ("html", "md", "csv"):
        assert (tmp_path / "runs" / "good" / "evaluation" / f"report.{kind}").is_file()


@pytest.fixture
def sampled(tmp_path: Path) -> tuple[EvaluationResult, Path]:
    records = make_records(12)
    for number, record in enumerate(records[:10]):
        record.plain[0].text, record.speculative[0].text = f"plain {number}", f"=speculative {number}"
    found = make_result(records)
    file = tmp_path / "result.json"
    save_result(found, file)
    return found, file


def test_a_sheet_is_blind_and_its_key_is_the_result(sampled: tuple[EvaluationResult, Path]) -> None:
    _, file = sampled
    sheet = command.make_sheet(file, 100)
    lines = list(csv.DictReader(sheet.open(encoding="utf-8")))
    assert len(lines) == 10  # two prompts have the same text both ways
    sides = [line["left"].startswith("'=speculative") for line in lines]
    assert 0 < sum(sides) < 10  # a chance of 1 in 512 that a seed puts all on one side; this one is fixed
    assert sheet.read_bytes() == command.make_sheet(file, 100).read_bytes()
    page = Page((file.with_name("review.html")).read_text(encoding="utf-8"))
    assert "speculative" not in page.text.replace("=speculative ", "") and not page.tags & {"script", "img"}
    # One person finds every speculative answer better, another the left one always.
    for line, side in zip(lines, sides, strict=True):
        line["better"] = "left" if side else "right"
    fan = fill(sheet.with_name("fan.csv"), lines)
    verdict = command.read_sheets(file, [fan])
    assert (verdict.preferred.hits, verdict.preferred.of, verdict.agreement.of) == (10, 10, 0)
    assert verdict.p_value == pytest.approx(2 / 2**10)
    for number, line in enumerate(lines):
        line["better"] = "Left " if number else ""
    left = fill(sheet.with_name("left.csv"), lines)
    both = command.read_sheets(file, [fan, left])
    assert both.agreement.hits == sum(sides[1:]) and both.agreement.of == 9 and both.judged == 19


def test_a_sheet_of_another_measurement_is_refused(
    sampled: tuple[EvaluationResult, Path], tmp_path: Path
) -> None:
    """Its pairs have other numbers and other sides."""
    result, file = sampled
    lines = list(csv.DictReader(command.make_sheet(file, 100).open(encoding="utf-8")))
    for line in lines:
        line["better"] = "left"
        line["right"] = line["right"].replace(" ", "\r\n")  # as a spreadsheet may write it
    filled = fill(tmp_path / "filled.csv", lines)
    assert command.read_sheets(file, [filled]).judged == 10
    save_result(other(result, created="2027-01-01T00:00:00+00:00"), file)
    with pytest.raises(UserError, match="the sheet is of another result"):
        command.read_sheets(file, [filled])


def fill(path: Path, lines: list[dict[str, str]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, review.HEAD)
        writer.writeheader()
        writer.writerows(lines)
    return path


def test_sheets_that_cannot_be_read_are_named(
    sampled: tuple[EvaluationResult, Path], result: EvaluationResult, tmp_path: Path
) -> None:
    _, file = sampled
    bad = tmp_path / "bad.csv"
    head = ",".join(review.HEAD)
    for content, words in (
        (f"{head}\n1,p,a,b,\n", "nothing is filled in"),
        (f"{head}\n1,p,a,b,maybe\n", "pair 1: `better` is 'maybe'"),
        (f"{head}\n77,p,a,b,left\n", "bad.csv, pair 77: this result has no such pair"),
        (f"{head}\n1,p,a,b,left\n", "bad.csv, pair 1: its answers are not this result's"),
        ("number,better\n1,left\n1,right\n", "pair 1: it stands in the sheet twice"),
        ("number,better\n\u00b2,left\n", "pair \u00b2"),
        ("number,left\n1,x\n", "no column `better`"),
        ("", "no column `number`"),
    ):
        bad.write_text(content, encoding="utf-8")
        with pytest.raises(UserError, match=words):
            command.read_sheets(file, [bad])
    with pytest.raises(UserError, match="nothing to judge"):
        review.pairs(result, 5)


def test_a_sheet_from_a_spreadsheet_is_read(sampled: tuple[EvaluationResult, Path]) -> None:
    """Semicolons, Windows' line ends, a byte order mark and a further column."""
    found, file = sampled
    pairs = review.pairs(found, 100)
    rows = [["number", "left", "right", "better", "remark"]]
    rows += [[str(p.number), f"'{p.left}", p.right, "left", "a, b"] for p in pairs]
    sheet = file.with_name("excel.csv")
    sheet.write_text("\r\n".join(";".join(row) for row in rows), encoding="utf-8-sig", newline="")
    assert review.read_sheet(sheet, pairs) == {pair.number: "left" for pair in pairs}


def test_a_sheet_that_was_filled_in_is_not_replaced(sampled: tuple[EvaluationResult, Path]) -> None:
    _, file = sampled
    sheet = command.make_sheet(file, 3)
    lines = list(csv.DictReader(sheet.open(encoding="utf-8")))
    lines[1]["better"] = "same"
    before = fill(sheet, lines).read_bytes()
    with pytest.raises(UserError, match=f"{sheet} has been filled in: rename it"):
        command.make_sheet(file, 5)
    assert sheet.read_bytes() == before


def test_results_that_share_but_the_root_are_compared_where_one_stands(
    result: EvaluationResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / name / "result.json" for name in "ab"]
    for file in files:
        save_result(result, file)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(command.os.path, "commonpath", lambda paths: "/")
    assert command.compare_all(files) == tmp_path / "here" / "comparison.html"


def test_a_folder_that_cannot_be_written_is_named(
    result: EvaluationResult,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "result.json"
    save_result(result, file)

    def refused(self: Path, *args: object, **more: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "write_text", refused)
    with pytest.raises(SystemExit):
        command.main([str(file)])
    said = capsys.readouterr().err
    assert str(tmp_path) in said and "copy the result file elsewhere" in said and "out=" not in said


@pytest.mark.parametrize(("hits", "of"), [(0, 5), (5, 5), (8, 10), (50, 100)])
def test_wilsons_interval_solves_its_equation(hits: int, of: int) -> None:
    found = review.share(hits, of)
    assert found.low is not None and found.high is not None
    for end in (found.low, found.high):
        if 0 < end < 1:
            assert (hits / of - end) ** 2 == pytest.approx(1.959964**2 * end * (1 - end) / of, rel=1e-4)


def test_the_sign_test_is_a_sum_over_all_splits() -> None:
    for better in range(8):
        n = 7
        extreme = [k for k in range(n + 1) if max(k, n - k) >= max(better, n - better)]
        expected = sum(math.comb(n, k) for k in extreme) / 2**n
        assert review.sign_test(better, n - better) == pytest.approx(expected)
