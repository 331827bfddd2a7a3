"""How training is spread over processes: decided before any model is loaded, applied to the draft from outside.

What accelerate, DeepSpeed and FSDP do without a word when something does not fit (train alone, ignore a
plugin, scale the loss) is refused here or made impossible.
"""

import importlib.util
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DeepSpeedPlugin, DistributedType, FullyShardedDataParallelPlugin, gather
from torch import nn
from torch.distributed.tensor import DTensor

from deepspec.config.schema import Optimiser, Parallel, TrainConfig
from deepspec.drafts.contract import TrainableDraft
from deepspec.errors import UserError
from deepspec.training.whole import flat_shares

ZERO = {Parallel.deepspeed_zero1: 1, Parallel.deepspeed_zero2: 2, Parallel.deepspeed_zero3: 3}
AVERAGING = (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
START = "torchrun --nproc-per-node N -m deepspec.train"


def chosen(wanted: Parallel, environment: Mapping[str, str]) -> Parallel:
    """What `train.parallel` means under this launcher. environment: of the process, as the launcher set it.

    `UserError` where the two contradict each other, or where processes would be missing.
    """
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks != "1" and "WORLD_SIZE" not in environment:
        raise UserError(
            f"srun started {tasks} tasks that do not know of each other: each would train a draft of its own. "
            "Start one task a machine, and torchrun in it (docs/cluster.md)."
        )
    asked = _asked_by_launcher(environment)
    if wanted is Parallel.auto:
        return asked
    launched = "WORLD_SIZE" in environment
    if wanted is Parallel.single and world_size(environment) > 1:
        raise UserError(
            f"train.parallel=single, but {environment['WORLD_SIZE']} processes were started; each would train "
            "a draft of its own. Start one, or leave train.parallel at auto."
        )
    if wanted is not Parallel.single and not launched:
        raise UserError(
            f"train.parallel={wanted.value} needs processes that know of each other; this one was started "
            f"alone. Start them with {START}, or accelerate launch with a file of conf/accelerate/."
        )
    if asked in (*ZERO, Parallel.fsdp2) and asked is not wanted:
        raise UserError(
            f"train.parallel={wanted.value}, but accelerate launch was told {asked.value}. Leave one of the "
            "two out."
        )
    return wanted


def _asked_by_launcher(environment: Mapping[str, str]) -> Parallel:
    if _on(environment, "ACCELERATE_USE_MEGATRON_LM"):
        raise UserError(f"Megatron-LM does not train drafts. Start with {START} train.parallel=ddp.")
    if _on(environment, "ACCELERATE_USE_DEEPSPEED"):
        if environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none") != "none":
            raise UserError(
                "accelerate's deepspeed_config_file would set batch sizes, clipping and precision beside "
                "train.*: leave it out, and choose the stage with train.parallel=deepspeed_zero1, 2 or 3."
            )
        stage = environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
        by_stage = {str(number): kind for kind, number in ZERO.items()}
        if stage not in by_stage:
            raise UserError(f"DeepSpeed's stage must be 1, 2 or 3, not {stage} (0 is train.parallel=ddp).")
        return by_stage[stage]
    if _on(environment, "ACCELERATE_USE_FSDP"):
        if environment.get("FSDP_VERSION", "1") != "2":
            raise UserError(
                "accelerate launch was told FSDP version 1; only version 2 is supported: set fsdp_version: 2 "
                "in its fsdp_config, as in conf/accelerate/fsdp2_gpu.yaml."
            )
        return Parallel.fsdp2
    return Parallel.ddp if world_size(environment) > 1 else Parallel.single


def world_size(environment: Mapping[str, str]) -> int:
    """How many processes a launcher says there are; 1 without one. `UserError` where that is no number."""
    said = environment.get("WORLD_SIZE", "1")
    if not said.isdecimal() or said == "0":
        raise UserError(
            f"WORLD_SIZE={said} is no number of processes. A launcher sets it; without one, unset it."
        )
    return int(said)


def environment_for(kind: Parallel, on_cpu: bool) -> dict[str, str | None]:
    """Variables that accelerate and DeepSpeed read, for this kind (None: must not be set).

    `UserError` where the kind cannot work on this device; accelerate would train plain data parallelism, or
    every process alone, and not say so.
    """
    sharded = kind in ZERO or kind is Parallel.fsdp2
    if sharded and _on(os.environ, "ACCELERATE_USE_CPU"):
        raise UserError(
            f"With ACCELERATE_USE_CPU accelerate ignores {kind.value} and trains plain data parallelism. "
            f"Unset it and start with {START} train.parallel={kind.value}."
        )
    if kind is Parallel.fsdp2 and on_cpu:
        _refuse_fsdp2_on_cpu()
    if kind in ZERO and importlib.util.find_spec("deepspeed") is None:
        raise UserError(
            f"train.parallel={kind.value} needs the package deepspeed, which runs on Linux only: "
            "pip install deepspeed, or use train.parallel=ddp."
        )
    # transformers imports an installed DeepSpeed when it saves; told nothing, that prints a warning
    return {
        "ACCELERATE_USE_DEEPSPEED": "true" if kind in ZERO else None,
        "ACCELERATE_USE_FSDP": "true" if kind is Parallel.fsdp2 else None,
        **({"DS_ACCELERATOR": "cpu"} if on_cpu else {}),
        **({"ACCELERATE_TORCH_DEVICE": "cpu"} if on_cpu and sharded else {}),
    }


def _refuse_fsdp2_on_cpu() -> None:
    raise UserError(
        "train.parallel=fsdp2 needs GPUs: accelerate has no FSDP2 on CPUs, every process would train alone. "
        f"There ddp and deepspeed_zero1, 2 and 3 work ({START})."
    )


def plugins(kind: Parallel, config: TrainConfig) -> dict[str, Any]:
    """Arguments of `Accelerator` that make it this kind."""
    if config.optimizer is Optimiser.muon and (kind in ZERO or kind is Parallel.fsdp2):
        raise UserError(
            f"train.optimizer=muon needs whole matrices, which train.parallel={kind.value} shards: choose "
            "train.parallel=ddp or train.optimizer=adamw."
        )
    if kind in ZERO:
        return {"deepspeed_plugin": _deepspeed(ZERO[kind], config)}
    if kind is Parallel.fsdp2:
        # a policy that wraps nothing: `wrap` shards the draft as one unit
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=True,
            auto_wrap_policy="NO_WRAP",
            cpu_ram_efficient_loading=False,
        )
        return {"fsdp_plugin": plugin}
    return {}


