"""Augmentations as configured, applied to the training side: every changed prompt is a row of its own."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from deepspec.data.augment.back_translation import BackTranslation
from deepspec.data.augment.contract import Chat, Rewrite
from deepspec.data.augment.paraphrase import Paraphrase
from deepspec.data.augment.rename import Rename
from deepspec.data.augment.rules import Rules
from deepspec.data.augment.synonyms import Synonyms
from deepspec.data.augment.system import System
from deepspec.data.augment.truncate import Truncate
from deepspec.data.augment.typos import Typos
from deepspec.data.conversation import Conversation, Message, hash_order
from deepspec.data.store import Store
from deepspec.errors import UserError

KINDS: dict[str, Any] = {
    kind.name: kind
    for kind in (Typos, Synonyms, Truncate, System, Rename, Rules, Paraphrase, BackTranslation)
}
OWN = ("name", "probability", "seed")
CHATS = 64  # conversations whose prompts are asked about at a time

Fits = Callable[[Conversation], bool]


@dataclass(frozen=True)
class Augmentation:
    """A transform, and how likely it is to be applied to each training conversation."""

    transform: Rewrite | Paraphrase | BackTranslation
    probability: float
    seed: int

    def draw(self, conversation: Conversation) -> random.Random | None:
        """This conversation's source of chance; None: not chosen. A function of content and seed alone."""
        draw = random.Random(hash_order(self.seed, f"{self.transform.name} {conversation.key}"))
        return draw if draw.random() < self.probability else None


def read_augmentations(entries: Sequence[Mapping[str, Any]]) -> list[Augmentation]:
    """The configuration's list as transforms; `UserError` names the entry that cannot be used."""
    found = []
    for index, entry in enumerate(entries):
        where = f"data.augment[{index}]"
        kind = KINDS.get(str(entry.get("name")))
        if kind is None:
            raise UserError(f"{where}: name is one of {', '.join(KINDS)}, not {entry.get('name')!r}.")
        options = {str(key): value for key, value in entry.items() if key not in OWN}
        known = [field.name for field in fields(kind)]
        for key, value in options.items():
            if key not in known:
                raise UserError(
                    f"{where}: {kind.name} has no option {key!r}, only {', '.join([*OWN, *known])}."
                )
            default = next(field.default for field in fields(kind) if field.name == key)
            if isinstance(default, float | int) and (
                isinstance(value, bool) or not isinstance(value, float | int)
            ):
                raise UserError(f"{where}: {key} is a number, not {value!r}.")
        probability, seed = entry.get("probability", 1.0), entry.get("seed", 0)
        if not isinstance(probability, float | int) or not 0 <= probability <= 1:
            raise UserError(f"{where}: probability is between 0 and 1, not {probability!r}.")
        if not isinstance(seed, int):
            raise UserError(f"{where}: seed is a whole number, not {seed!r}.")
        found.append(Augmentation(kind(**options), float(probability), seed))
    return found


def augment(
    store: Store, augmentations: Sequence[Augmentation], fits: Fits, chat: Chat, notes: Counter[str]
) -> None:
    """Add the changed prompts of each augmentation to the training side, beside the originals.

    fits: whether a new conversation can be used and is none that is there already. chat: the target's ability
    to answer single questions. Counted in `notes`: those added, those unchanged, those of no use.
    """
    for augmentation in augmentations:
        name = augmentation.transform.name
        pending: list[tuple[Conversation, random.Random]] = []
        originals = "side = 'train' AND NOT ready AND body NOT LIKE '%\"changed_by\"%'"
        for _, conversation in store.conversations(originals, "key"):
            draw = augmentation.draw(conversation)
            if draw is not None:
                pending.append((conversation, draw))
            if len(pending) == CHATS:
                _add(pending, augmentation, store, fits, chat, notes)
                pending = []
        _add(pending, augmentation, store, fits, chat, notes)
        notes.setdefault(f"prompts added by {name}", 0)


def _add(
    pending: Sequence[tuple[Conversation, random.Random]],
    augmentation: Augmentation,
    store: Store,
    fits: Fits,
    chat: Chat,
    notes: Counter[str],
) -> None:
    transform = augmentation.transform
    if isinstance(transform, Paraphrase | BackTranslation):
        changed = _asked([item for item, _ in pending], transform, augmentation.seed, chat)
    else:
        changed = [transform(item.messages, draw) for item, draw in pending]
    for (item, _), messages in zip(pending, changed, strict=True):
        if messages is None:
            notes[f"prompts that {transform.name} leaves as they are"] += 1
            continue
        new = replace(
            item,
            messages=tuple(messages),
            id=f"{item.id}+{transform.name}{augmentation.seed or ''}",
            changed_by=(transform.name,),
        )
        if fits(new):
            store.add(new)
            notes[f"prompts added by {transform.name}"] += 1
        else:
            notes[f"prompts of {transform.name} too long or there already"] += 1


def _asked(
    conversations: Sequence[Conversation], transform: Paraphrase | BackTranslation, seed: int, chat: Chat
) -> list[list[Message] | None]:
    """Every question of the user through the transform's questions; None where an answer is missing or empty."""
    places = [
        (number, index)
        for number, item in enumerate(conversations)
        for index, message in enumerate(item.messages)
        if message["role"] == "user"
    ]
    texts: list[str | None] = [conversations[number].messages[index]["content"] for number, index in places]
    for step, question in enumerate(transform.questions):
        live = [at for at, text in enumerate(texts) if text]
        asked = [question.replace("{text}", str(texts[at])) for at in live]
        seeds = [hash_order(seed, f"{transform.name} {step} {text}") for text in asked]
        answers = chat(asked, seeds)
        for at, answer in zip(live, answers, strict=True):
            texts[at] = answer.strip() if answer else None
    found: list[list[Message] | None] = [list(item.messages) for item in conversations]
    for (number, index), text in zip(places, texts, strict=True):
        messages = found[number]
        if messages is not None and text:
            messages[index] = {**messages[index], "content": text}
        else:
            found[number] = None
    return [new if new != list(old.messages) else None for new, old in zip(found, conversations, strict=True)]
