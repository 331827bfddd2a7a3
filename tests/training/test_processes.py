"""Two processes (gloo, through torchrun) against one on the same batches."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deepspec.config.schema import Precision
from deepspec.errors import UserError
from deepspec.training import history, launch
from tests.training.worker import accelerator_for_tests, main

ROOT = Path(__file__).parents[2]


def torchrun(out: Path, options: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    call = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    call += ["-m", "tests.training.worker", str(out), json.dumps(options)]
    return subprocess.run(
        call, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_two_processes_learn_what_one_learns(tmp_path: Path) -> None:
    """11 rows × 3 epochs in steps of 4: the last step has one row for two processes and two micro-batches."""
    common = {"epochs": 3.0, "log_every": 2}
    main(tmp_path / "one", {**common, "batch_size": 4})
    done = torchrun(tmp_path / "two", {**common, "batch_size": 1, "accumulation": 2})
    assert done.returncode == 0, done.stderr
    expected = load_file(tmp_path / "one" / "trained-0.safetensors")
    for rank in range(2):
        found = load_file(tmp_path / "two" / f"trained-{rank}.safetensors")
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-9)
    left, right = (history.read(tmp_path / name / "history.jsonl") for name in ("one", "two"))
    assert len(left) == len(right) > 5
    for one, two in zip(left, right, strict=True):
        for key in ("step", "rows", "tokens", "tau", "rounds", "supervised", "held_out_tokens"):
            assert one.get(key) == two.get(key)
        for key in ("loss", "accuracy", "held_out_loss", "acceptance", "gradient_norm"):
            assert two.get(key) == pytest.approx(one.get(key))
    assert not [path for path in (tmp_path / "two").rglob("*") if path.name.startswith(".")]


class TwoRanks:
    """An accelerator that believes it is one of two."""

    num_processes = 2
    device = torch.device("cpu")

    def __init__(self, kind: launch.DistributedType) -> None:
        self.distributed_type = kind


def test_gradients_that_differ_between_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    two: Any = TwoRanks(launch.DistributedType.MULTI_CPU)
    monkeypatch.setattr(launch, "gather", lambda mine: torch.cat([mine, mine]))
    launch.check_gradients_agree(model, two)
    monkeypatch.setattr(launch, "gather", lambda mine: torch.cat([mine, mine + 1e-9]))
    with pytest.raises(UserError, match="not being averaged"):
        launch.check_gradients_agree(model, two)
    with pytest.raises(UserError, match="not averaged"):
        launch.check_gradients_agree(model, TwoRanks(launch.DistributedType.NO))  # type: ignore[arg-type]


def test_plugins_that_would_be_ignored_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match="FSDP"):
        launch.join_processes("cpu")


def test_a_launcher_that_started_more_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    launch.join_processes("cpu")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="started 2 processes"):
        launch.new_accelerator("cpu", Precision.no, lambda: Precision.no)


def test_the_start_says_what_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    accelerator = accelerator_for_tests()
    (line,) = launch.describe(accelerator, 3, 4)
    assert "1 process on cpu" in line
    assert "effective batch 12 rows" in line
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert "accelerate launch with one process" in launch.describe(accelerator, 3, 4)[1]


def test_precision_follows_the_probe_only_where_it_is_auto() -> None:
    launch.join_processes("cpu")
    assert launch.new_accelerator("cpu", Precision.auto, lambda: Precision.bf16).mixed_precision == "bf16"
    launch.join_processes("cpu")
    assert launch.new_accelerator("cpu", Precision.no, lambda: Precision.bf16).mixed_precision == "no"
