"""Measurements that are interrupted, shared by processes, or of several turns come to the same records."""

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspec import evaluate as stage
from deepspec import pair
from deepspec.artifacts import check_whole, sums, write_json
from deepspec.config.schema import Config
from deepspec.drafts.options import NgramOptions
from deepspec.evaluation import calibration, main_run, sources
from deepspec.evaluation.findings import Calibration
from deepspec.evaluation.journal import Decision, Journal
from deepspec.evaluation.measure import measure
from deepspec.evaluation.resources import measure_resources, watched
from deepspec.evaluation.result import EvaluationResult, PromptRecord, load_result
from deepspec.target import Target
from tests.evaluation.tiny import Template, make_run, make_target
from tests.reporting.synthetic import make_records

ROOT = Path(__file__).parents[2]


def counts(result: EvaluationResult) -> list[Any]:
    """All of the records that does not depend on the clock."""
    return [
        (r.id, r.equal, d.tokens, [(x.drafted, x.verified, x.accepted, x.committed) for x in d.rounds])
        for r in result.records
        for d in r.speculative
    ]


def result_of(out: Path) -> EvaluationResult:
    return load_result(out / "evaluation" / "result.json")


@pytest.fixture
def quick(config: Config) -> Config:
    config.evaluate.sweep, config.evaluate.baselines = [], False
    return config


