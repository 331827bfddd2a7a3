"""One process of an evaluation that several share: `torchrun -m tests.evaluation.worker RUN`."""

import sys
from functools import partial
from pathlib import Path

from deepspec import evaluate as stage
from deepspec import pair
from tests.evaluation.tiny import load_as, make_config, make_target

if __name__ == "__main__":
    stage.load_target = pair.load_target = partial(load_as, make_target())
    config = make_config(Path(sys.argv[1]))
    config.target.device = "cpu"
    config.evaluate.sweep, config.evaluate.baselines = [], False
    stage.run(config)
