"""The same question under another system prompt."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from deepspec.data.conversation import INSTRUCTIONS, Message

PROMPTS = (
    "You are a helpful assistant.",
    "Answer as briefly as you can.",
    "Explain step by step, for a beginner.",
    "You are an expert. Be precise and complete.",
    "Answer in a friendly tone.",
    "Use a list where it helps.",
)


@dataclass(frozen=True)
class System:
    """prompts: one of these takes the place of the system prompt, or is added where there is none."""

    name: ClassVar[str] = "system"
    prompts: Sequence[str] = PROMPTS

    def __call__(self, messages: Sequence[Message], draw: random.Random) -> list[Message] | None:
        rest = list(messages)
        while rest[0]["role"] in INSTRUCTIONS:
            rest.pop(0)
        found = [{"role": "system", "content": draw.choice(list(self.prompts))}, *rest]
        return found if found != list(messages) else None
