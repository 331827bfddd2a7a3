"""How much memory decoding takes with the draft and without it, and how busy it keeps the processors."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch import nn

from deepspec.evaluation.findings import Resources
from deepspec.evaluation.machine import CpuTimes

EVERY = 0.01  # seconds between two looks


class Use:
    """What a block used. bytes: the most memory, of the device, or of the process on a CPU. cores: processors at
    work, on average. gpu: the device's mean utilisation (NVML), None where it cannot be read."""

    def __init__(self, device: torch.device) -> None:
        self.bytes, self.cores, self.gpu = 0, 0.0, None if device.type != "cuda" else 0.0
        self.device, self.stopped, self.process = device, threading.Event(), psutil.Process()
        self.readings: list[float] = []

    def look(self) -> None:
        """Once at whatever has no counter of its own."""
        if self.device.type != "cuda":
            self.bytes = max(self.bytes, self.process.memory_info().rss)
        elif self.gpu is not None:
            try:
                self.readings.append(torch.cuda.utilization(self.device) / 100)
            except (ModuleNotFoundError, RuntimeError):  # no nvidia-ml-py, or no permission
                self.gpu = None

    def watch(self) -> None:
        while not self.stopped.wait(EVERY):
            self.look()


@contextmanager
def watched(device: torch.device) -> Iterator[Use]:
    """Around a decoding."""
    use, before = Use(device), CpuTimes.now()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    use.look()
    watcher = threading.Thread(target=use.watch, daemon=True)
    watcher.start()
    try:
        yield use
    finally:
        use.look()
        use.stopped.set()
        watcher.join()
    after = CpuTimes.now()
    use.cores = (after.busy - before.busy) / max(after.wall - before.wall, 1e-9)
    if device.type == "cuda":
        use.bytes = torch.cuda.max_memory_allocated(device)
    if use.gpu is not None:
        use.gpu = sum(use.readings) / len(use.readings)


def measure_resources(
    device: torch.device,
    draft: Any,
    plain: Callable[[], object],
    speculative: Callable[[], object],
    load_draft_seconds: float | None,
) -> Resources:
    """Of one decoding each way. The draft's weights, loaded both times, are subtracted from plain's peak."""
    weights = weights_of(draft)
    with watched(device) as without:
        plain()
    with watched(device) as with_draft:
        speculative()
    return Resources(
        kind="device" if device.type == "cuda" else "process",
        peak_plain=max(0, without.bytes - weights),
        peak_speculative=with_draft.bytes,
        draft_weights=weights,
        load_draft_seconds=load_draft_seconds,
        cpu_plain=round(without.cores, 2),
        cpu_speculative=round(with_draft.cores, 2),
        gpu_plain=without.gpu,
        gpu_speculative=with_draft.gpu,
    )


def weights_of(draft: Any) -> int:
    """Bytes of a draft's parameters and buffers; 0 for one without."""
    if not isinstance(draft, nn.Module):
        return 0
    return sum(t.numel() * t.element_size() for t in (*draft.parameters(), *draft.buffers()))
