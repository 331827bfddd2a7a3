"""How many processes train, on what, and whether they really train together.

Launchers can start ranks that do not know of each other, or one where several were asked for, without a word:
here each such case is said or refused.
"""

import atexit
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import GradientAccumulationPlugin
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from deepspec.config.schema import Parallel, Precision, TrainConfig
from deepspec.errors import UserError
from deepspec.training.parallel import ZERO, check_kind, chosen, environment_for, plugins, world_size


@dataclass
class Processes:
    """This process among the others. kind: never `auto`. device: as in `target.device`."""

    state: PartialState
    kind: Parallel
    device: str


@contextmanager
def processes(device: str, wanted: Parallel) -> Iterator[Processes]:
    """Find the other processes (torchrun, `accelerate launch`) before any model is loaded.

    On a CPU accelerate must be told so, or every rank believes it is alone.
    """
    kind = chosen(wanted, os.environ)
    before = dict(os.environ)
    on_cpu = _on_cpu(device)
    for name, value in environment_for(kind, on_cpu).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    AcceleratorState._reset_state()  # an earlier run in this process (a sweep) may have had another precision
    PartialState._reset_state()
    try:
        state = _join(kind, on_cpu)
        _leave_at_exit()
        yield Processes(state, kind, device)
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def _join(kind: Parallel, on_cpu: bool) -> PartialState:
    try:
        if kind in ZERO and on_cpu:
            return PartialState(cpu=False, backend="gloo")  # cpu=True would turn the plugin off
        return PartialState(cpu=on_cpu and kind is not Parallel.fsdp2)
    except ValueError as error:
        raise UserError(
            f"WORLD_SIZE={os.environ.get('WORLD_SIZE')} says that this process is one of several, and the others cannot "
            f"be found ({error}). Start them with torchrun --nproc-per-node N, or unset WORLD_SIZE to work alone."
        ) from error


@cache
def _leave_at_exit() -> None:
    """The group of processes lasts as long as they do: a second one, for a sweep's next run, would meet the
    first one's addresses in the launcher's store, and wait for ever."""
    atexit.register(lambda: torch.distributed.is_initialized() and torch.distributed.destroy_process_group())


def new_accelerator(
    joined: Processes, config: TrainConfig, probe: Callable[[], Precision] = lambda: Precision.no
) -> Accelerator:
    """The accelerator of this process. probe: what `precision=auto` becomes."""
    precision = probe() if config.precision is Precision.auto else config.precision
    try:
        accelerator = Accelerator(
            cpu=_on_cpu(joined.device) and joined.kind in (Parallel.single, Parallel.ddp),
            mixed_precision=precision.value,
            # given as an object, or a variable of accelerate launch would divide our losses once more
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            **plugins(joined.kind, config),
        )
    except ValueError as error:
        raise UserError(f"train.precision={precision.value} does not work here: {error}") from error
    if joined.kind in ZERO:
        # else transformers splits every model made from now on, the target and copies of the draft too
        unset_hf_deepspeed_config()
    wanted = world_size(os.environ)
    if accelerator.num_processes != wanted:
        raise UserError(
            f"The launcher started {wanted} processes, but this one knows of {accelerator.num_processes}: "
            "they would each train a draft of their own. Start them with torchrun --nproc-per-node N."
        )
    check_kind(joined.kind, accelerator)
    return accelerator


def precision_of(target: torch.dtype) -> Precision:
    """`precision=auto`: as the target runs, whose format was measured or chosen."""
    return Precision.bf16 if target == torch.bfloat16 else Precision.no


def with_accumulation(config: TrainConfig, ranks: int) -> TrainConfig:
    """`train.global_batch` as an accumulation for this many processes."""
    if config.global_batch is None:
        return config
    at_once = config.batch_size * ranks
    if config.global_batch % at_once:
        raise UserError(
            f"train.global_batch={config.global_batch} is not a multiple of {at_once} = {ranks} processes × "
            f"train.batch_size={config.batch_size}: change one of them."
        )
    return replace(config, accumulation=config.global_batch // at_once)


def _on_cpu(device: str) -> bool:
    return device == "cpu" or (device == "auto" and not torch.cuda.is_available())


def describe(accelerator: Accelerator, kind: Parallel, config: TrainConfig) -> list[str]:
    """Lines for the start of a run: processes, device, backend, effective batch, and what looks wrong."""
    ranks, backend = accelerator.num_processes, "none"
    if torch.distributed.is_initialized():
        backend = torch.distributed.get_backend()
    lines = [
        f"{ranks} process{'es' if ranks > 1 else ''} on {accelerator.device.type}, backend {backend}, "
        f"{kind.value}, precision {accelerator.mixed_precision}; effective batch "
        f"{ranks * config.batch_size * config.accumulation} rows = {ranks} × {config.accumulation} accumulated "
        f"× {config.batch_size}."
    ]
    if ranks == 1 and "ACCELERATE_MIXED_PRECISION" in os.environ and "WORLD_SIZE" not in os.environ:
        lines.append(
            "Started by accelerate launch with one process. If you asked for more: on a CPU it starts one "
            "only, without saying so. Use torchrun --nproc-per-node N -m deepspec.train, or "
            "accelerate launch --multi_gpu --num_processes N -m deepspec.train."
        )
    return lines
