"""Checkpoints of a training run: `checkpoints/step-N`, each written whole or not at all.

A folder holds the draft (`draft/`, as `save_pretrained` writes it), the optimiser's states, the running mean of
the weights if there is one, the random states of all processes (safetensors, no pickles) and a manifest with
the counters and the recipe, i.e. everything that decides the result. The learning rate and the order of rows
are functions of the step and need no state. `best-N` is the draft that was best when evaluated at step N.
"""

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import broadcast_object_list, gather_object
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from deepspec.artifacts import MANIFEST, damage, differences, new_artifact, read_manifest, without_name
from deepspec.errors import UserError
from deepspec.training.averaging import Average
from deepspec.training.whole import restore_float32, restore_moments, whole_moments, whole_weights

DRAFT, WEIGHTS = "draft", "model.safetensors"
OPTIMISER, MEAN, RANDOM = "optimiser.safetensors", "mean.safetensors", "random.safetensors"
NAME = re.compile(r"(?:step|best)-(\d+)")


@dataclass
class Counters:
    """How far the run is. skipped: steps whose loss was not finite; meter: what the next log has seen so far;
    evaluation: the newest; best: the one whose draft is exported, with its step; worse: evaluations since then;
    logged_at: seconds of training at the last log; spikes: what the loss has been like; stopped: why training
    ended early."""

    step: int = 0
    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0
    logged_at: float = 0.0
    skipped: int = 0
    skipped_in_a_row: int = 0
    evaluation: dict[str, Any] | None = None
    best: dict[str, Any] | None = None
    worse: int = 0
    spikes: dict[str, float] = field(default_factory=dict)
    meter: dict[str, Any] = field(default_factory=dict)
    stopped: str | None = None


