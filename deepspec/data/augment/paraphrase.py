"""Other words by the target itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Paraphrase:
    """question: what the target is asked; `{text}` stands for the prompt."""

    name: ClassVar[str] = "paraphrase"
    question: str = (
        "Rewrite the following request in other words. Keep its meaning, its language and all its details, and "
        "do not answer it. Reply with the rewritten request only.\n\n{text}"
    )

    @property
    def questions(self) -> Sequence[str]:
        return [self.question]
