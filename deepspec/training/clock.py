"""Where the time of a step goes, and a trace of it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

PROFILED = (1, 2, 3)  # steps left out, warmed up, traced


class Clock:
    """Seconds by name since the last `shares`. On a GPU they are the GPU's own, read without stopping it."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def span(self, name: str, on_device: bool = True) -> Iterator[None]:
        """on_device: the work is the device's; else the host's, e.g. waiting for rows."""
        if self._cuda and on_device:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._events.append((name, start, end))
            return
        before = time.perf_counter()
        yield
        self._add(name, time.perf_counter() - before)

    def shares(self, seconds: float) -> dict[str, float]:
        """Each name's part of these seconds; starts over."""
        if self._events:
            torch.cuda.synchronize()
        for name, start, end in self._events:
            self._add(name, start.elapsed_time(end) / 1000)
        found = {name: spent / seconds if seconds > 0 else 0.0 for name, spent in self._seconds.items()}
        self._seconds, self._events = {}, []
        return found

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds


@contextmanager
def profiler(wanted: bool, folder: Path, rank: int) -> Iterator[torch.profiler.profile | None]:
    """Steps 4 to 6 of the run as a Chrome trace, one a process (chrome://tracing, ui.perfetto.dev)."""
    if not wanted:
        yield None
        return
    folder.mkdir(parents=True, exist_ok=True)
    wait, warmup, active = PROFILED
    with torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=1),
        on_trace_ready=lambda made: made.export_chrome_trace(str(folder / f"process-{rank}.json")),
    ) as running:
        yield running
