"""Other words by rule, without any model: openings of requests and contractions."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from deepspec.data.augment.contract import each_question, in_prose
from deepspec.data.conversation import Message

CONTRACTIONS = (
    ("do not", "don't"),
    ("does not", "doesn't"),
    ("is not", "isn't"),
    ("cannot", "can't"),
    ("I am", "I'm"),
    ("I have", "I've"),
    ("what is", "what's"),
    ("it is", "it's"),
    ("that is", "that's"),
)
VERBS = (
    "explain|describe|write|list|give|show|tell|summarise|summarize|translate|compare|suggest|name|find|create|make|"
    "complete|document|convert|rewrite|fix|sort|design|plan|outline|help"
)
ORDER = re.compile(rf"^(?:please )?({VERBS})\b", re.I)
POLITE = re.compile(rf"^(?:can|could|would|will) you (?:please )?({VERBS})\b(.*?)\?", re.I | re.S)
OPENINGS = ("Please {}", "Can you {}", "Could you {}", "I need you to {}", "{}")


@dataclass(frozen=True)
class Rules:
    """Each rule that applies does so with probability `rate`."""

    name: ClassVar[str] = "rules"
    rate: float = 0.7

    def __call__(self, messages: Sequence[Message], draw: random.Random) -> list[Message] | None:
        def change(text: str) -> str:
            return self._opening(in_prose(text, lambda piece: self._contracted(piece, draw)), draw)

        return each_question(messages, change)

    def _contracted(self, text: str, draw: random.Random) -> str:
        for long, short in CONTRACTIONS:
            old, new = (long, short) if draw.random() < 0.5 else (short, long)
            if draw.random() < self.rate:
                text = _put(old, new, text)
        return text

    def _opening(self, text: str, draw: random.Random) -> str:
        if draw.random() >= self.rate:
            return text
        text = POLITE.sub(lambda found: f"{found[1]}{found[2]}.", text, count=1)
        order = ORDER.match(text)
        if order is None:
            return text
        opening = draw.choice(OPENINGS)
        rest = text[order.start(1) :]
        if opening.startswith(("Can", "Could")):
            head, dot, tail = rest.partition(".")
            rest = f"{head}?{tail}" if dot and "\n" not in head else rest
        text = opening.format(rest[0].lower() + rest[1:])
        return text[0].upper() + text[1:]


def _put(old: str, new: str, text: str) -> str:
    """The text with `new` for every `old`, capitals kept."""

    def like(found: re.Match[str]) -> str:
        return new[0].upper() + new[1:] if found[0][0].isupper() else new

    return re.sub(rf"\b{re.escape(old)}\b", like, text, flags=re.I)