@dataclass
class Checkpoint:
    """A whole checkpoint on disk. The weights go into the draft before it is wrapped, the rest after."""

    path: Path
    manifest: dict[str, Any]

    @property
    def counters(self) -> Counters:
        return Counters(**self.manifest["counters"])

    def load_weights(self, draft: PreTrainedModel) -> None:
        with self._readable():
            load_model(draft, self.path / DRAFT / WEIGHTS)

    def load_states(
        self,
        draft: PreTrainedModel,
        optimiser: AcceleratedOptimizer,
        accelerator: Accelerator,
        average: Average | None = None,
    ) -> None:
        """Optimiser, running mean, scaler and this process's random state."""
        with self._readable():
            weights = load_file(self.path / DRAFT / WEIGHTS)
            restore_float32(draft, weights, accelerator)
            restore_moments(draft, optimiser, load_file(self.path / OPTIMISER), accelerator)
            if average is not None:
                average.restore(load_file(self.path / MEAN))
            if accelerator.scaler is not None and self.manifest.get("scaler") is not None:
                accelerator.scaler.load_state_dict(self.manifest["scaler"])
            _set_random_state(load_file(self.path / RANDOM), accelerator.process_index)

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as error:
            raise UserError(
                f"{self.path} is damaged ({error}). Remove that folder and run again: training goes on from "
                "the one before it."
            ) from error


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

    def save(
        self,
        draft: PreTrainedModel,
        optimiser: AcceleratedOptimizer,
        counters: Counters,
        average: Average | None = None,
    ) -> None:
        """Write `step-N` (process 0) and remove what is older than the `keep_last` newest."""
        random = gather_object([_random_state()])
        weights = whole_weights(draft, self.accelerator)
        moments = whole_moments(draft, optimiser, self.accelerator)
        mean = whole_weights(draft, self.accelerator, average.mean) if average is not None else None
        if self.accelerator.is_main_process:
            scaler = self.accelerator.scaler
            manifest: dict[str, Any] = {
                "counters": asdict(counters),
                "recipe": self.recipe,
                "scaler": scaler.state_dict() if scaler is not None else None,
            }
            with new_artifact(self.folder / f"step-{counters.step}", manifest) as folder:
                save_draft(draft, folder / DRAFT, weights)
                save_file(moments, folder / OPTIMISER)
                if mean is not None:
                    save_file(mean, folder / MEAN)
                every = {
                    f"{key}/{rank}": one for rank, state in enumerate(random) for key, one in state.items()
                }
                save_file(every, folder / RANDOM)
                manifest["bytes"] = _sizes(folder)
            self._prune(counters)
        self.accelerator.wait_for_everyone()

    def save_best(self, draft: PreTrainedModel, weights: dict[str, Tensor], counters: Counters) -> None:
        """Write `best-N`; process 0 alone, which has the whole `weights`."""
        manifest: dict[str, Any] = {"recipe": self.recipe, "best": counters.best}
        with new_artifact(self.folder / f"best-{counters.step}", manifest) as folder:
            save_draft(draft, folder / DRAFT, weights)
            manifest["bytes"] = _sizes(folder)

    def best_weights(self, step: int) -> dict[str, Tensor]:
        """What `save_best` wrote at `step`."""
        path = self.folder / f"best-{step}"
        if self._sound(path, {"best"}) is None:
            raise UserError(
                f"{path}, the best draft of this run, is damaged. Start over: {self.restart_hint}"
            )
        return load_file(path / DRAFT / WEIGHTS)

    def all(self, kind: str = "step") -> list[Path]:
        """Newest first."""
        found = [path for path in self.folder.glob(f"{kind}-*") if NAME.fullmatch(path.name)]
        return sorted(found, key=_number, reverse=True)

    def newest(self) -> Checkpoint | None:
        """The newest whole checkpoint, or None; the same for all processes."""
        for path in self._shared(self.all):
            manifest = self._shared(partial(self._sound, path, {"recipe", "counters"}))
            if manifest is not None:
                check_recipe(manifest["recipe"], self.recipe, path, self.restart_hint)
                self.say(f"Resuming from {path} (step {manifest['counters']['step']}).")
                return Checkpoint(path, manifest)
        return None

    def remove_all(self) -> None:
        """Start over (process 0)."""
        if self.accelerator.is_main_process:
            for path in (*self.all(), *self.all("best")):
                shutil.rmtree(path)
        self.accelerator.wait_for_everyone()

    def remove_leftovers(self) -> None:
        """What a killed process was in the middle of writing (process 0)."""
        if self.accelerator.is_main_process:
            for kind in ("step", "best"):
                for pattern in (f".{kind}-*.partial-*", f".{kind}-*.old-*"):
                    for path in self.folder.glob(pattern):
                        shutil.rmtree(path)
        self.accelerator.wait_for_everyone()

    def _prune(self, counters: Counters) -> None:
        """Older checkpoints, and best drafts that neither this run nor a kept checkpoint knows as its best."""
        kept = max(1, self.keep_last)
        for old in self.all()[kept:]:
            shutil.rmtree(old)
        best = {(counters.best or {}).get("step")}
        for path in self.all():
            known = self._sound(path, {"counters"}, quietly=True) or {}
            best.add(((known.get("counters") or {}).get("best") or {}).get("step"))
        for path in self.all("best"):
            if _number(path) not in best:
                shutil.rmtree(path)

    def _shared(self, of_main: Callable[[], Any]) -> Any:
        """Process 0's answer, for all: a shared file system may show others something older."""
        answer = [of_main() if self.accelerator.is_main_process else None]
        return broadcast_object_list(answer)[0] if self.accelerator.num_processes > 1 else answer[0]

    def _sound(self, path: Path, keys: set[str], quietly: bool = False) -> dict[str, Any] | None:
        try:
            manifest = read_manifest(path, "train")
        except UserError:
            manifest = {}
        wrong = damage(path, manifest)
        if manifest.get("bytes") == _sizes(path) and keys <= manifest.keys() and not wrong:
            return manifest
        if not quietly:
            self.say(f"{path} is not whole{f' ({wrong})' if wrong else ''}; trying the one before it.")
        return None


def save_draft(draft: PreTrainedModel, folder: Path, weights: dict[str, Tensor]) -> None:
    """`save_pretrained` of the whole weights, without its progress bar, which would break up the training's."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        draft.save_pretrained(folder, state_dict=weights, max_shard_size="1000GB")
    finally:
        if shown:
            logging.enable_progress_bar()


def _number(path: Path) -> int:
    return int(path.name.partition("-")[2])


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


def _random_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(saved: dict[str, Tensor], rank: int) -> None:
    """A process that was not there when the checkpoint was made keeps the state of its own seed."""
    if f"cpu/{rank}" in saved:
        torch.set_rng_state(saved[f"cpu/{rank}"])
    if f"cuda/{rank}" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved[f"cuda/{rank}"])


def _sizes(folder: Path) -> dict[str, int]:
    files = (path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in sorted(files)}
