"""Where a measurement ran, and how undisturbed it was."""

import os
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import psutil
import torch

from deepspec.artifacts import versions
from deepspec.evaluation.result import Machine, Noise, PromptRecord
from deepspec.target.hardware import cpu_name, device_name

MIN_CPU_PER_WALL = 0.9  # below it the decoding thread waited for a core more than a tenth of the time
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


class NoiseMeter:
    """CPU time against wall time, added up over the measured decodings.

    The decoding thread computes nearly all the time; its CPU time falls behind the wall clock where it has to
    share its core, and where it sleeps until its helpers are done (OMP_WAIT_POLICY=PASSIVE).
    """

    def __init__(self) -> None:
        self.wall = self.thread = self.process = 0.0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Around one decoding."""
        wall, thread, process = time.perf_counter(), time.thread_time(), time.process_time()
        yield
        self.wall += time.perf_counter() - wall
        self.thread += time.thread_time() - thread
        self.process += time.process_time() - process

    def verdict(self, records: Sequence[PromptRecord]) -> Noise:
        """Quiet or noisy, in words, from the CPU share and the spread of plain decoding over the prompts."""
        ratio = round(self.thread / self.wall, 3) if self.wall else None
        cores = round(self.process / self.wall, 2) if self.wall else None
        spread = plain_spread(records)
        complaints = []
        if ratio is not None and ratio < MIN_CPU_PER_WALL:
            complaints.append(
                f"the decoding thread computed only {ratio:.0%} of the time: it shared its core or waited"
            )
        if spread is not None and spread > MAX_SPREAD:
            complaints.append(f"plain decoding's time per token varies by {spread:.0%} between prompts")
        words = "Quiet: nothing else disturbed the measured decodings."
        if complaints:
            words = f"Noisy: {' and '.join(complaints)}. Measure again on an idle machine."
        elif ratio is None or spread is None:
            words = "Nothing suspicious, but too few decodings to tell."
        return Noise(ratio, cores, spread, bool(complaints), words)


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
