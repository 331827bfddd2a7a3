"""Whole runs: learning, records, stopping and going on, and what is refused."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from deepspec.config.schema import TrainConfig
from deepspec.drafts.contract import DraftBatch, DraftLoss
from deepspec.errors import UserError
from deepspec.training import history
from deepspec.training.checkpoint import Counters
from deepspec.training.loop import Run, new_plan, train
from tests.training.fakes import FakeConfig, FakeDraft, FakeTarget, rows
from tests.training.worker import SETTINGS, accelerator_for_tests, main

ROOT = Path(__file__).parents[2]
TIMES = ("seconds", "tokens_per_second", "supervised_per_second", "time", "memory_gib", "gpu_memory_gib")


def start(out: Path, draft: FakeDraft | None = None, data: Any = None, **options: Any) -> Counters:
    """A run in this process, in float64."""
    recipe = options.pop("recipe", {})
    torch.manual_seed(1)
    draft = draft or FakeDraft(FakeConfig())
    config = TrainConfig(**{**SETTINGS, **options})
    run = Run(FakeTarget(torch.float64), config, accelerator_for_tests(), out, recipe=recipe)
    return train(draft.double(), data or rows(11), rows(5, seed=9), run).counters


def in_own_process(out: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """`worker.main` in a process that may die."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    call = [sys.executable, "-m", "tests.training.worker", str(out), json.dumps(options)]
    return subprocess.run(
        call, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def records(out: Path) -> list[dict[str, Any]]:
    """The history without clock readings."""
    return [
        {key: value for key, value in record.items() if key not in TIMES}
        for record in history.read(out / "history.jsonl")
    ]


def weights(out: Path) -> dict[str, Tensor]:
    return load_file(out / "trained.safetensors")


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_run_learns_and_keeps_records(tmp_path: Path) -> None:
    counters = start(tmp_path, epochs=12.0, batch_size=2, log_every=5, eval_every=20)
    steps = math.ceil(12 * 11 / 2)
    assert (counters.step, counters.rows) == (steps, 132)
    assert counters.tokens == 12 * sum(len(row["tokens"]) for row in rows(11))
    found = records(tmp_path)
    logs = [record for record in found if "loss" in record]
    evaluations = [record for record in found if "tau" in record]
    assert [record["step"] for record in logs] == [*range(5, steps + 1, 5), steps]
    assert [record["step"] for record in evaluations] == [20, 40, 60, steps]
    assert logs[-1]["loss"] < 0.8 * logs[0]["loss"]
    assert evaluations[-1]["tau"] > evaluations[0]["tau"]
    assert counters.evaluation == {key: value for key, value in evaluations[-1].items() if key != "step"}
    assert [len(record["accuracy"]) for record in logs] == [3] * len(logs)
    assert {len(record["acceptance"]) for record in evaluations} == {4}


def test_killed_and_resumed_is_never_stopped_bit_for_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"epochs": 2.0, "batch_size": 2, "log_every": 3, "dtype": "float32", "dropout": 0.3}
    main(tmp_path / "whole", options)
    killed = in_own_process(tmp_path / "killed", **options, signal_at={"step": 9, "signal": signal.SIGKILL})
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert records(tmp_path / "killed")[-1]["step"] == 9
    main(tmp_path / "killed", options)
    assert "step-8 (step 8)" in capsys.readouterr().out
    assert equal(weights(tmp_path / "whole"), weights(tmp_path / "killed"))
    assert records(tmp_path / "whole") == records(tmp_path / "killed")


