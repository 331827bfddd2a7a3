"""How busy the device is, read now and then: above a threshold only tokens of high confidence are verified."""

import time
from collections.abc import Callable

import psutil
import torch

from deepspec.errors import UserError

EVERY = 0.5  # seconds between two readings; between rounds, so that a reading never waits for the device


def utilization_of(device: torch.device) -> Callable[[], float]:
    """A reading in 0..1: NVML's for a CUDA device (needs nvidia-ml-py), else all processors' by psutil.

    It holds for everything that runs on the device, this process included.
    """
    if device.type == "cuda":
        try:
            torch.cuda.utilization(device)
        except (ModuleNotFoundError, RuntimeError) as error:
            raise UserError(
                f"decode.utilization_threshold: the utilization of {device} cannot be read ({error}). Install "
                "nvidia-ml-py, or set decode.utilization_threshold=null."
            ) from error
        return _sparing(lambda: torch.cuda.utilization(device) / 100)
    psutil.cpu_percent()  # the first call only starts the interval of the second
    return _sparing(lambda: psutil.cpu_percent() / 100)


def _sparing(read: Callable[[], float], clock: Callable[[], float] = time.monotonic) -> Callable[[], float]:
    """The last reading, renewed when it is older than `EVERY` seconds."""
    last, at = 0.0, clock()

    def reading() -> float:
        nonlocal last, at
        if clock() - at >= EVERY:
            last, at = read(), clock()
        return last

    return reading
