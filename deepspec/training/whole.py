"""Weights and optimiser states made whole, whatever process holds which part of them.

One layout for every kind of parallelism: full tensors by the parameter's own name, on the CPU. So a checkpoint
of eight processes under ZeRO-3 is one of a single process too, and holds tensors only, no pickled objects.
Collective: every process calls these, in the same order; process 0 gets the content, the others nothing.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def whole_weights(
    draft: nn.Module, accelerator: Accelerator, instead: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The draft's state dict, in float32 where DeepSpeed trains a copy in fewer bits.

    instead: tensors spread as the parameters are, by name, to take their places (a running mean).
    """
    found: dict[str, Tensor] = {}
    seen: dict[int, Tensor | None] = {}
    names = {id(one): name for name, one in draft.named_parameters()}
    for key, value in draft.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            name = names.get(id(value))
            other = instead.get(name) if instead is not None and name is not None else None
            full = _whole(value if other is None else other, accelerator)
            seen[id(value)] = full.detach().cpu() if accelerator.is_main_process else None
        kept = seen[id(value)]
        if kept is not None:
            # tied weights keep sharing, others must not change with the next step
            found[key] = kept.clone() if kept.device == value.device else kept
    return found


def _whole(value: Tensor, accelerator: Accelerator) -> Tensor:
    if isinstance(value, DTensor):
        return value.full_tensor()
    if accelerator.distributed_type is not DistributedType.DEEPSPEED or not isinstance(value, nn.Parameter):
        return value
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    if value.requires_grad:
        return safe_get_full_fp32_param(value)
    with GatheredParameters([value], enabled=hasattr(value, "ds_id")):
        return value.detach().clone()


def restore_float32(draft: nn.Module, weights: dict[str, Tensor], accelerator: Accelerator) -> None:
    """Give DeepSpeed's float32 copies the bits that its narrower weights have lost; else nothing to do."""
    if accelerator.distributed_type is not DistributedType.DEEPSPEED or accelerator.mixed_precision == "no":
        return
    for name, parameter in _learning(draft):
        _set_deepspeed(parameter, weights[name], None)


def whole_moments(
    draft: nn.Module, optimiser: AcceleratedOptimizer, accelerator: Accelerator
) -> dict[str, Tensor]:
    """`<state>/<parameter>` → tensor, for every state the optimiser keeps (AdamW: step and two moments)."""
    found: dict[str, Tensor] = {}
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        _link_deepspeed_states(optimiser)
    for name, parameter in _learning(draft):
        for key, value in _states(parameter, optimiser, accelerator):
            if accelerator.is_main_process:
                found[f"{key}/{name}"] = value.detach().cpu().clone()
    return found


def _states(
    parameter: Tensor, optimiser: AcceleratedOptimizer, accelerator: Accelerator
) -> Iterator[tuple[str, Tensor]]:
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        from deepspeed.utils import safe_get_full_optimizer_state

        any_share: dict[str, Any] = next(iter(_inner(optimiser).state.values()), {})
        for key, value in sorted(any_share.items()):
            if not torch.is_tensor(value) or value.dim() == 0:
                yield key, torch.as_tensor(value)
            else:
                yield key, safe_get_full_optimizer_state(parameter, key)
        return
    for key, value in sorted(_inner(optimiser).state.get(parameter, {}).items()):
        if torch.is_tensor(value):
            yield key, value.full_tensor() if isinstance(value, DTensor) else value


def restore_moments(
    draft: nn.Module, optimiser: AcceleratedOptimizer, saved: dict[str, Tensor], accelerator: Accelerator
) -> None:
    """The reverse of `whole_moments`, on a wrapped draft and a fresh optimiser. Every process has `saved`."""
    if not saved:
        return
    keys = sorted({name.partition("/")[0] for name in saved})
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        _make_deepspeed_states(optimiser, {key: _first(saved, key) for key in keys})
        for name, parameter in _learning(draft):
            for key in keys:
                if f"{key}/{name}" in saved and saved[f"{key}/{name}"].dim():
                    _set_deepspeed(parameter, saved[f"{key}/{name}"], key)
        return
    inner = _inner(optimiser)
    on_device = any(group.get("fused") or group.get("capturable") for group in inner.param_groups)
    for name, parameter in _learning(draft):
        state = {key: saved[f"{key}/{name}"] for key in keys if f"{key}/{name}" in saved}
        for key, value in state.items():
            if isinstance(parameter, DTensor) and value.shape == parameter.shape and value.dim():
                whole = value.to(parameter.device)
                state[key] = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
            else:
                state[key] = value.to(parameter.device) if value.dim() or on_device else value.clone()
        if state:
            inner.state[parameter] = state


def _make_deepspeed_states(optimiser: AcceleratedOptimizer, examples: dict[str, Tensor]) -> None:
    """DeepSpeed's optimiser has no states before its first step: make them, to be filled."""
    zero: Any = optimiser.optimizer
    for flat in flat_shares(zero):
        zero.optimizer.state[flat] = {
            key: torch.zeros_like(flat.data) if example.dim() else example.clone()
            for key, example in examples.items()
        }
    _link_deepspeed_states(optimiser)


def flat_shares(zero: Any) -> list[Tensor]:
    """This process's share of the float32 weights, as DeepSpeed's optimiser holds it: one flat tensor a group."""
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        return zero.fp32_partitioned_groups_flat  # ZeRO-3
    return zero.single_partition_of_fp32_groups


def _link_deepspeed_states(optimiser: AcceleratedOptimizer) -> None:
    """ZeRO-1 and 2 link parameters to their states once, when the first of the groups has been stepped: the other
    groups' states are missing. Link again."""
    zero: Any = optimiser.optimizer
    if hasattr(zero, "_hp_optimizer_states_linked"):
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()


def _set_deepspeed(parameter: Any, value: Tensor, key: str | None) -> None:
    """This process's share of a float32 weight (`key` None) or of a state, from the whole."""
    from deepspeed import utils

    if not hasattr(parameter, "ds_id"):
        value = value.to(parameter.device)
        if key is None:
            utils.safe_set_full_fp32_param(parameter, value)
        else:
            utils.safe_set_full_optimizer_state(parameter, value, key)
        return
    share = parameter.ds_tensor.numel()  # equal on all processes, the last one's padded
    ranks = math.ceil(value.numel() / share)
    rank = torch.distributed.get_rank()
    padded = nn.functional.pad(value.flatten(), (0, max(ranks, rank + 1) * share - value.numel()))
    mine = padded[rank * share : (rank + 1) * share].to(parameter.device)
    if key is None:
        utils.safe_set_local_fp32_param(parameter, mine)
    else:
        utils.safe_set_local_optimizer_state(parameter, mine, key)


def _learning(draft: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, one) for name, one in draft.named_parameters() if one.requires_grad)


def _inner(optimiser: AcceleratedOptimizer) -> torch.optim.Optimizer:
    """Torch's own optimiser inside accelerate's and DeepSpeed's."""
    inner: Any = optimiser
    while hasattr(inner, "optimizer"):
        inner = inner.optimizer
    return inner


def _first(saved: dict[str, Tensor], key: str) -> Tensor:
    return next(value for name, value in saved.items() if name.startswith(f"{key}/"))
