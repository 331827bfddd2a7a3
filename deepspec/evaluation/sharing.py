"""The processes of one launch that share an evaluation's prompts."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

from torch import distributed

from deepspec.config.schema import Config, Parallel
from deepspec.training.launch import processes


@dataclass
class Shared:
    """This process among those that share the prompts. wait: until all have come here."""

    rank: int = 0
    processes: int = 1
    wait: Callable[[], None] = field(default=lambda: None)


@contextmanager
def sharing(config: Config) -> Iterator[Shared]:
    """Join the other processes of a launch (`accelerate launch`, torchrun), if there are any."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield Shared()
        return
    with processes(config.target.device, Parallel.ddp) as joined:
        # One process may have a long answer more than another: minutes are no sign of a lost one.
        group = distributed.new_group(backend="gloo", timeout=timedelta(days=1))
        yield Shared(
            joined.state.process_index, joined.state.num_processes, lambda: distributed.barrier(group=group)
        )
