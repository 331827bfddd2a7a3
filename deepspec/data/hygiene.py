"""Cleaning on the way in: lengths, languages, secrets, near-duplicates, and what evaluation asks.

Near-duplicates: MinHash with banding (A. Broder, "On the resemblance and containment of documents", 1997);
signatures by datasketch, candidates by the store's index, so that memory does not grow with the rows.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from deepspec.config.schema import DataConfig
from deepspec.data.conversation import BadRow, Conversation, Tally
from deepspec.data.languages import UNKNOWN, Languages
from deepspec.data.prompts import read_prompts
from deepspec.data.store import Store
from deepspec.errors import UserError

SHINGLE = 5  # characters
PERMUTATIONS = 128
WORD = re.compile(r"\w+")

SECRETS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----", re.S), "[SECRET]"),
    (re.compile(r"\b(?:sk|pk|rk)[-_](?:[A-Za-z0-9]+[-_])*[A-Za-z0-9]{16,}\b"), "[SECRET]"),
    (
        re.compile(r"\bgh[opsru]_[A-Za-z0-9]{30,}\b|\bxox[abprs]-[A-Za-z0-9-]{10,}|\bhf_[A-Za-z0-9]{30,}\b"),
        "[SECRET]",
    ),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bAIza[A-Za-z0-9_-]{35}"), "[SECRET]"),
    (re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+"), "[SECRET]"),
    (re.compile(r"[A-Za-z0-9._%+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,}"), "[EMAIL]"),
)
CARD = re.compile(r"\b\d(?:[ -]?\d){12,18}\b")


Look = dict[str, Any]
"""What is to be seen of one conversation: `reason` to leave it out, whether its language is `uncertain`, `overlaps`
with evaluation prompts, the `signature` of its text in hexadecimal digits."""


class Hygiene:
    """Takes conversations one by one and lets the clean ones into the store.

    read: how many came. overlaps: one record for each that shares words with an evaluation prompt.
    """

    def __init__(self, settings: DataConfig, store: Store, tally: Tally) -> None:
        self.settings = settings
        self.store = store
        self.tally = tally
        self.read = 0
        self.overlaps: list[dict[str, Any]] = []
        threshold = settings.near_duplicates
        self.is_near = NearDuplicates(store, threshold) if threshold is not None else None
        self.languages = Languages(settings.languages) if settings.languages else None
        self.tested = Tested(settings.decontaminate, settings.decontaminate_words)

    def add(self, conversation: Conversation, redactions: int, look: Look) -> None:
        """Into the store, or counted. redactions, look: of `redacted` and `look`."""
        self.read += 1
        self.tally.notes["secrets redacted"] += redactions
        self.tally.notes[UNKNOWN] += look["uncertain"]
        place = {"source": conversation.source, "line": conversation.line, "id": conversation.id}
        self.overlaps += [{**place, **found} for found in look["overlaps"]]
        reason = look["reason"]
        if self.is_near is not None and look["signature"] and self.is_near(look["signature"]):
            reason = "near-duplicate"
        if reason is not None:
            self.tally.drop_conversation(conversation, reason)
            return
        try:
            self.store.add(conversation)
        except BadRow as error:
            self.tally.bad(error, conversation.source, conversation.line, conversation.id)

    def look(self, conversation: Conversation) -> Look:
        """What takes time and needs no other conversation: too short or long, of which language, like an
        evaluation prompt, its signature."""
        found: Look = {"reason": None, "uncertain": 0, "overlaps": [], "signature": None}
        if conversation.row is not None:
            return found
        text = conversation.user_text()
        if len(text) < self.settings.min_characters:
            return {**found, "reason": "shorter than data.min_characters"}
        if self.settings.max_characters is not None and len(text) > self.settings.max_characters:
            return {**found, "reason": "longer than data.max_characters"}
        if self.languages is not None:
            language = self.languages.of(text)
            found["uncertain"] = int(language is None)  # such a text stays, and is counted
            if language is not None and language not in self.languages.wanted:
                return {**found, "reason": f"language {language}, not of data.languages"}
        overlap = self.tested.overlap(conversation)
        if overlap is not None:
            return {**found, "reason": "shares words with an evaluation prompt", "overlaps": [overlap]}
        if self.is_near is not None:
            found["signature"] = signature_of(text).tobytes().hex()
        return found

    def redacted(self, conversation: Conversation) -> tuple[Conversation, int]:
        """Without secrets, where that is asked for, and how many there were."""
        if not self.settings.redact:
            return conversation, 0
        messages, total = [], 0
        for message in conversation.messages:
            text, count = redact(message["content"])
            total += count
            messages.append({**message, "content": text})
        return replace(conversation, messages=tuple(messages)), total


def redact(text: str) -> tuple[str, int]:
    """The text without what looks like a secret, and how many such there were."""
    total = 0
    for pattern, stand_in in SECRETS:
        text, count = pattern.subn(stand_in, text)
        total += count
    cards = [match for match in CARD.finditer(text) if _is_card(match[0])]
    for match in reversed(cards):
        text = f"{text[: match.start()]}[NUMBER]{text[match.end() :]}"
    return text, total + len(cards)


def _is_card(text: str) -> bool:
    """Luhn's check digit: most numbers that are not of a payment card fail it."""
    digits = [int(c) for c in text if c.isdigit()][::-1]
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[1::2]]
    return (sum(digits[::2]) + sum(doubled)) % 10 == 0


