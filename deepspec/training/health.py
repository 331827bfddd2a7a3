"""What can go wrong in a step, and what is left behind for whoever looks into it."""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from safetensors.torch import save_file

from deepspec.config.schema import TrainConfig
from deepspec.errors import UserError
from deepspec.training.checkpoint import Counters
from deepspec.training.memory import GIB
from deepspec.training.optimiser import Micro

SPIKE_DEVIATIONS = 6.0
SPIKE_WARMUP = 20  # steps before a loss can be called unusual
SPIKE_MEMORY = 0.98  # of the running mean and variance
COLUMNS = ("tokens", "loss_mask", "documents", "positions", "features", "last_hidden")


def spike(counters: Counters, loss: float | None) -> float | None:
    """Take in a step's loss; the loss that was to be expected if this one is far above it, else None.

    Far: more than six standard deviations over the running mean. A spike does not move the mean.
    """
    if loss is None:
        return None
    before = counters.spikes or {"mean": loss, "variance": 0.0, "seen": 0}
    mean, variance, seen = before["mean"], before["variance"], before["seen"]
    if seen >= SPIKE_WARMUP and loss > mean + SPIKE_DEVIATIONS * math.sqrt(variance):
        # a new level is met often, and then is not unusual any more
        counters.spikes = {"mean": mean, "variance": 1.5 * variance + 1e-12, "seen": seen}
        return mean
    keep = min(SPIKE_MEMORY, seen / (seen + 1))
    off = loss - mean
    counters.spikes = {
        "mean": mean + (1 - keep) * off,
        "variance": keep * (variance + (1 - keep) * off * off),
        "seen": seen + 1,
    }
    return None


def row_ids(window: Sequence[Micro], ranks: int) -> list[int]:
    """Numbers of the rows that this step was made of, on all processes; collective."""
    mine = [row for micro in window if micro.counted for row in micro.rows]
    every = gather_object([mine]) if ranks > 1 else [mine]
    return sorted(row for rows in every for row in rows)


def count_not_finite(
    counters: Counters, finite: bool, window: Sequence[Micro], config: TrainConfig, folder: Path, rank: int
) -> None:
    """Count a step that was left out; after `train.max_not_finite` in a row keep its batch and stop."""
    counters.skipped += not finite
    counters.skipped_in_a_row = 0 if finite else counters.skipped_in_a_row + 1
    if counters.skipped_in_a_row < config.max_not_finite:
        return
    kept = _save_window(window, folder / f"step-{counters.step}", rank)
    raise UserError(
        f"The loss or its gradient was not finite {counters.skipped_in_a_row} steps in a row (up to step "
        f"{counters.step}; its batch is in {kept}): lower train.learning_rate (now {config.learning_rate}) or "
        "set train.precision=no, and start over with train.resume=never."
    )


def _save_window(window: Sequence[Micro], folder: Path, rank: int) -> Path:
    """What this process's micro-batches were made of, with their rows' numbers as metadata."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{index}/{name}": getattr(micro.batch, name).contiguous()
        for index, micro in enumerate(window)
        for name in COLUMNS
    }
    path = folder / f"process-{rank}.safetensors"
    save_file(tensors, path, metadata={"rows": json.dumps([micro.rows for micro in window])})
    return path


@contextmanager
def explained(rows: Sequence[int], step: int, config: TrainConfig) -> Iterator[None]:
    """Errors of one step, with what a person needs to know of it: its rows, or how to make it fit."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        free, whole = torch.cuda.mem_get_info()
        raise UserError(
            f"The GPU's memory ({whole / GIB:.1f} GiB, {free / GIB:.1f} free) was not enough at step {step + 1} "
            f"({torch.cuda.max_memory_allocated() / GIB:.1f} GiB used by training at most). Halve "
            f"train.batch_size (now {config.batch_size}) and double train.accumulation (now "
            f"{config.accumulation}), which learns the same; or set train.gradient_checkpointing=true, shorten rows "
            "(data.max_length), or share the optimiser out (train.parallel=deepspeed_zero2)."
        ) from error
    except UserError:
        raise
    except Exception as error:
        error.add_note(f"This happened at step {step + 1}, over the rows {list(rows)} of the training data.")
        raise


def memory_gib() -> dict[str, Any]:
    """Most memory that tensors took on the GPU, if there is one, and what this process has now."""
    import psutil

    found = {"memory_gib": psutil.Process().memory_info().rss / GIB}
    if torch.cuda.is_available():
        found["gpu_memory_gib"] = torch.cuda.max_memory_allocated() / GIB
    return found
