"""Into another language and back (R. Sennrich et al., "Improving neural machine translation models with
monolingual data", 2016), by the target or the servers that answer for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

TRANSLATE = (
    "Translate the following text into {language}. Leave code as it is and do not answer it. "
    "Reply with the translation only.\n\n"
)


@dataclass(frozen=True)
class BackTranslation:
    """via: the language between; language: that of the prompts."""

    name: ClassVar[str] = "back_translation"
    via: str = "German"
    language: str = "English"

    @property
    def questions(self) -> Sequence[str]:
        return [TRANSLATE.format(language=language) + "{text}" for language in (self.via, self.language)]
