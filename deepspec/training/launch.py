"""How many processes train, on what, and whether they really train together.

Launchers can start ranks that do not know of each other, or one where several were asked for, without a word:
here each such case is said or refused.
"""

import os
from collections.abc import Callable

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, gather

from deepspec.config.schema import Precision
from deepspec.errors import UserError

TOGETHER = (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def join_processes(device: str) -> PartialState:
    """Find the other processes (torchrun, `accelerate launch`) before any model is loaded.

    device: as in `target.device`. On a CPU accelerate must be told so, or every rank believes it is alone.
    """
    for plugin in ("FSDP", "DEEPSPEED"):
        if os.environ.get(f"ACCELERATE_USE_{plugin}", "false").lower() in ("true", "1"):
            raise UserError(
                f"Training under {plugin} is not supported: a draft is small, plain data parallelism "
                "(torchrun --nproc-per-node N, or accelerate launch --multi_gpu) trains it."
            )
    AcceleratorState._reset_state()  # an earlier run in this process (a sweep) may have had another precision
    return PartialState(cpu=_on_cpu(device))


def new_accelerator(device: str, precision: Precision, probe: Callable[[], Precision]) -> Accelerator:
    """The accelerator of this process. probe: what `precision=auto` becomes."""
    chosen = probe() if precision is Precision.auto else precision
    try:
        accelerator = Accelerator(cpu=_on_cpu(device), mixed_precision=chosen.value)
    except ValueError as error:
        raise UserError(f"train.precision={chosen.value} does not work here: {error}") from error
    wanted = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != wanted:
        raise UserError(
            f"The launcher started {wanted} processes, but this one knows of {accelerator.num_processes}: "
            "they would each train a draft of their own. Start them with torchrun --nproc-per-node N."
        )
    return accelerator


def _on_cpu(device: str) -> bool:
    return device == "cpu" or (device == "auto" and not torch.cuda.is_available())


def describe(accelerator: Accelerator, batch_size: int, accumulation: int) -> list[str]:
    """Lines for the start of a run: processes, device, backend, effective batch, and what looks wrong."""
    ranks = accelerator.num_processes
    backend = torch.distributed.get_backend() if ranks > 1 else "none"
    lines = [
        f"{ranks} process{'es' if ranks > 1 else ''} on {accelerator.device.type}, backend {backend}, "
        f"precision {accelerator.mixed_precision}; effective batch {ranks * batch_size * accumulation} rows "
        f"= {ranks} × {accumulation} accumulated × {batch_size}."
    ]
    if ranks == 1 and "ACCELERATE_MIXED_PRECISION" in os.environ and "WORLD_SIZE" not in os.environ:
        lines.append(
            "Started by accelerate launch with one process. If you asked for more: on a CPU it starts one "
            "only, without saying so. Use torchrun --nproc-per-node N -m deepspec.train, or "
            "ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes N -m deepspec.train."
        )
    return lines


def check_gradients_agree(model: torch.nn.Module, accelerator: Accelerator) -> None:
    """After a first backward: every process must hold the same gradients, or each trains alone."""
    if accelerator.num_processes == 1:
        return
    if accelerator.distributed_type not in TOGETHER:
        raise UserError(
            f"{accelerator.num_processes} processes, but accelerate's mode is "
            f"{accelerator.distributed_type.value}, in which their gradients are not averaged."
        )
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    sums = [torch.stack([one.double().sum(), one.double().square().sum()]) for one in gradients]
    mine = torch.stack(sums).flatten() if sums else torch.zeros(1, device=accelerator.device)
    everyone = gather(mine[None])
    if not torch.equal(everyone, everyone[:1].expand_as(everyone)):
        raise UserError(
            "The processes' gradients differ after the first backward pass: they are not being averaged. "
            "Start with torchrun --nproc-per-node N -m deepspec.train; if that is what you did, the draft's "
            "parameters are not all used in its forward."
        )
