"""What a tuning came to, as `tuning.json` has it."""

from dataclasses import dataclass, field
from typing import Any

from deepspec.evaluation.result import Machine, Metric


@dataclass
class Tried:
    """A candidate. predicted: speedup over plain at this batch size by the recorded run. groups: of requests that it
    decoded before it fell out; the speed is over these alone, and so only roughly comparable with another's."""

    words: str
    settings: dict[str, Any]
    predicted: float | None
    tokens_per_second: float
    groups: int
    left_out: str | None = None


@dataclass
class Tuned:
    """gain: of the chosen settings over the default, confirmed on prompts of its own; over_plain likewise.

    worth: whether the gain's interval lies above 1. settings: what to decode with: the chosen ones if they are worth
    it, else the default.
    """

    name: str
    command: str
    created: str
    recorded: str  # the result file
    fingerprint: str  # the draft's
    target: str
    batch_size: int
    temperature: float
    max_new_tokens: int
    default: dict[str, Any]
    chosen: dict[str, Any]
    chosen_words: str
    settings: dict[str, Any]
    worth: bool
    gain: Metric
    over_plain: Metric
    default_over_plain: Metric
    groups: int  # of `batch_size` requests in the confirming run
    equal: int  # of `answers`: greedy answers of the chosen settings that are plain decoding's
    answers: int
    tried: list[Tried]
    machine: Machine
    disturbances: list[str] = field(default_factory=list)
