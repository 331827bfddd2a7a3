"""Words for words: a small table of everyday synonyms, in both directions."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from deepspec.data.augment.contract import each_question, in_prose
from deepspec.data.conversation import Message

GROUPS = (
    "answer reply; begin start; big large; brief short; build construct; choose select pick; common frequent; "
    "correct right; describe outline; difference distinction; difficult hard; easy simple; error mistake fault; "
    "example instance sample; explain clarify; fast quick rapid; find locate; finish complete; fix repair mend; "
    "good decent; help assist; idea notion; important essential significant; improve enhance; list enumerate; "
    "main principal; make create produce; method way approach; need require; often frequently; part piece section; "
    "problem issue; purpose aim goal; quickly rapidly; reason cause; result outcome; show demonstrate; "
    "small little; story tale; suggest propose recommend; summary overview; task job; test check; "
    "use employ utilise; useful helpful; various several; whole entire; write compose"
)


def _table() -> dict[str, list[str]]:
    table: dict[str, list[str]] = {}
    for group in GROUPS.split("; "):
        words = group.split()
        for word in words:
            table[word] = [other for other in words if other != word]
    return table


TABLE = _table()
WORD = re.compile(r"\b(?:" + "|".join(sorted(TABLE, key=len, reverse=True)) + r")\b", re.I)


@dataclass(frozen=True)
class Synonyms:
    """rate: the share of words of the table that are replaced, outside of code."""

    name: ClassVar[str] = "synonyms"
    rate: float = 0.5

    def __call__(self, messages: Sequence[Message], draw: random.Random) -> list[Message] | None:
        def other(match: re.Match[str]) -> str:
            word = match[0]
            if draw.random() >= self.rate:
                return word
            found = draw.choice(TABLE[word.lower()])
            return found.capitalize() if word[0].isupper() else found

        return each_question(messages, lambda text: in_prose(text, lambda piece: WORD.sub(other, piece)))
