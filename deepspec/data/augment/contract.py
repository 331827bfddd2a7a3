"""What a transform is."""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Protocol

from deepspec.data.conversation import Message

FENCE = re.compile(r"(```.*?(?:```|\Z))", re.S)

Chat = Callable[[list[str], list[int]], list[str | None]]
"""Single questions and a seed each → the target's answers; None where there is none."""


class Rewrite(Protocol):
    """A dataclass of its options. Called with a conversation's messages and a seeded source of chance; returns
    other messages of the same roles in the same order (a system prompt may be added), or None: no change.

    Transforms that ask the target have `questions` instead, one after the other: `{text}` is the prompt, then
    what the question before gave.
    """

    name: ClassVar[str]

    def __call__(self, messages: Sequence[Message], draw: random.Random) -> list[Message] | None: ...


def each_question(messages: Sequence[Message], change: Callable[[str], str]) -> list[Message] | None:
    """The messages with `change` applied to what the user says; None if nothing is other than before."""
    found = [
        {**message, "content": change(message["content"])} if message["role"] == "user" else message
        for message in messages
    ]
    return found if found != list(messages) else None


def prose(text: str) -> Iterator[tuple[bool, str]]:
    """The text in pieces, each with whether it is prose: fenced code is not."""
    for index, piece in enumerate(FENCE.split(text)):
        if piece:
            yield index % 2 == 0, piece


def in_prose(text: str, change: Callable[[str], str]) -> str:
    """`change` applied outside of fenced code."""
    return "".join(change(piece) if is_prose else piece for is_prose, piece in prose(text))