def test_killed_in_the_middle_of_a_checkpoints_write(tmp_path: Path) -> None:
    """A checkpoint writes three files here besides the draft's: the sixth is the second one's random states."""
    options = {"epochs": 1.0, "dtype": "float32", "ema": 0.9, "dropout": 0.3, "eval_rows": 0}
    main(tmp_path / "whole", options)
    killed = in_own_process(tmp_path / "killed", **options, kill_in_write=6)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    folder = tmp_path / "killed" / "checkpoints"
    assert [path.name for path in folder.glob("step-*")] == ["step-2"]
    assert list(folder.glob(".step-4.partial-*"))
    main(tmp_path / "killed", options)
    assert equal(weights(tmp_path / "whole"), weights(tmp_path / "killed"))
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_says_how_to_go_on_and_exits(
    tmp_path: Path, number: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"epochs": 1.0, "batch_size": 2, "dtype": "float32", "checkpoint_every": 100}
    before = signal.getsignal(number)
    main(tmp_path / "whole", options)
    with pytest.raises(SystemExit) as left:
        main(tmp_path / "cut", {**options, "signal_at": {"step": 3, "signal": number}})
    assert left.value.code == code
    said = capsys.readouterr().out
    assert "saved at step 3" in said
    assert "python -m deepspec.train" in said
    assert [path.name for path in (tmp_path / "cut" / "checkpoints").iterdir()] == ["step-3"]
    assert signal.getsignal(number) is before
    main(tmp_path / "cut", options)
    assert equal(weights(tmp_path / "whole"), weights(tmp_path / "cut"))
    assert records(tmp_path / "whole") == records(tmp_path / "cut")


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    first = start(tmp_path)
    before = records(tmp_path)
    draft, target = FakeDraft(FakeConfig()).double(), FakeTarget(torch.float64)
    run = Run(target, TrainConfig(**SETTINGS), accelerator_for_tests(), tmp_path)
    assert train(draft, rows(11), rows(5, seed=9), run).counters == first
    assert target.captures == 0
    assert records(tmp_path) == before


def test_never_starts_over(tmp_path: Path) -> None:
    start(tmp_path, max_steps=4)
    counters = start(tmp_path, max_steps=2, resume="never")
    assert counters.step == 2
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-2"]
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 2]


def test_a_checkpoint_of_another_recipe_is_refused_by_name(tmp_path: Path) -> None:
    recipe = {"data": "aaaa", "train": {"learning_rate": 0.1, "betas": (0.9, 0.95)}}
    start(tmp_path, max_steps=2, recipe=recipe)
    other = {"data": "aaaa", "train": {"learning_rate": 0.2, "betas": (0.9, 0.95)}}
    with pytest.raises(UserError, match=r"train\.learning_rate was 0\.1, is 0\.2.*train\.resume=never"):
        start(tmp_path, max_steps=2, recipe=other)
    start(tmp_path, max_steps=2, recipe=recipe)


class SometimesBroken(FakeDraft):
    """Its loss is NaN at the forwards named in `broken`."""

    broken: frozenset[int] = frozenset()
    calls = 0

    def forward(self, batch: DraftBatch) -> DraftLoss:
        loss = super().forward(batch)
        if self.training:
            self.calls += 1
            if self.calls in self.broken:
                loss.sums["ce"] = loss.sums["ce"] * math.nan
        return loss


def test_steps_that_are_not_finite_are_skipped_and_counted(tmp_path: Path) -> None:
    draft = SometimesBroken(FakeConfig())
    draft.broken = frozenset({2, 3, 7})
    counters = start(tmp_path, draft, epochs=1.0)
    assert (counters.step, counters.skipped, counters.skipped_in_a_row) == (11, 3, 0)
    logs = [record for record in records(tmp_path) if "skipped" in record]
    assert [record["skipped"] for record in logs] == [0, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3]
    assert logs[1]["loss"] is None
    assert all(parameter.isfinite().all() for parameter in draft.parameters())


