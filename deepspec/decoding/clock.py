"""Where a round's time goes, without waiting for a device that works behind Python's back."""

import time

import torch


class Laps:
    """Seconds between the marks of one round.

    On CUDA the marks are events in the stream. They are read after the round's one transfer, which has waited
    for them already; the clock itself never makes the device idle.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_device = device.type == "cuda"
        self.started = time.perf_counter()
        self.marks = [self._mark()]

    def lap(self) -> None:
        self.marks.append(self._mark())

    def seconds(self) -> tuple[list[float], float]:
        """Between each two marks; and all that has passed since the first beyond those."""
        laps = [self._between(a, b) for a, b in zip(self.marks, self.marks[1:], strict=False)]
        return laps, max(time.perf_counter() - self.started - sum(laps), 0.0)

    def _mark(self) -> "float | torch.cuda.Event":
        if not self.on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @staticmethod
    def _between(first: "float | torch.cuda.Event", second: "float | torch.cuda.Event") -> float:
        if isinstance(first, float) and isinstance(second, float):
            return second - first
        return first.elapsed_time(second) / 1000  # type: ignore[union-attr, arg-type]