class NearDuplicates:
    """Says whether a text, by its signature, resembles one that it let pass before: estimated Jaccard similarity
    of their character 5-grams above `threshold`. Of texts that resemble each other the first is kept."""

    def __init__(self, store: Store, threshold: float) -> None:
        try:
            from datasketch import MinHashLSH
        except ImportError as error:
            raise UserError("data.near_duplicates needs a package more: pip install datasketch") from error
        self.store = store
        self.threshold = threshold
        bands = MinHashLSH(threshold=min(max(threshold, 0.05), 0.99), num_perm=PERMUTATIONS)
        self.bands, self.rows = int(bands.b), int(bands.r)

    def __call__(self, signature: str) -> bool:
        values = np.frombuffer(bytes.fromhex(signature), dtype=np.uint64)
        names = [
            band.to_bytes(2, "big") + values[band * self.rows : (band + 1) * self.rows].tobytes()
            for band in range(self.bands)
        ]
        for name in names:
            for (other,) in self.store.rows("SELECT signature FROM band WHERE name = ?", (name,)):
                if float(np.mean(np.frombuffer(other, dtype=values.dtype) == values)) > self.threshold:
                    return True
        for name in names:
            self.store.run("INSERT INTO band VALUES (?, ?)", (name, values.tobytes()))
        return False


def signature_of(text: str) -> Any:
    """uint64[PERMUTATIONS]: MinHash of the text's character 5-grams."""
    from datasketch import MinHash

    words = " ".join(text.lower().split())
    shingles = {words[at : at + SHINGLE].encode() for at in range(max(1, len(words) - SHINGLE + 1))}
    signature = MinHash(num_perm=PERMUTATIONS, seed=1)
    signature.update_batch(sorted(shingles))
    return signature.hashvalues.astype(np.uint64)


class Tested:
    """The evaluation prompts, by their runs of `count` words (lower case, without punctuation).

    A prompt of fewer words is met only by a message of just these.
    """

    def __init__(self, files: list[str], count: int) -> None:
        self.count = count
        self.runs: dict[tuple[str, ...], str] = {}
        for name in files:
            for conversation in read_prompts(Path(name), Tally(strict=True)):
                for message in conversation.messages:
                    if message["role"] == "user":
                        self._learn(words_of(message["content"]), conversation.place)
            if not self.runs:
                raise UserError(f"{name} has no words to compare with (data.decontaminate).")

    def _learn(self, words: list[str], place: str) -> None:
        for run in _runs(words, self.count):
            self.runs.setdefault(run, place)

    def overlap(self, conversation: Conversation) -> dict[str, Any] | None:
        """What a conversation shares: the evaluation prompt's place and the words; None if nothing."""
        if not self.runs:
            return None
        for message in conversation.messages:
            if message["role"] in ("user", "assistant"):
                for run in _runs(words_of(message["content"]), self.count):
                    place = self.runs.get(run)
                    if place is not None:
                        return {"evaluation": place, "words": " ".join(run)}
        return None


def words_of(text: str) -> list[str]:
    return WORD.findall(text.lower())


def _runs(words: list[str], count: int) -> Iterator[tuple[str, ...]]:
    if 0 < len(words) < count:
        yield tuple(words)
    for at in range(len(words) - count + 1):
        yield tuple(words[at : at + count])
