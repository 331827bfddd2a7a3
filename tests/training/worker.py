"""One training run with the fakes, for tests that need processes of their own.

`python -m tests.training.worker OUT '{"batch_size": 2, …}' [OUT OPTIONS …]`: TrainConfig's keys, and `rows`,
`dtype`, `dropout`, `recipe`, `signal_at` {"step": n, "signal": number} (sent to itself when that step is
logged), `run_precision`, `draft` (`fake` or `eagle3`), `kill_in_write`,
`device`. Several runs one after the other share the imports.
"""

import copy
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from safetensors.torch import save_file

from deepspec.config.schema import KeepBest, Optimiser, Parallel, Precision, StopWhen, TrainConfig
from deepspec.drafts.eagle3 import Eagle3Options
from deepspec.drafts.registry import new_draft
from deepspec.errors import UserError
from deepspec.target import Target
from deepspec.training import checkpoint, parallel
from deepspec.training.launch import new_accelerator, processes
from deepspec.training.loop import Run, Trained, train
from tests.models import tiny_model
from tests.training.fakes import FakeConfig, FakeDraft, FakeTarget, rows

SETTINGS: dict[str, Any] = {
    "log_every": 1,
    "eval_every": 3,
    "eval_steps": 4,
    "checkpoint_every": 2,
    "learning_rate": 0.02,
    "keep_best": KeepBest.none,
}
CHOICES: dict[str, Any] = {
    "parallel": Parallel,
    "optimizer": Optimiser,
    "keep_best": KeepBest,
    "stop_when": lambda value: StopWhen(**value),
}


def main(out: Path, options: dict[str, Any]) -> Trained:
    options = dict(options)
    dtype = getattr(torch, options.pop("dtype", "float64"))
    data = rows(options.pop("rows", 11))
    device = options.pop("device", "cpu")
    kind, dropout = options.pop("draft", "fake"), options.pop("dropout", 0.0)
    signal_at, recipe = options.pop("signal_at", None), options.pop("recipe", {})
    if (number := options.pop("kill_in_write", None)) is not None:
        kill_in_write(number)
    options["precision"] = Precision(options.pop("run_precision", "no"))
    for name, choice in CHOICES.items():
        if name in options:
            options[name] = choice(options[name])
    config = TrainConfig(**{**SETTINGS, **options})

    def on_progress(record: dict[str, Any]) -> None:
        if signal_at is not None and record["step"] == signal_at["step"] and "loss" in record:
            os.kill(os.getpid(), signal_at["signal"])

    with fsdp2_on_gloo(config.parallel, device), processes(device, config.parallel) as joined:
        accelerator = new_accelerator(joined, config)
        if config.parallel is Parallel.deepspeed_zero3:  # else parameters this small stay whole
            settings = accelerator.deepspeed_plugin.deepspeed_config["zero_optimization"]
            settings["stage3_param_persistence_threshold"] = 0
        target, draft = made(kind, dtype, dropout, accelerator.device)
        run = Run(target, config, accelerator, out, recipe=recipe, on_progress=on_progress)
        trained = train(draft, data, rows(5, seed=9), run)
        if accelerator.is_main_process:
            save_file(trained.weights, out / "trained.safetensors")
        return trained


@contextmanager
def fsdp2_on_gloo(kind: Parallel, device: str) -> Iterator[None]:
    """accelerate knows FSDP2 on accelerators only, and the product refuses it on CPUs; torch's own works there."""
    if kind is not Parallel.fsdp2 or device != "cpu":
        yield
        return
    backend = patch.object(
        PartialState, "_prepare_backend", lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
    )
    with backend, patch.object(parallel, "_refuse_fsdp2_on_cpu"):
        yield


def kill_in_write(number: int) -> None:
    """Die by SIGKILL when a checkpoint's `number`-th file is half written."""
    calls = 0

    def half(tensors: Any, path: Path, **more: Any) -> None:
        nonlocal calls
        calls += 1
        save_file(tensors, path, **more)
        if calls == number:
            with path.open("r+b") as file:
                file.truncate(path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.save_file = half


def made(kind: str, dtype: torch.dtype, dropout: float, device: torch.device) -> tuple[Any, Any]:
    """A target and a fresh draft for it."""
    torch.manual_seed(1)
    if kind == "fake":
        return FakeTarget(dtype), FakeDraft(FakeConfig(dropout=dropout)).to(dtype)
    target = Target(copy.deepcopy(tiny_model("llama")).to(device, dtype), None, "tiny llama")
    torch.manual_seed(1)
    options = Eagle3Options(ttt_steps=3, intermediate_size=48)
    return target, new_draft(options, target, torch.arange(0, 40)).to(dtype)


def accelerator_for_tests(precision: Precision = Precision.no, **settings: Any) -> Accelerator:
    """On the CPU, in this process alone."""
    with processes("cpu", Parallel.auto) as joined:
        return new_accelerator(joined, TrainConfig(precision=precision, **settings))


if __name__ == "__main__":
    try:
        for given in range(1, len(sys.argv), 2):
            main(Path(sys.argv[given]), json.loads(sys.argv[given + 1]))
    except UserError as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from None