def test_a_killed_measurement_goes_on(config: Config, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []
    dies_at = 2

    def watched(prompts: Any, *args: Any, **more: Any) -> Any:
        if len(measured) == dies_at:
            raise KeyboardInterrupt
        measured.append(prompts[0].id)
        return measure(prompts, *args, **more)

    monkeypatch.setattr(main_run, "measure", watched)
    with pytest.raises(KeyboardInterrupt):
        stage.run(config)
    partial = trained / "evaluation" / "partial"
    k = json.loads((partial / "decision.json").read_text())["content"]["k"]
    with (partial / "records-0.jsonl").open("a") as file:
        file.write('{"fingerprint": "x", "con')  # what a kill leaves
    dies_at = 99
    stage.run(config)
    result = result_of(trained)
    assert result.conditions.resumed == 2 and result.conditions.k == k
    assert [r.id for r in result.records] == measured and len(measured) == 4
    assert not partial.exists()
    (trained / "evaluation" / "result.json").unlink()
    config.evaluate.sweep, config.decode.k = [], k
    dies_at = -1
    stage.run(config)
    assert counts(result_of(trained)) == counts(result)


def test_a_journal_forgets_other_measurements_and_half_lines(tmp_path: Path) -> None:
    records: list[PromptRecord] = make_records(3)
    Journal(tmp_path, "old").append(records[0])
    mine = Journal(tmp_path, "new", rank=1, processes=2)
    (tmp_path / "partial" / "records-1.jsonl").write_text("{half a line", encoding="utf-8")
    for record in records[1:]:
        mine.append(record)
    assert mine.records() == {record.id: record for record in records[1:]}
    assert mine.decision() is None
    mine.decide(Decision(3, [], [], ["deepspec", "float32"]))
    assert mine.decision() == Decision(3, [], [], ["deepspec", "float32"])
    assert Journal(tmp_path, "old").decision() is None
    assert [n for n in range(5) if mine.mine(n)] == [1, 3]


def test_a_damaged_journal_counts_as_not_there(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "new")
    for name in ("decision.json", "records-0.jsonl"):
        (tmp_path / "partial" / name).write_bytes(b"\xff\xfe{\x00" * 9)
    assert journal.decision() is None and journal.records() == {}


def test_another_targets_records_are_not_gone_on_with(
    quick: Config, trained: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompt lookup on prompts of one's own: nothing else in the run's folder says which target it was."""
    file = trained / "prompts.jsonl"
    file.write_text(
        "".join(f'{{"prompt": "{word}"}}\n' for word in ("one", "two", "three")), encoding="utf-8"
    )
    monkeypatch.setattr(sources, "ChatTemplate", Template)
    quick.draft, quick.evaluate.prompts = NgramOptions(), str(file)
    left = 2

    def dies(*args: Any, **more: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return measure(*args, **more)

    monkeypatch.setattr(main_run, "measure", dies)
    with pytest.raises(KeyboardInterrupt):
        stage.run(quick)
    another = Target(target.model, None, "another", {**target.identity(), "weights": "others"})
    monkeypatch.setattr(pair, "load_target", lambda config, layers=(): another)
    left = 99
    stage.run(quick)
    assert load_result(trained / "evaluation_ngram" / "result.json").conditions.resumed == 0


def test_what_a_kill_left_beside_a_result_is_not_taken_for_a_new_measurement(
    quick: Config, trained: Path
) -> None:
    stage.run(quick)
    partial = trained / "evaluation" / "partial"
    partial.mkdir()
    stage.run(quick)  # measured already
    assert not partial.exists()


def check_shared(config: Config, out: Path) -> None:
    """The result there is is of two processes; one alone comes to the same."""
    shared = result_of(out)
    assert shared.conditions.processes == 2
    (out / "evaluation" / "result.json").unlink()
    stage.run(config)
    alone = result_of(out)
    assert counts(shared) == counts(alone) and len(alone.records) == 4
    assert shared.summary.tau == alone.summary.tau
    assert shared.detail is not None and alone.detail is not None
    assert [g.tau for g in shared.detail.groups] == [g.tau for g in alone.detail.groups]


def test_two_that_share_a_journal_count_as_one(
    quick: Config, trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In threads, each with a target and a draft of its own."""
    barrier, rank, targets = (
        threading.Barrier(2, timeout=60),
        threading.local(),
        [make_target(), make_target()],
    )
    measured: list[int] = []
    read: list[int] = []
    append, found = Journal.append, Journal.records

    def noted(self: Journal, record: PromptRecord) -> None:
        measured.append(self.rank)
        append(self, record)

    def counted(self: Journal) -> dict[str, PromptRecord]:
        read.append(self.rank)
        return found(self)

    def run(number: int) -> Path:
        rank.number = number
        try:
            return stage.run(quick)
        except BaseException:
            barrier.abort()  # or the other would wait for it
            raise

    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(pair, "load_target", lambda config, layers=(): targets[rank.number])
        patch.setattr(stage, "sharing", lambda _: nullcontext(stage.Group(rank.number, 2, barrier.wait)))
        patch.setattr(Journal, "append", noted)
        patch.setattr(Journal, "records", counted)
        assert len(set(pool.map(run, (0, 1)))) == 1
    assert sorted(measured) == [0, 0, 1, 1]
    assert sorted(read) == [0, 0, 1]  # at the end the first one alone, which then removes the journal
    assert capsys.readouterr().out.count("report    ") == 1
    check_shared(quick, trained)


@pytest.mark.slow
def test_two_processes_count_as_one(quick: Config, trained: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = [
        *("-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("-m", "tests.evaluation.worker", quick.out),
    ]
    done = subprocess.run(
        [sys.executable, *words],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("report    ") == 1
    check_shared(quick, trained)


def test_a_second_turn_follows_the_plain_answer(
    quick: Config, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "ChatTemplate", Template)
    monkeypatch.setattr(main_run.MainRun, "_text", lambda self, ids: "".join(chr(97 + t % 26) for t in ids))
    file = tmp_path / "question.jsonl"
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["One?", "Two?"], "reference": ["a", "b"]},
        {"question_id": 82, "category": "maths", "turns": ["Long?", "x" * 400]},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    quick.evaluate.tasks, quick.evaluate.task_files = ["mtbench"], {"mtbench": str(file)}
    stage.run(quick)
    result = result_of(trained)
    first, second, other = result.records
    assert (first.id, second.id) == ("mtbench/writing/81", "mtbench/writing/81, turn 2")
    assert other.id == "mtbench/maths/82"  # its second turn does not fit into the target's context
    assert (first.turn, second.turn, second.prompt, second.references) == (1, 2, "Two?", ["b"])
    said = [{"content": text} for text in ("One?", first.plain[0].text, "Two?")]
    assert second.prompt_tokens == len(Template(None, None).prompt(said))
    assert result.detail is not None
    assert {g.name for g in result.detail.groups if g.kind == "turn"} == {"turn 1", "turn 2"}


def test_a_calibration_is_stored_with_the_draft_and_the_artifact_stays_whole(
    quick: Config, target: Target
) -> None:
    quick.draft.confidence = True
    out = make_run(quick, target)
    file = out / "draft" / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "sha256": sums(out / "draft")}))
    quick.evaluate.calibrate = True
    stage.run(quick)
    result = result_of(out)
    calibration = result.calibration
    assert calibration is not None and calibration.before and calibration.after
    rounds = [r for record in result.records for r in record.speculative[0].rounds]
    assert all(len(r.confidence) == r.scheduled for r in rounds)
    content = json.loads((out / "draft" / "config.json").read_text())
    stored = content["confidence_temperatures"][calibration.key]
    assert stored == pytest.approx(calibration.temperatures, abs=1e-4)
    check_whole(out / "draft", json.loads(file.read_text()), "x")


@pytest.mark.parametrize("survives", [0, 1, 2, 3])
def test_a_calibration_cut_off_anywhere_leaves_a_whole_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survives: int
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    (tmp_path / "weights").write_text("w")
    write_json(tmp_path / "manifest.json", {"sha256": sums(tmp_path)})
    left = survives

    def full(path: Path, content: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(28, "No space left on device")
        write_json(path, content)

    monkeypatch.setattr(calibration, "write_json", full)
    with nullcontext() if survives == 3 else pytest.raises(OSError, match="No space"):
        calibration.store(tmp_path, Calibration("key", [2.0], 1, 1, [], []))
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    check_whole(tmp_path, manifest, "x")
    assert ("config.json" in manifest["sha256"]) == (survives in (0, 3))
    assert "weights" in manifest["sha256"]


def test_a_draft_without_confidence_cannot_be_calibrated_and_that_is_said(
    quick: Config, trained: Path
) -> None:
    quick.evaluate.calibrate = True
    stage.run(quick)
    assert any("nothing was calibrated" in warning for warning in result_of(trained).warnings)


def test_texts_beyond_the_training_rows_are_said(quick: Config, trained: Path) -> None:
    quick.data.max_length = 16
    stage.run(quick)
    assert any("longer than the longest row" in warning for warning in result_of(trained).warnings)


def test_peaks_of_memory_are_those_of_the_block() -> None:
    draft = torch.nn.Linear(1000, 1000)
    held: list[Any] = []
    found = measure_resources(
        torch.device("cpu"), draft, lambda: None, lambda: held.append(bytearray(b"x") * (300 << 20)), 0.5
    )
    assert found.kind == "process" and found.draft_weights == 4 * (1000 * 1000 + 1000)
    assert found.peak_plain is not None and found.peak_speculative is not None
    assert 250 << 20 < found.peak_speculative - found.peak_plain - found.draft_weights < 400 << 20
    assert found.load_draft_seconds == 0.5


def test_the_use_of_the_processors_is_that_of_the_block() -> None:
    def busy() -> None:
        end = time.process_time() + 0.6
        while time.process_time() < end:
            pass

    found = measure_resources(torch.device("cpu"), None, lambda: time.sleep(0.3), busy, None)
    assert found.cpu_plain is not None and found.cpu_speculative is not None
    assert found.cpu_speculative > 0.3  # at least this thread, however many others want its core
    assert (found.gpu_plain, found.gpu_speculative) == (None, None)


def test_the_gpus_use_is_nvmls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a device that is made up."""
    readings = iter([20, 40, 90, *[50] * 10_000])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 12345)
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: next(readings))
    with watched(torch.device("cuda")) as use:
        use.stopped.set()
    assert use.bytes == 12345 and use.gpu == pytest.approx(0.3)  # looked at once before and once after

    def unreadable(device: torch.device) -> int:
        raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr(torch.cuda, "utilization", unreadable)
    with watched(torch.device("cuda")) as use:
        pass
    assert use.bytes == 12345 and use.gpu is None
