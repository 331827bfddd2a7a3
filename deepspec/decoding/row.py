"""One request's progress: its tokens, where its answer ends, and the record of its rounds."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepspec.decoding.request import Request, Result, Round
from deepspec.decoding.scheduler import Past

Detokenise = Callable[[list[int]], str]

SLACK = 16  # tokens of a stop string's window beyond one a byte: some tokens have no text


@dataclass
class Row:
    """tokens[-1] is the pending token, known but not yet in the target's state.

    limit: longest answer, max_new_tokens or what the context still holds. detokenise: needed where the request
    has stop strings. seen: [V] bool, the tokens of prompt and answer, where it has a repetition penalty. past: its
    rounds as the scheduler sees them, where there is one.
    """

    request: Request
    limit: int
    detokenise: Detokenise | None = None
    seen: Tensor | None = None
    past: Past | None = None
    started: float = field(default_factory=time.perf_counter)
    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    prefill_seconds: float = 0.0
    finish: str | None = None  # None: it goes on
    error: str = ""

    @property
    def remaining(self) -> int:
        return self.limit - len(self.tokens)

    def commit(self, tokens: Sequence[int]) -> list[int]:
        """Take in a round's tokens up to an end token, a stop string or the limit; returns those that were kept.

        Each token is judged by the text before it alone, as in plain decoding, whatever round it came in.
        """
        before = len(self.tokens)
        for token in tokens:
            if self.finish is not None:
                break
            self.tokens.append(token)
            self.finish = self._ends()
        kept = self.tokens[before:]
        if self.seen is not None:
            self.seen[torch.tensor(kept).to(self.seen.device, non_blocking=True)] = True
        return kept

    def _ends(self) -> str | None:
        if self.tokens[-1] in self.request.eos:
            return "eos"
        if self.request.stop and self._stopped():
            return "stop"
        return "length" if self.remaining <= 0 else None

    def _stopped(self) -> bool:
        """Whether the answer's end contains a stop string. Only a window is read, or a long answer would be
        decoded as often as it has tokens; what lies before it has been judged already."""
        assert self.detokenise is not None
        window = max(len(text.encode()) for text in self.request.stop) + SLACK
        text = self.detokenise(self.tokens[-window:])
        return any(stop in text for stop in self.request.stop)

    def fail(self, message: str) -> None:
        """End this request, and no other."""
        self.finish, self.error = "error", message

    def result(self) -> Result:
        seconds = time.perf_counter() - self.started - self.prefill_seconds
        return Result(
            self.request.id,
            self.tokens,
            self.finish or "",
            self.prefill_seconds,
            seconds,
            self.rounds,
            self.error,
        )