def _deepspeed(stage: int, config: TrainConfig) -> DeepSpeedPlugin:
    """Torch's own AdamW (DeepSpeed's compiles for minutes); offloading as accelerate launch was told."""
    zero: dict[str, Any] = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    for what in ("optimizer", "param"):
        device = os.environ.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{what.upper()}_DEVICE", "none")
        if device != "none":
            zero[f"offload_{what}"] = {"device": device}
    settings = {
        "train_micro_batch_size_per_gpu": config.batch_size,
        "gradient_accumulation_steps": config.accumulation,
        "gradient_clipping": config.clip,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    return DeepSpeedPlugin(hf_ds_config=settings, zero3_init_flag=False)


def check_kind(kind: Parallel, accelerator: Accelerator) -> None:
    """UserError unless accelerate really made what was chosen."""
    made = accelerator.distributed_type
    wanted = {
        Parallel.single: (DistributedType.NO,),
        Parallel.ddp: (*AVERAGING, DistributedType.NO) if accelerator.num_processes == 1 else AVERAGING,
        Parallel.fsdp2: (DistributedType.FSDP,),
    }.get(kind, (DistributedType.DEEPSPEED,))
    if made not in wanted:
        raise UserError(
            f"train.parallel={kind.value}, but accelerate made {made.value} of it and would train something "
            f"else. Start with {START}."
        )


def wrap(
    draft: TrainableDraft, new_optimiser: Callable[[], torch.optim.Optimizer], accelerator: Accelerator
) -> tuple[nn.Module, AcceleratedOptimizer]:
    """The draft and its optimiser as this run's processes hold them; `draft` stays the module inside.

    Under FSDP2 the draft is one unit: drafts run their layers several times a forward and reach into them, and
    are small beside the target; parameters, gradients and optimiser are sharded between steps.
    """
    if accelerator.distributed_type is DistributedType.FSDP:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        # accelerate's own policy would cast the outputs, our float32 sums, to bfloat16
        low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
        policy = MixedPrecisionPolicy(
            param_dtype=low, reduce_dtype=torch.float32 if low else None, cast_forward_inputs=False
        )
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        fully_shard(draft, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    model, optimiser = accelerator.prepare(draft, new_optimiser())
    return model, optimiser


def describe_wrapping(model: nn.Module, accelerator: Accelerator) -> str:
    """One line: in what the draft is wrapped."""
    if accelerator.distributed_type is DistributedType.FSDP:
        name = "FSDP2 (fully_shard)"
    elif accelerator.distributed_type is DistributedType.DEEPSPEED:
        name = f"DeepSpeed ZeRO-{accelerator.state.deepspeed_plugin.zero_stage}"
    elif isinstance(model, nn.parallel.DistributedDataParallel):
        name = "DistributedDataParallel"
    else:
        return "The draft is not wrapped: one process trains it."
    return (
        f"The draft is wrapped in {name}; gradients are averaged over {accelerator.num_processes} processes."
    )


def check_gradients_agree(model: nn.Module, accelerator: Accelerator) -> None:
    """After a first backward: all processes must hold, or hold shards of, the same gradients."""
    if accelerator.num_processes == 1:
        return
    kind = accelerator.distributed_type
    if kind is DistributedType.DEEPSPEED:
        _check_deepspeed(model, accelerator)
    elif kind is DistributedType.FSDP:
        _check_fsdp(model, accelerator)
    elif kind in AVERAGING:
        _check_averaged(model, accelerator)
    else:
        raise UserError(
            f"{accelerator.num_processes} processes, but accelerate's mode is {kind.value}, in which their "
            "gradients are not averaged."
        )


def _check_averaged(model: nn.Module, accelerator: Accelerator) -> None:
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    sums = [torch.stack([one.double().sum(), one.double().square().sum()]) for one in gradients]
    mine = torch.stack(sums).flatten() if sums else torch.zeros(1, device=accelerator.device)
    everyone = gather(mine[None])
    if not torch.equal(everyone, everyone[:1].expand_as(everyone)):
        raise UserError(
            "The processes' gradients differ after the first backward pass: they are not being averaged. "
            f"Start with {START}; if that is what you did, the draft's parameters are not all used in its "
            "forward."
        )


def _check_deepspeed(model: nn.Module, accelerator: Accelerator) -> None:
    """Each process holds the optimiser's share of the parameters, and the shares make one whole."""
    engine: Any = model
    if not hasattr(engine, "zero_optimization_stage") or engine.dp_world_size != accelerator.num_processes:
        raise UserError(f"DeepSpeed does not average over all processes. Start with {START}.")
    mine = sum(one.numel() for one in flat_shares(engine.optimizer))
    _check_shares(mine, engine.module, accelerator)


def _check_fsdp(model: nn.Module, accelerator: Accelerator) -> None:
    parameters = [one for one in model.parameters() if one.requires_grad]
    if not all(
        isinstance(one, DTensor) and one.device_mesh.size() == accelerator.num_processes for one in parameters
    ):
        raise UserError(f"FSDP2 does not shard the draft over all processes. Start with {START}.")
    _check_shares(sum(one.to_local().numel() for one in parameters), model, accelerator)  # type: ignore[attr-defined]


def _check_shares(mine: int, whole: nn.Module, accelerator: Accelerator) -> None:
    """Padding makes the shares more than the whole, by little; processes that train alone hold all of it."""
    everyone = int(gather(torch.tensor([mine], device=accelerator.device)).sum())
    size = sum(
        getattr(one, "ds_numel", None) or one.numel() for one in whole.parameters() if one.requires_grad
    )
    if not size <= everyone < size * 1.5 + 4096:
        raise UserError(
            f"{accelerator.num_processes} processes hold {everyone} of {size} parameters together: the draft is "
            f"not shared out among them. Start with {START}."
        )


def _on(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "false").lower() in ("true", "1")
