"""A question broken off: the target goes on from wherever it stops."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from deepspec.data.conversation import Message


@dataclass(frozen=True)
class Truncate:
    """The last question keeps between `shortest` and `longest` of its words, at least `words` of them."""

    name: ClassVar[str] = "truncate"
    shortest: float = 0.4
    longest: float = 0.9
    words: int = 4

    def __call__(self, messages: Sequence[Message], draw: random.Random) -> list[Message] | None:
        last = max(index for index, message in enumerate(messages) if message["role"] == "user")
        text = messages[last]["content"].strip()
        starts = [at for at in range(1, len(text)) if text[at - 1].isspace() and not text[at].isspace()]
        keep = max(self.words, round(draw.uniform(self.shortest, self.longest) * (len(starts) + 1)))
        if keep > len(starts):
            return None
        return [*messages[:last], {**messages[last], "content": text[: starts[keep - 1]].rstrip()}]
