"""Where curves are shown besides `history.jsonl`: nowhere, wandb, TensorBoard or trackio."""

import os
import urllib.error
import urllib.request
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from deepspec.config.schema import Tracker
from deepspec.errors import UserError

ONLINE_SECONDS = 20


class RunTracker(Protocol):
    """Receives numbers by step."""

    def log(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class NoTracker:
    def log(self, step: int, values: dict[str, float]) -> None:
        """Nothing: the history file has it."""

    def close(self) -> None:
        """Nothing is open."""


class TensorBoardTracker:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """Offline unless WANDB_MODE says online and the server answers."""

    def __init__(self, name: str, config: dict[str, Any], folder: Path, say: Callable[[str], None]) -> None:
        import wandb

        mode = os.environ.get("WANDB_MODE", "offline")
        common: dict[str, Any] = {"project": "deepspec", "name": name, "config": config, "dir": str(folder)}
        settings = wandb.Settings(init_timeout=ONLINE_SECONDS, silent=True)
        self._run: Any = None
        if mode == "online" and _answers(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")):
            try:
                self._run = wandb.init(**common, mode="online", settings=settings)
            except wandb.errors.Error as error:
                say(f"wandb could not start online ({error}); it records offline.")
        elif mode == "online":
            say(f"wandb's server did not answer within {ONLINE_SECONDS} s; it records offline.")
        if self._run is None:
            self._run = wandb.init(
                **common, mode="disabled" if mode == "disabled" else "offline", settings=settings
            )
            if mode != "disabled":
                say(f"wandb records offline; upload with: wandb sync {folder / 'wandb'}/offline-run-*")

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


class TrackioTracker:
    def __init__(self, name: str, config: dict[str, Any]) -> None:
        import trackio

        self._run = trackio.init(project="deepspec", name=name, config=config)

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


def check_installed(kind: Tracker) -> None:
    """`UserError` if the tracker's package is not there."""
    if kind is Tracker.none:
        return
    try:
        there = find_spec(kind.value) is not None
    except ValueError:  # what find_spec says of a module that was put out of reach
        there = False
    if not there:
        raise UserError(f"train.tracker={kind.value} needs a package more: pip install {kind.value}")


def new_tracker(
    kind: Tracker, name: str, config: dict[str, Any], folder: Path, say: Callable[[str], None] = print
) -> RunTracker:
    """Open the tracker of a run. name: the experiment's; folder: the run's; say: prints a line."""
    check_installed(kind)
    if kind is Tracker.tensorboard:
        return TensorBoardTracker(folder / "tensorboard")
    if kind is Tracker.wandb:
        return WandbTracker(name, config, folder, say)
    if kind is Tracker.trackio:
        return TrackioTracker(name, config)
    return NoTracker()


def scalars(record: dict[str, Any], prefix: str) -> dict[str, float]:
    """A history record as flat names and numbers: lists get `_1`, `_2`, …; what is null is left out."""
    found: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            found |= scalars(value, f"{prefix}/{name}")
        elif isinstance(value, list):
            found |= scalars({f"{name}_{k}": one for k, one in enumerate(value, 1)}, prefix)
        elif isinstance(value, int | float) and name != "step":
            found[f"{prefix}/{name}"] = value
    return found


def _answers(url: str) -> bool:
    """Whether a server is there: wandb's own online start can hang for minutes without a network."""
    try:
        with urllib.request.urlopen(url, timeout=ONLINE_SECONDS):
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False