def test_ten_steps_in_a_row_that_are_not_finite_stop_the_run(tmp_path: Path) -> None:
    draft = SometimesBroken(FakeConfig())
    draft.broken = frozenset(range(3, 100))
    with pytest.raises(UserError, match=r"10 steps in a row \(up to step 12;.*learning_rate"):
        start(tmp_path, draft, epochs=3.0)
    assert draft.calls == 12
    kept = tmp_path / "not_finite" / "step-12" / "process-0.safetensors"
    with safe_open(kept, "pt") as file:
        (numbers,) = json.loads(file.metadata()["rows"])
        tokens = file.get_tensor("0/tokens")
    assert tokens[0].tolist() == rows(11)[numbers[0]]["tokens"]


def test_rows_without_supervision_stop_before_the_target_runs(tmp_path: Path) -> None:
    silent = [{**row, "loss_mask": [0] * len(row["tokens"])} for row in rows(3)]
    with pytest.raises(UserError, match="no token is supervised"):
        start(tmp_path, data=silent)
    assert not (tmp_path / "history.jsonl").exists()


def test_accumulated_run_equals_the_run_with_the_larger_batch(tmp_path: Path) -> None:
    one, many = FakeDraft(FakeConfig()), FakeDraft(FakeConfig())
    many.load_state_dict(one.state_dict())
    start(tmp_path / "one", one, epochs=3.0, batch_size=6)
    start(tmp_path / "many", many, epochs=3.0, batch_size=2, accumulation=3)
    for name, parameter in one.state_dict().items():
        torch.testing.assert_close(many.state_dict()[name], parameter, rtol=0, atol=1e-9)
    for left, right in zip(records(tmp_path / "one"), records(tmp_path / "many"), strict=True):
        assert left.keys() == right.keys()
        assert left.get("loss") == pytest.approx(right.get("loss"))
        assert left.get("tau") == right.get("tau")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_learns_resumes_and_keeps_float32_weights(tmp_path: Path, precision: str) -> None:
    options = {"epochs": 8.0, "batch_size": 2, "dtype": "float32", "run_precision": precision}
    options |= {"checkpoint_every": 20, "eval_every": 40}
    main(tmp_path / "whole", options)
    logs = [record for record in records(tmp_path / "whole") if "loss" in record]
    assert logs[-1]["loss"] < 0.8 * logs[0]["loss"]
    assert {one.dtype for one in weights(tmp_path / "whole").values()} == {torch.float32}
    with pytest.raises(SystemExit):
        main(tmp_path / "cut", {**options, "signal_at": {"step": 5, "signal": signal.SIGTERM}})
    main(tmp_path / "cut", options)
    assert equal(weights(tmp_path / "whole"), weights(tmp_path / "cut"))


def test_plan_ends_with_the_epochs_or_max_steps() -> None:
    assert new_plan(TrainConfig(epochs=1.5, batch_size=2), 10, 1).steps == 8
    assert new_plan(TrainConfig(epochs=1.5, batch_size=2, accumulation=2), 10, 2).steps == 2
    assert new_plan(TrainConfig(epochs=9, max_steps=3), 10, 1).steps == 3
    assert new_plan(TrainConfig(epochs=1, max_steps=300), 10, 1).steps == 10
    assert new_plan(TrainConfig(epochs=0.01), 10, 1).steps == 1


def test_no_held_out_rows_no_evaluation(tmp_path: Path) -> None:
    assert start(tmp_path, max_steps=3, eval_rows=0).evaluation is None
    assert all("tau" not in record for record in records(tmp_path))


def test_utilisation_is_the_speed_over_the_full_one(tmp_path: Path) -> None:
    torch.manual_seed(1)
    run = Run(FakeTarget(torch.float64), TrainConfig(**SETTINGS), accelerator_for_tests(), tmp_path)
    run.full_speed = 250.0
    train(FakeDraft(FakeConfig()).double(), rows(11), rows(5, seed=9), run)
    logged = [one for one in history.read(tmp_path / "history.jsonl") if "loss" in one]
    assert logged
    assert all(one["mfu"] == pytest.approx(one["tokens_per_second"] / 250) for one in logged)
