"""Where a measurement ran, and how undisturbed it was."""

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import psutil
import torch

from deepspec.artifacts import versions
from deepspec.evaluation.result import Machine, Noise, PromptRecord
from deepspec.target.hardware import cpu_name, device_name

# CPU time, in cores, that something else may take: what a machine's own services need, on a small and a large one
QUIET_CORES, QUIET_SHARE = 0.1, 0.01
MAX_SPREAD = 0.25  # plain decoding costs much the same for every prompt; more than this is not the prompts


def describe_machine(device: torch.device, load_before: Sequence[float]) -> Machine:
    """The machine as it is now. `load_before`: `load_average()` from before the measurement."""
    return Machine(
        system=f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        cpu=cpu_name(),
        cores=psutil.cpu_count(logical=False),
        logical_cores=psutil.cpu_count(logical=True),
        threads=torch.get_num_threads(),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        device=device_name(device),
        load_before=list(load_before),
        load_after=load_average(),
        versions=versions(),
    )


def load_average() -> list[float]:
    """Load over 1, 5 and 15 minutes: processes that want a core."""
    return [round(load, 2) for load in os.getloadavg()]


@dataclass(frozen=True)
class CpuTimes:
    """Seconds so far: on the clock; of all cores at work, and taken from them by the host (steal), since the
    machine started; of this process, and of its calling thread."""

    wall: float
    busy: float
    stolen: float
    process: float
    thread: float

    @classmethod
    def now(cls) -> "CpuTimes":
        cores = psutil.cpu_times()
        # guest time is in user time already; waiting for a disk is idling
        busy = sum(getattr(cores, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq"))
        stolen = getattr(cores, "steal", 0.0)
        return cls(time.perf_counter(), busy, stolen, time.process_time(), time.thread_time())


class NoiseMeter:
    """What else the machine did, added up over the measured decodings.

    Noise is CPU time of other processes, and on a virtual machine what its host withheld. This process's own
    CPU time tells nothing of the kind: threads that wait for each other sleep (OMP_WAIT_POLICY=PASSIVE).
    """

    def __init__(self, clock: Callable[[], CpuTimes] = CpuTimes.now) -> None:
        self.clock = clock
        self.wall = self.thread = self.process = self.busy = self.stolen = 0.0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Around one decoding."""
        start = self.clock()
        yield
        end = self.clock()
        self.wall += end.wall - start.wall
        self.thread += end.thread - start.thread
        self.process += end.process - start.process
        self.busy += end.busy - start.busy
        self.stolen += end.stolen - start.stolen

    @property
    def others(self) -> float | None:
        """Cores that other processes kept at work; None before anything was measured."""
        return round(max(self.busy - self.process, 0.0) / self.wall, 2) if self.wall else None

    @property
    def steal(self) -> float | None:
        """Cores that the host of a virtual machine took away."""
        return round(self.stolen / self.wall, 2) if self.wall else None

    def disturbances(self) -> list[str]:
        """What disturbed, in words; none on a quiet machine."""
        allowed = max(QUIET_CORES, QUIET_SHARE * (psutil.cpu_count() or 1))
        found = []
        if self.others is not None and self.others > allowed:
            found.append(f"other processes kept {self.others:g} cores at work meanwhile")
        if self.steal is not None and self.steal > allowed:
            found.append(f"the host of this virtual machine withheld {self.steal:g} cores")
        return found

    def verdict(self, records: Sequence[PromptRecord]) -> Noise:
        """Quiet or noisy, in words, from what else ran and the spread of plain decoding over the prompts."""
        ratio = round(self.thread / self.wall, 3) if self.wall else None
        cores = round(self.process / self.wall, 2) if self.wall else None
        spread = plain_spread(records)
        complaints = self.disturbances()
        if spread is not None and spread > MAX_SPREAD:
            complaints.append(f"plain decoding's time per token varies by {spread:.0%} between prompts")
        words = "Quiet: nothing else disturbed the measured decodings."
        if complaints:
            words = f"Noisy: {' and '.join(complaints)}. Measure again on an idle machine."
        elif ratio is None or spread is None:
            words = "Nothing suspicious, but too few decodings to tell."
        return Noise(ratio, cores, spread, bool(complaints), words, self.others, self.steal)


def plain_spread(records: Sequence[PromptRecord]) -> float | None:
    """(p90 − p10) / median of plain decoding's seconds per token; None for fewer than four prompts."""
    tpot = [
        sum(d.decode_seconds for d in r.plain) / tokens
        for r in records
        if (tokens := sum(len(d.tokens) - 1 for d in r.plain)) > 0
    ]
    if len(tpot) < 4:
        return None
    low, middle, high = np.percentile(tpot, [10, 50, 90])
    return round(float((high - low) / middle), 3)
