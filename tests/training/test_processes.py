"""Two processes (gloo, through torchrun) against one on the same batches."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from safetensors.torch import load_file

from deepspec.config.schema import Parallel, Precision, TrainConfig
from deepspec.errors import UserError
from deepspec.training import history, launch, parallel
from deepspec.training.parallel import chosen, environment_for
from tests.training.worker import accelerator_for_tests, main

ROOT = Path(__file__).parents[2]


def torchrun(*given: Path | dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Folder and options of one run after the other, in two processes."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    call = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    call += ["-m", "tests.training.worker"]
    call += [str(one) if isinstance(one, Path) else json.dumps(one) for one in given]
    return subprocess.run(
        call, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=390, check=False
    )


def test_two_processes_learn_what_one_learns(tmp_path: Path) -> None:
    """11 rows × 3 epochs in steps of 4: the last step has one row for two processes and two micro-batches."""
    common = {"epochs": 3.0, "log_every": 2}
    main(tmp_path / "one", {**common, "batch_size": 4})
    options = {**common, "batch_size": 1, "accumulation": 2}
    # one process is told to stop (the other learns of it), then both go on
    stopped = torchrun(tmp_path / "two", {**options, "signal_at": {"step": 4, "signal": signal.SIGTERM}})
    assert stopped.returncode != 0
    assert "saved at step 5" in stopped.stdout, stopped.stderr
    done = torchrun(tmp_path / "two", options)
    assert done.returncode == 0, done.stderr
    assert "step-5 (step 5)" in done.stdout
    expected = load_file(tmp_path / "one" / "trained.safetensors")
    found = load_file(tmp_path / "two" / "trained.safetensors")
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

    def __init__(self, kind: DistributedType) -> None:
        self.distributed_type = kind


def test_gradients_that_differ_between_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    two: Any = TwoRanks(DistributedType.MULTI_CPU)
    monkeypatch.setattr(parallel, "gather", lambda mine: torch.cat([mine, mine]))
    parallel.check_gradients_agree(model, two)
    monkeypatch.setattr(parallel, "gather", lambda mine: torch.cat([mine, mine + 1e-9]))
    with pytest.raises(UserError, match="not being averaged"):
        parallel.check_gradients_agree(model, two)
    with pytest.raises(UserError, match="not averaged"):
        parallel.check_gradients_agree(model, TwoRanks(DistributedType.NO))  # type: ignore[arg-type]


SEVERAL = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
ZERO = {"ACCELERATE_USE_DEEPSPEED": "true"}
FSDP = {"ACCELERATE_USE_FSDP": "true"}


@pytest.mark.parametrize(
    ("wanted", "environment", "kind"),
    [
        (Parallel.auto, {}, Parallel.single),
        (Parallel.auto, SEVERAL, Parallel.ddp),
        (Parallel.auto, {**SEVERAL, **ZERO}, Parallel.deepspeed_zero2),
        (
            Parallel.auto,
            {**SEVERAL, **ZERO, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
            Parallel.deepspeed_zero3,
        ),
        (Parallel.auto, {**SEVERAL, **FSDP, "FSDP_VERSION": "2"}, Parallel.fsdp2),
        (Parallel.deepspeed_zero1, SEVERAL, Parallel.deepspeed_zero1),
        (Parallel.single, {}, Parallel.single),
        (Parallel.single, {"WORLD_SIZE": "1"}, Parallel.single),
        (Parallel.auto, {**SEVERAL, "SLURM_STEP_NUM_TASKS": "2"}, Parallel.ddp),
    ],
)
def test_the_kind_follows_the_recipe_and_the_launcher(
    wanted: Parallel, environment: dict[str, str], kind: Parallel
) -> None:
    assert chosen(wanted, environment) is kind


@pytest.mark.parametrize(
    ("wanted", "environment", "told"),
    [
        (Parallel.single, SEVERAL, "2 processes were started"),
        (Parallel.ddp, {}, "was started alone"),
        (Parallel.deepspeed_zero3, {}, "was started alone"),
        (Parallel.ddp, {**SEVERAL, **ZERO}, "was told deepspeed_zero2"),
        (Parallel.fsdp2, {**SEVERAL, **ZERO}, "was told deepspeed_zero2"),
        (Parallel.auto, {**SEVERAL, **FSDP}, "fsdp_version: 2"),
        (Parallel.auto, {**SEVERAL, **ZERO, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "0"}, "1, 2 or 3"),
        (Parallel.auto, {**SEVERAL, **ZERO, "ACCELERATE_DEEPSPEED_CONFIG_FILE": "x.json"}, "leave it out"),
        (Parallel.auto, {**SEVERAL, "ACCELERATE_USE_MEGATRON_LM": "true"}, "Megatron"),
        (Parallel.auto, {"SLURM_STEP_NUM_TASKS": "8"}, "srun started 8 tasks"),
        (Parallel.auto, {"WORLD_SIZE": "two"}, "WORLD_SIZE=two is no number of processes"),
    ],
)
def test_contradictions_are_refused(wanted: Parallel, environment: dict[str, str], told: str) -> None:
    with pytest.raises(UserError, match=told):
        chosen(wanted, environment)


@pytest.mark.parametrize("kind", [Parallel.deepspeed_zero2, Parallel.fsdp2])
def test_a_plugin_that_cpu_mode_would_ignore_is_refused(
    monkeypatch: pytest.MonkeyPatch, kind: Parallel
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with pytest.raises(UserError, match="ignores"):
        environment_for(kind, on_cpu=True)


def test_fsdp2_on_a_cpu_is_refused_and_the_environment_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SEVERAL.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with pytest.raises(UserError, match="no FSDP2 on CPUs"), launch.processes("cpu", Parallel.fsdp2):
        pass
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("kind", "made"),
    [
        (Parallel.ddp, DistributedType.NO),
        (Parallel.deepspeed_zero2, DistributedType.MULTI_CPU),
        (Parallel.fsdp2, DistributedType.MULTI_GPU),
    ],
)
def test_another_kind_than_chosen_is_noticed(kind: Parallel, made: DistributedType) -> None:
    two: Any = TwoRanks(made)
    with pytest.raises(UserError, match=f"train.parallel={kind.value}, but accelerate made"):
        parallel.check_kind(kind, two)


def test_a_launcher_that_started_more_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with launch.processes("cpu", Parallel.auto) as joined:
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(UserError, match="started 2 processes"):
            launch.new_accelerator(joined, TrainConfig())


def test_one_of_several_that_are_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that a cluster's shell or another launcher left behind."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(UserError, match=r"WORLD_SIZE=2 says .* unset WORLD_SIZE"),
        launch.processes("cpu", Parallel.auto),
    ):
        pass


def test_the_launchers_accumulation_does_not_divide_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert accelerator_for_tests().gradient_accumulation_steps == 1


def test_the_start_says_what_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    accelerator, config = accelerator_for_tests(), TrainConfig(batch_size=3, accumulation=4)
    (line,) = launch.describe(accelerator, Parallel.single, config)
    assert "1 process on cpu" in line
    assert "single" in line
    assert "effective batch 12 rows" in line
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert "accelerate launch with one process" in launch.describe(accelerator, Parallel.single, config)[1]


def test_a_global_batch_becomes_accumulation() -> None:
    config = TrainConfig(batch_size=2, global_batch=24)
    assert [launch.with_accumulation(config, ranks).accumulation for ranks in (1, 2, 3, 4)] == [12, 6, 4, 3]
    with pytest.raises(UserError, match="not a multiple of 10"):
        launch.with_accumulation(config, 5)


def test_precision_follows_the_probe_only_where_it_is_auto() -> None:
    for wanted, made in ((Precision.auto, "bf16"), (Precision.no, "no")):
        with launch.processes("cpu", Parallel.auto) as joined:
            config = TrainConfig(precision=wanted)
            assert launch.new_accelerator(joined, config, lambda: Precision.bf16).mixed_precision == made
