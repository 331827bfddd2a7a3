"""How much memory decoding takes with the draft and without it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch import nn

from deepspec.evaluation.findings import Resources

EVERY = 0.01  # seconds between two looks at the process' memory


class Peak:
    """`bytes`: the most memory in use since the block began, of the device, or of the process on a CPU."""

    def __init__(self) -> None:
        self.bytes, self.stopped, self.process = 0, threading.Event(), psutil.Process()

    def look(self) -> None:
        self.bytes = max(self.bytes, self.process.memory_info().rss)

    def watch(self) -> None:
        while not self.stopped.wait(EVERY):
            self.look()


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Around a decoding."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated(device)
        return
    peak.look()
    watcher = threading.Thread(target=peak.watch, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        peak.look()
        peak.stopped.set()
        watcher.join()


def measure_resources(
    device: torch.device,
    draft: Any,
    plain: Callable[[], object],
    speculative: Callable[[], object],
    load_draft_seconds: float | None,
) -> Resources:
    """Peaks of one decoding each way. The draft's weights, loaded both times, are subtracted from plain's."""
    weights = weights_of(draft)
    with peak_memory(device) as without:
        plain()
    with peak_memory(device) as with_draft:
        speculative()
    return Resources(
        kind="device" if device.type == "cuda" else "process",
        peak_plain=max(0, without.bytes - weights),
        peak_speculative=with_draft.bytes,
        draft_weights=weights,
        load_draft_seconds=load_draft_seconds,
    )


def weights_of(draft: Any) -> int:
    """Bytes of a draft's parameters and buffers; 0 for one without."""
    if not isinstance(draft, nn.Module):
        return 0
    return sum(t.numel() * t.element_size() for t in (*draft.parameters(), *draft.buffers()))
