"""Slips of the finger: letters swapped, left out, doubled, or their neighbour on the keyboard."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from deepspec.data.augment.contract import each_question, in_prose
from deepspec.data.conversation import Message

WORD = re.compile(r"[A-Za-z]{4,}")
KEYBOARD = ("qwertyuiop", "asdfghjkl", "zxcvbnm")


@dataclass(frozen=True)
class Typos:
    """rate: the share of words (of four letters and more, outside of code) that get one slip."""

    name: ClassVar[str] = "typos"
    rate: float = 0.08

    def __call__(self, messages: Sequence[Message], draw: random.Random) -> list[Message] | None:
        def slip(match: re.Match[str]) -> str:
            return _slip(match[0], draw) if draw.random() < self.rate else match[0]

        return each_question(messages, lambda text: in_prose(text, lambda piece: WORD.sub(slip, piece)))


def _slip(word: str, draw: random.Random) -> str:
    at = draw.randrange(1, len(word) - 1)
    kind = draw.choice(("swap", "drop", "double", "near"))
    if kind == "swap":
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    if kind == "drop":
        return word[:at] + word[at + 1 :]
    if kind == "double":
        return word[: at + 1] + word[at:]
    row = next((keys for keys in KEYBOARD if word[at].lower() in keys), "")
    place = row.find(word[at].lower())
    near = [row[spot] for spot in (place - 1, place + 1) if row and 0 <= spot < len(row)]
    return word[:at] + (draw.choice(near) if near else word[at]) + word[at + 1 :]
