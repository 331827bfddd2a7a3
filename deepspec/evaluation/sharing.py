"""The processes of one launch that share a stage's work: an evaluation's prompts, the rows of the data."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch import distributed

from deepspec.config.schema import Config, Parallel
from deepspec.data.sharing import ALONE, Group
from deepspec.training.launch import processes


@contextmanager
def sharing(config: Config) -> Iterator[Group]:
    """Join the other processes of a launch (`accelerate launch`, torchrun), if there are any."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield ALONE
        return
    with processes(config.target.device, Parallel.ddp) as joined:
        # One process may have a long answer more than another: minutes are no sign of a lost one.
        group = distributed.new_group(backend="gloo", timeout=timedelta(days=1))
        yield Group(
            joined.state.process_index, joined.state.num_processes, lambda: distributed.barrier(group=group)
        )
