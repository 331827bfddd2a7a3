"""The acceptance benchmark puts together what the stages wrote, and says which stage failed."""

import json
from pathlib import Path

import pytest

from benchmarks import acceptance
from benchmarks.acceptance_tables import markdown
from benchmarks.stages import run_stage
from deepspec.evaluation.result import save_result
from tests.reporting.synthetic import make_records, make_result


def finished(out: Path, family: str) -> None:
    """A family's files, as the stages write them."""
    (out / family).mkdir(parents=True)
    rows = [
        {"step": 1, "tokens": 900, "seconds": 2.0},
        {"step": 1, "tau": 1.5},
        {"step": 2, "tokens": 2000, "seconds": 4.0},
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (out / family / "history.jsonl").write_text(text, encoding="utf-8")
    for how in acceptance.HOW:
        save_result(make_result(make_records(9)), out / f"{family}-{how}.json")


def test_tables_hold_what_the_files_say(tmp_path: Path) -> None:
    finished(tmp_path, "eagle3")
    found = acceptance._family("eagle3", tmp_path)
    result = make_result(make_records(9))
    assert (found["steps"], found["tokens"], found["train_seconds"]) == (2, 2000, 4.0)
    assert found["greedy"]["all"]["tau"]["value"] == pytest.approx(result.summary.tau.value)
    shown = markdown([found])
    assert (
        f"{result.summary.tau.value:.2f} ({result.summary.tau.low:.2f}–{result.summary.tau.high:.2f})"
        in shown
    )
    assert "| eagle3 |" in shown and "| 500 |" in shown  # 2,000 tokens in 4 seconds
    assert all(name in shown for name in result.categories)


def test_a_stage_that_fails_ends_it_and_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"deepspec\.train ended with 1"):
        run_stage("train", "no_such_recipe", tmp_path / "run", [])
    assert "no_such_recipe" in capfd.readouterr().err


def test_what_is_measured_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages skip what is done by themselves; evaluations of two kinds share a folder, so their copies count."""
    called: list[tuple[str, str]] = []
    monkeypatch.setattr(
        acceptance, "run_stage", lambda stage, recipe, out, settings: called.append((stage, recipe)) or {}
    )
    answers = tmp_path / "answers.jsonl"
    answers.write_text("", encoding="utf-8")
    finished(tmp_path, "eagle3")
    acceptance.main(
        ["--answers", str(answers), "--families", "eagle3", "--sets", "gsm8k", "--out", str(tmp_path)]
    )
    assert called == [("prepare", "smollm2_eagle3"), ("train", "smollm2_eagle3")]
    assert (
        json.loads((tmp_path / "acceptance.json").read_text(encoding="utf-8"))["families"][0]["family"]
        == "eagle3"
    )
