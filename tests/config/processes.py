"""Where the fake stage lives, and the environment it is started in."""

import os
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def environment(*paths: Path) -> dict[str, str]:
    """This process's variables without those of Hydra and launchers; `paths` are where modules are found."""
    foreign = ("HYDRA_", "ACCELERATE_", "RANK")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {**kept, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
