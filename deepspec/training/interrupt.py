"""Ctrl-C and SIGTERM: finish the step, save, then leave."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

STDERR = 2
SAID = b"\nStopping after this step, which is then saved; Ctrl-C again stops at once and loses what is not saved.\n"


class Interrupt:
    """While entered, the first signal is only noted in `signal`; a second one acts as it would have.

    speaks: says on stderr that the first one was heard, since a step may take long.
    """

    def __init__(self, speaks: bool = True) -> None:
        self.signal: int | None = None
        self._speaks = speaks
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self._restore()
        if self._speaks:
            os.write(STDERR, SAID)  # print() must not be used in a handler: it may interrupt another print()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    @property
    def exit_code(self) -> int:
        """130 for Ctrl-C, 143 for SIGTERM, as shells have it; 143 where another process was told."""
        return 128 + (self.signal or signal.SIGTERM)
