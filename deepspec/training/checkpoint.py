"""Checkpoints of a training run: `checkpoints/step-N`, each written whole or not at all.

A folder holds the draft (`draft/`, as `save_pretrained` writes it), `state.pt` (optimiser, scaler, random
states of all processes) and a manifest with the counters and the recipe, i.e. everything that decides the
result. The learning rate and the order of rows are functions of the step and need no state.
"""

import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import broadcast_object_list, gather_object
from safetensors import SafetensorError
from safetensors.torch import load_model
from transformers import PreTrainedModel
from transformers.utils import logging

from deepspec.artifacts import MANIFEST, damage, differences, new_artifact, read_manifest, without_name
from deepspec.errors import UserError

DRAFT, WEIGHTS, STATE = "draft", "model.safetensors", "state.pt"
NAME = re.compile(r"step-(\d+)")


@dataclass
class Counters:
    """How far the run is. skipped: steps whose loss was not finite; meter: what the next log has seen so far;
    evaluation: the newest; logged_at: seconds of training at the last log."""

    step: int = 0
    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0
    logged_at: float = 0.0
    skipped: int = 0
    skipped_in_a_row: int = 0
    evaluation: dict[str, Any] | None = None
    meter: dict[str, Any] = field(default_factory=dict)


@dataclass
class Checkpoints:
    """The checkpoints of one run.

    recipe: what decides the result, compared on resuming. restart_hint: the command that starts over. say:
    prints a line.
    """

    folder: Path
    recipe: dict[str, Any]
    keep_last: int
    accelerator: Accelerator
    restart_hint: str
    say: Callable[[str], None]

    def save(self, draft: PreTrainedModel, optimiser: AcceleratedOptimizer, counters: Counters) -> None:
        """Write `step-N` (process 0) and remove what is older than the `keep_last` newest."""
        random = gather_object([_random_state()])
        if self.accelerator.is_main_process:
            manifest: dict[str, Any] = {"counters": asdict(counters), "recipe": self.recipe}
            with new_artifact(self.folder / f"step-{counters.step}", manifest) as folder:
                save_draft(draft, folder / DRAFT)
                scaler = self.accelerator.scaler
                state = {
                    "optimiser": optimiser.state_dict(),
                    "scaler": scaler.state_dict() if scaler is not None else None,
                    "random": random,
                }
                torch.save(state, folder / STATE)
                manifest["bytes"] = _sizes(folder)
            for old in self.all()[max(1, self.keep_last) :]:
                shutil.rmtree(old)
        self.accelerator.wait_for_everyone()

    def all(self) -> list[Path]:
        """Newest first."""
        found = [path for path in self.folder.glob("step-*") if NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)

    def resume(self, draft: PreTrainedModel, optimiser: AcceleratedOptimizer) -> Counters:
        """Load the newest whole checkpoint into draft and optimiser; fresh counters if there is none."""
        for path in self._shared(self.all):
            manifest = self._shared(partial(self._sound, path))
            if manifest is None:
                continue
            check_recipe(manifest["recipe"], self.recipe, path, self.restart_hint)
            try:
                _load(path, draft, optimiser, self.accelerator)
            except (OSError, RuntimeError, ValueError, UnpicklingError, SafetensorError) as error:
                # torch's own words on a file it will not unpickle advise to unpickle it all the same
                why = (
                    f"{STATE} is not a training's state" if isinstance(error, UnpicklingError) else str(error)
                )
                raise UserError(
                    f"{path} is damaged ({' '.join(why.split())[:200]}). Remove that folder and run again: "
                    "training goes on from the one before it."
                ) from error
            counters = Counters(**manifest["counters"])
            self.say(f"Resuming from {path} (step {counters.step}).")
            return counters
        return Counters()

    def remove_all(self) -> None:
        """Start over (process 0)."""
        if self.accelerator.is_main_process:
            for path in self.all():
                shutil.rmtree(path)
        self.accelerator.wait_for_everyone()

    def remove_leftovers(self) -> None:
        """What a killed process was in the middle of writing (process 0)."""
        if self.accelerator.is_main_process:
            for pattern in (".step-*.partial-*", ".step-*.old-*"):
                for path in self.folder.glob(pattern):
                    shutil.rmtree(path)
        self.accelerator.wait_for_everyone()

    def _shared(self, of_main: Callable[[], Any]) -> Any:
        """Process 0's answer, for all: a shared file system may show others something older."""
        answer = [of_main() if self.accelerator.is_main_process else None]
        return broadcast_object_list(answer)[0] if self.accelerator.num_processes > 1 else answer[0]

    def _sound(self, path: Path) -> dict[str, Any] | None:
        try:
            manifest = read_manifest(path, "train")
        except UserError:
            manifest = {}
        wrong = damage(path, manifest)
        if manifest.get("bytes") == _sizes(path) and {"recipe", "counters"} <= manifest.keys() and not wrong:
            return manifest
        self.say(f"{path} is not whole{f' ({wrong})' if wrong else ''}; trying the one before it.")
        return None


def save_draft(draft: PreTrainedModel, folder: Path) -> None:
    """`save_pretrained` without its progress bar, which would break up the training's."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        draft.save_pretrained(folder)
    finally:
        if shown:
            logging.enable_progress_bar()


def check_recipe(before: dict[str, Any], now: dict[str, Any], path: Path, restart_hint: str) -> None:
    """Raise `UserError` naming what differs between a checkpoint's recipe and this run's."""
    if difference := recipe_difference(before, now):
        raise UserError(
            f"{path} is of another recipe: {difference}. Set it back, choose another folder (out=...), or "
            f"start over: {restart_hint}"
        )


def recipe_difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """What differs, in words; empty if nothing does. What a target is called decides nothing."""
    old, new = ({**one, "target": without_name(one.get("target", {}))} for one in (before, now))
    return differences(old, new)


def _load(
    path: Path, draft: PreTrainedModel, optimiser: AcceleratedOptimizer, accelerator: Accelerator
) -> None:
    load_model(draft, path / DRAFT / WEIGHTS)
    state = torch.load(path / STATE, map_location="cpu", weights_only=True)
    optimiser.load_state_dict(state["optimiser"])
    if state["scaler"] is not None and accelerator.scaler is not None:
        accelerator.scaler.load_state_dict(state["scaler"])
    if accelerator.process_index < len(state["random"]):
        _set_random_state(state["random"][accelerator.process_index])


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _sizes(folder: Path) -> dict[str, int]:
    files = (path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in sorted(files)}
