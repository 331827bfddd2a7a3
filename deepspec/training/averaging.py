"""A running mean of the weights (`train.ema`), spread over the processes as the weights are."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from deepspec.drafts.contract import TrainableDraft
from deepspec.errors import UserError


class Average:
    """w̄ ← d·w̄ + (1 − d)·w after every step, with d = min(decay, (1 + t)/(10 + t)) at step t = 0, 1, …

    The mean starts from the first weights; while few steps are done it forgets faster, so that it does not
    stay with them.
    """

    def __init__(self, draft: TrainableDraft, decay: float, accelerator: Accelerator) -> None:
        plugin = accelerator.state.deepspeed_plugin if _deepspeed(accelerator) else None
        if plugin is not None and plugin.zero_stage == 3:
            raise UserError(
                "train.ema is not kept under train.parallel=deepspeed_zero3, where no process holds the "
                "weights between steps: use fsdp2 or deepspeed_zero2, or train.ema=0."
            )
        self.decay = decay
        self._weights = {name: one for name, one in draft.named_parameters() if one.requires_grad}
        self.mean = {
            name: one.detach().to(torch.promote_types(one.dtype, torch.float32), copy=True)
            for name, one in self._weights.items()
        }

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after step `step`, counted from 0."""
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, mean in self.mean.items():
            mean.lerp_(self._weights[name].detach().to(mean.dtype), 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The draft has the mean for its weights meanwhile."""
        kept = {name: one.detach().clone() for name, one in self._weights.items()}
        self._put(self.mean)
        try:
            yield
        finally:
            self._put(kept)

    @torch.no_grad()
    def _put(self, values: dict[str, Tensor]) -> None:
        for name, one in self._weights.items():
            one.data.copy_(values[name])

    def restore(self, saved: dict[str, Tensor]) -> None:
        """The whole mean, by name, as a checkpoint has it."""
        for name, mean in self.mean.items():
            value = saved[name].to(mean.device)
            if isinstance(mean, DTensor):
                value = distribute_tensor(value, mean.device_mesh, mean.placements)
            mean.copy_(value)


def _deepspeed(accelerator: Accelerator) -> bool:
    return accelerator.distributed_type is DistributedType.DEEPSPEED
