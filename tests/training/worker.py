"""One training run with the fakes, for tests that need processes of their own.

`python -m tests.training.worker OUT '{"batch_size": 2, …}'`: TrainConfig's keys, and `rows`, `dtype`,
`dropout`, `recipe`, `signal_at` {"step": n, "signal": number} (sent to itself when that step is logged),
`run_precision`.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import save_file

from deepspec.config.schema import Precision, TrainConfig
from deepspec.errors import UserError
from deepspec.training.launch import join_processes, new_accelerator
from deepspec.training.loop import Run, train
from tests.training.fakes import FakeConfig, FakeDraft, FakeTarget, rows

SETTINGS: dict[str, Any] = {
    "log_every": 1,
    "eval_every": 3,
    "eval_steps": 4,
    "checkpoint_every": 2,
    "learning_rate": 0.02,
}


def main(out: Path, options: dict[str, Any]) -> None:
    options = dict(options)
    dtype = getattr(torch, options.pop("dtype", "float64"))
    data = rows(options.pop("rows", 11))
    dropout, signal_at = options.pop("dropout", 0.0), options.pop("signal_at", None)
    precision = Precision(options.pop("run_precision", "no"))
    accelerator = accelerator_for_tests(precision)
    recipe = options.pop("recipe", {})
    run = Run(FakeTarget(dtype), TrainConfig(**{**SETTINGS, **options}), accelerator, out, recipe=recipe)

    def on_progress(record: dict[str, Any]) -> None:
        if signal_at is not None and record["step"] == signal_at["step"] and "loss" in record:
            os.kill(os.getpid(), signal_at["signal"])

    run.on_progress = on_progress
    torch.manual_seed(1)
    draft = FakeDraft(FakeConfig(dropout=dropout)).to(dtype)
    train(draft, data, rows(5, seed=9), run)
    save_file(draft.state_dict(), out / f"trained-{accelerator.process_index}.safetensors")


def accelerator_for_tests(precision: Precision = Precision.no) -> Accelerator:
    """On the CPU, with whatever processes torchrun has started."""
    join_processes("cpu")
    return new_accelerator("cpu", precision, lambda: Precision.no)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    except UserError as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from None
