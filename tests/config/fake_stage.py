"""A stage that does nothing, started as a real process by the tests: `python -m fake_stage +recipe=...`.

The drafts' registry is replaced by a small one, so that these processes need no torch.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass
from types import ModuleType

from deepspec.config.app import command, entry
from deepspec.config.schema import Config
from deepspec.errors import UserError


@dataclass
class Eagle3Options:
    algorithm: str = "eagle3"
    start: str = "random"
    ttt_steps: int = 5
    vocab_size: int | None = 8192
    layers: int = 1
    step_decay: float = 0.8
    intermediate_size: int | None = None
    capture_layers: list[int] | None = None
    start: str = "random"


@dataclass
class OtherOptions:
    algorithm: str = "other"
    heads: int = 4


def run(config: Config) -> None:
    if config.name == "mistake":
        raise UserError("prompts.jsonl, line 3: not JSON. Mend the line.")
    if config.name == "defect":
        raise ZeroDivisionError("a defect")
    if config.name == "interrupt":
        raise KeyboardInterrupt
    if config.name == "full":
        raise OSError(28, "No space left on device", "runs/full/data")
    seen = {
        "name": config.name,
        "out": config.out,
        "target": asdict(config.target)["path"],
        "draft": [type(config.draft).__name__, asdict(config.draft)],
        "epochs": config.train.epochs,
        "answers": config.data.answers.name,
        "system": config.data.system,
        "loss": config.train.loss,
        "cwd": os.getcwd(),
        "rank": os.environ.get("RANK"),
        "command": command("prepare"),
    }
    # one write: lines of two ranks must not mix
    sys.stdout.write(json.dumps(seen) + "\n")
    sys.stdout.flush()


def registry() -> ModuleType:
    """What stands in for `deepspec.drafts.registry`."""
    module = ModuleType("deepspec.drafts.registry")
    vars(module)["option_classes"] = lambda: {"eagle3": Eagle3Options, "other": OtherOptions}
    vars(module)["check_options"] = lambda options: None
    return module


main = entry("fake", run)

if __name__ == "__main__":
    sys.modules["deepspec.drafts.registry"] = registry()
    main()
