"""What is evaluated, and what the result file says about where it comes from."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from deepspec.drafts.contract import Drafter
from deepspec.evaluation.tasks.item import Check, Source
from deepspec.evaluation.turns import Following
from deepspec.target import Target


@dataclass
class Subject:
    """What is evaluated. `load_as`: the same target's weights in another dtype, for the baselines. `following`: the
    prompt of a conversation's next turn."""

    target: Target
    draft: Drafter
    load_as: Callable[[str], Target]
    following: Following = lambda prompt, answer: None

    @property
    def dtype(self) -> str:
        """The target's, as in the configuration."""
        return str(self.target.dtype).removeprefix("torch.")


@dataclass
class Papers:
    """What the result file says about where everything comes from."""

    command: str
    fingerprint: str
    settings: dict[str, Any]
    draft: dict[str, Any]
    training: list[dict[str, Any]]
    prompt_source: str
    excluded: dict[str, int]
    warnings: list[str]
    sources: list[Source] = field(default_factory=list)
    longest_row: int | None = None  # tokens of the longest row the draft was trained on
    load_draft_seconds: float | None = None
    checks: dict[str, Check] = field(default_factory=dict)  # of prompts by id: how an answer is judged
