"""What an evaluation is made of: what fits, what is refused, and what is measured again."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepspec import evaluate as stage
from deepspec.artifacts import sums
from deepspec.config.schema import Config
from deepspec.errors import UserError
from deepspec.evaluation import sources
from deepspec.evaluation.result import load_result
from deepspec.target import Target
from tests.evaluation.tiny import Template


def test_what_was_measured_is_not_measured_again(
    config: Config, trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config.evaluate.baselines = False
    stage.run(config)
    before = (trained / "evaluation" / "result.json").read_bytes()
    (trained / "evaluation" / "report.html").unlink()
    assert stage.run(config).is_file()
    assert "Measured already" in capsys.readouterr().out
    assert (trained / "evaluation" / "result.json").read_bytes() == before
    config.decode.max_new_tokens = 6
    with pytest.raises(
        UserError, match=r"result\.json .*decode\.max_new_tokens was 12, is 6\).*overwrite=true"
    ):
        stage.run(config)
    assert (trained / "evaluation" / "result.json").read_bytes() == before
    (trained / "evaluation" / "result.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"result\.json is damaged.*overwrite=true"):
        stage.run(config)
    config.overwrite = True
    stage.run(config)
    assert load_result(trained / "evaluation" / "result.json").conditions.max_new_tokens == 6


def test_a_moved_or_renamed_target_is_not_measured_again(
    config: Config, trained: Path, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    config.evaluate.baselines, config.evaluate.sweep = False, []
    stage.run(config)
    before = (trained / "evaluation" / "result.json").read_bytes()
    config.target.path = config.target.name = "elsewhere"
    stage.run(config)
    assert "Measured already" in capsys.readouterr().out
    assert (trained / "evaluation" / "result.json").read_bytes() == before
    target._identity["weights"] = "others"  # what lies there now
    with pytest.raises(UserError, match="was made for other weights"):
        stage.run(config)
    config.target.allow_other_target = True
    with pytest.raises(UserError, match=r"target\.allow_other_target was False, is True"):
        stage.run(config)


def test_other_held_out_prompts_are_measured_anew(config: Config, trained: Path) -> None:
    config.evaluate.baselines, config.evaluate.sweep = False, []
    stage.run(config)
    file = trained / "data" / "held_out_prompts.jsonl"
    file.write_text(file.read_text(encoding="utf-8").replace("<b>", "<i>"), encoding="utf-8")
    with pytest.raises(UserError, match=r"result\.json .*another draft or other prompts"):
        stage.run(config)
    config.overwrite = True
    stage.run(config)
    result = load_result(trained / "evaluation" / "result.json")
    assert all(record.prompt.startswith("<i>") for record in result.records)


def test_data_the_draft_was_not_trained_on_is_refused(
    config: Config, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (trained / "data" / "manifest.json").write_text('{"fingerprint": "other"}', encoding="utf-8")
    with pytest.raises(UserError, match=r"the data d,.* the data other,.*-m deepspec\.train"):
        stage.run(config)
    config.evaluate.prompts = str(tmp_path / "own.txt")  # prompts of one's own need no data
    config.evaluate.baselines, config.evaluate.sweep = False, []
    Path(config.evaluate.prompts).write_text("Why?\n", encoding="utf-8")
    monkeypatch.setattr(sources, "ChatTemplate", Template)
    assert stage.run(config).is_file()


@pytest.mark.parametrize(
    ("node", "key", "value", "words"),
    [
        ("draft", "layers", 3, r"draft\.layers=1; .* draft\.layers=3.*-m deepspec\.train"),
        ("train", "learning_rate", 1e-4, r"train\.learning_rate=0\.001"),
    ],
)
def test_settings_the_draft_was_not_trained_with_are_refused(
    config: Config, trained: Path, node: str, key: str, value: Any, words: str
) -> None:
    setattr(getattr(config, node), key, value)
    with pytest.raises(UserError, match=words):
        stage.run(config)


def test_settings_of_training_that_decide_nothing_may_differ(config: Config, trained: Path) -> None:
    config.train.log_every = 77
    config.evaluate.baselines, config.evaluate.sweep = False, []
    stage.run(config)
    settings = load_result(trained / "evaluation" / "result.json").settings
    assert settings["train"] == {"learning_rate": 1e-3, "betas": [0.9, 0.95], "seed": 0}
    assert settings["draft"]["layers"] == 1


def test_warnings_of_the_training_reach_result_and_report(
    config: Config, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trained / "draft" / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**manifest, "warnings": ["3 of 4 steps skipped"]}), encoding="utf-8")
    config.evaluate.baselines, config.evaluate.sweep = False, []
    report = stage.run(config)
    (warning,) = load_result(trained / "evaluation" / "result.json").warnings
    assert "3 of 4 steps skipped" in warning
    assert warning in report.read_text(encoding="utf-8") and warning in capsys.readouterr().out


def test_a_users_own_prompts(
    config: Config, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "own.jsonl"
    config.evaluate.prompts = str(file)
    config.evaluate.baselines, config.evaluate.sweep = False, []
    with pytest.raises(UserError, match=r"evaluate\.prompts.*own\.jsonl"):
        stage.run(config)
    rows = [
        {"prompt": "Why?", "response": "So."},
        {"prompt": "How?", "category": "h"},
        {"prompt": "Long" * 99},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    monkeypatch.setattr(sources, "ChatTemplate", Template)
    stage.run(config)
    result = load_result(trained / "evaluation" / "result.json")
    assert result.conditions.prompt_source == "own.jsonl"
    assert {r.prompt: (r.category, r.prompt_tokens) for r in result.records} == {
        "Why?": ("prompts", 6),
        "How?": ("h", 6),
    }
    assert list(result.conditions.excluded.values()) == [1]
    file.write_text('{"prompt": "Why?"}\nnot JSON\n', encoding="utf-8")
    with pytest.raises(UserError, match="line 2"):
        stage.run(config)


def test_a_changed_byte_of_the_draft_or_of_the_held_out_prompts_is_noticed(
    config: Config, trained: Path
) -> None:
    for folder, file, stage_name in (
        ("data", "held_out_prompts.jsonl", "prepare"),
        ("draft", "config.json", "train"),
    ):
        path = trained / folder / file
        whole, manifest = path.read_bytes(), trained / folder / "manifest.json"
        written = {**json.loads(manifest.read_text()), "sha256": sums(path.parent)}
        manifest.write_text(json.dumps(written), encoding="utf-8")
        path.write_bytes(whole.replace(b"1", b"3"))
        with pytest.raises(
            UserError, match=rf"{path} is damaged.*Remove {path.parent} .*deepspec\.{stage_name}"
        ):
            stage.run(config)
        path.write_bytes(whole)


def test_answers_are_scored_both_ways_against_references(
    config: Config, trained: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A task's own file: the prompts are its questions, and every score can be computed again by hand."""
    monkeypatch.setattr(sources, "ChatTemplate", Template)
    rows = [
        {"question": f"What is {n} + 2?", "answer": f"{n} + 2 = <<{n}+2>>{n + 2}\n#### {n + 2}"}
        for n in range(9)
    ]
    file = tmp_path / "gsm8k.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    config.evaluate = replace(
        config.evaluate,
        tasks=["gsm8k"],
        task_files={"gsm8k": str(file)},
        metrics=["exact_match"],
        max_prompts=9,
        sweep=[],
    )
    stage.run(config)
    result = load_result(trained / "evaluation" / "result.json")
    assert [source.questions for source in result.sources] == [9]
    assert result.quality is not None and result.quality.identical == result.quality.compared == 9
    overall = {row.metric: row for row in result.quality.rows if row.task == "all prompts"}
    assert set(overall) >= {"solved", "exact_match"}
    expected = {f"{n} + 2 = {n + 2}\nThe answer is {n + 2}" for n in range(9)}
    assert {record.references[0] for record in result.records} == expected
    for record in result.records:
        (answer,) = record.speculative
        assert answer.scores["exact_match"] == float(answer.text.split() == record.references[0].split())
    plain = sum(record.plain[0].scores["solved"] for record in result.records) / 9
    assert overall["solved"].plain.value == pytest.approx(plain)
    assert "What the answers are worth" in (trained / "evaluation" / "report.html").read_text(
        encoding="utf-8"
    )
    config.evaluate = replace(config.evaluate, metrics=["blue"], max_prompts=8)
    with pytest.raises(UserError, match=r"evaluate\.metrics: 'blue'.*bleu"):
        stage.run(config)


def test_two_prompts_of_one_id_are_refused(
    config: Config, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two files of one name: a record of the one would pass for that of the other."""
    monkeypatch.setattr(sources, "ChatTemplate", Template)
    files = [tmp_path / folder / "orders.jsonl" for folder in "ab"]
    for file in files:
        file.parent.mkdir()
        file.write_text(f'{{"id": "1", "prompt": "{file.parent.name}"}}\n', encoding="utf-8")
    config.evaluate.tasks = [str(file) for file in files]
    with pytest.raises(UserError, match="two prompts have the id 'orders/1'"):
        stage.run(config)
    config.evaluate.tasks = [str(files[0])]
    stage.run(config)
