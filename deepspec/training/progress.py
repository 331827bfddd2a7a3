"""The progress bar of training: loss, accuracy by step, offline τ, tokens/s, remaining time."""

import sys
from typing import Any

from tqdm import tqdm

LOGFILE_SECONDS = 15.0  # between lines where the bar cannot overwrite itself


class Progress:
    """A bar over optimiser steps on one process, silent on the others (`shown` False)."""

    def __init__(self, steps: int, done: int, shown: bool) -> None:
        self._bar = tqdm(
            total=steps,
            initial=done,
            desc="train",
            unit="step",
            disable=not shown,
            dynamic_ncols=True,
            mininterval=0.2 if sys.stderr.isatty() else LOGFILE_SECONDS,
        )
        self._fields: dict[str, str] = {}

    def advance(self) -> None:
        self._bar.update()

    def show(self, record: dict[str, Any]) -> None:
        """Take over what a history record knows."""
        if "tau_reason" in record:
            return
        if "spike" in record:
            spike = record["spike"]
            rows = ", ".join(map(str, spike["rows"][:8])) + (", …" if len(spike["rows"]) > 8 else "")
            self.say(
                f"Step {record['step']}: loss {spike['loss']:.3g}, expected {spike['expected']:.3g}; rows {rows}"
            )
            return
        if "tau" in record:
            self._fields["τ"] = _number(record["tau"])
        else:
            accuracy = " ".join(_number(value) for value in record["accuracy"])
            self._fields |= {"loss": _number(record["loss"]), "accuracy": accuracy}
            self._fields["tokens/s"] = f"{record['tokens_per_second']:.0f}"
        self._bar.set_postfix(self._fields, refresh=False)

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        if not self._bar.disable:
            self._bar.write(line)

    def close(self) -> None:
        self._bar.close()


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
