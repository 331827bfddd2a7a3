"""Conversations that a target can read, and the documents they become."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from deepspec.config.schema import Supervise
from deepspec.data.answers import Regenerated
from deepspec.data.conversation import (
    BadRow,
    Conversation,
    Event,
    Events,
    Row,
    Tally,
    content_key,
    hash_order,
)
from deepspec.data.sharing import Parts
from deepspec.data.store import Document, Split, Store
from deepspec.data.template import ChatTemplate, Turn, given_turns, join_turns

LEAST_SUPERVISED = 2  # a draft starts at a token the assistant wrote and predicts another


@dataclass
class Reader:
    """Turns conversations into documents of at most `max_length` tokens, and counts what happens to them.

    numbers: documents cut at the end, turns whose text is tokenised in two pieces, answers cut by the
    generation limit, given answers for which the template has no end-of-turn token.
    """

    template: ChatTemplate
    max_length: int
    vocab_size: int
    tally: Tally
    supervise: Supervise = Supervise.all
    numbers: Counter[str] = field(default_factory=Counter)

    @property
    def longest_prompt(self) -> int:
        """Tokens a prompt may have so that something is left to learn."""
        return self.max_length - LEAST_SUPERVISED

    @cached_property
    def longest_text(self) -> int:
        """Characters that no prompt within the limit can have: more are not even tokenised."""
        longest = max((len(piece) for piece in self.template.tokenizer.get_vocab()), default=1)
        return self.max_length * longest

    def usable(self, store: Store, system: str | None, regenerate_all: bool, seed: int, parts: Parts) -> None:
        """Leave those the template takes and whose first prompt fits, duplicates left out, `system` in front.

        regenerate_all: conversations that differ in their given answers only are duplicates too, and
        ready-made tokens have no prompt to answer. Draws each one's place in the shuffle of the split.
        """
        for n, bare in store.conversations():
            item = bare.with_system(system)
            if item.row is not None and regenerate_all:
                self.tally.drop_conversation(item, "ready-made tokens, and data.answers=regenerated")
                store.remove(n)
            elif self._seen(item, store, regenerate_all):
                self.tally.drop_conversation(item, "duplicate")
                store.remove(n)
            else:
                store.replace(n, item, hash_order(seed, f"hold out {item.key}"))
        for (n, item), problem in parts.each("fit", store.conversations, lambda row: self._problem(row[1])):
            if problem is not None:
                self.tally.repeat([problem], item)
                store.remove(n)

    def _problem(self, item: Conversation) -> Event | None:
        """Why the target cannot read it, if it cannot."""
        try:
            if item.row is not None:
                self._check_tokens(item.row)
            elif self._too_long(item):
                return False, "prompt longer than data.max_length", ""
        except BadRow as error:
            return True, error.reason, error.detail
        return None

    def _seen(self, item: Conversation, store: Store, regenerate_all: bool) -> bool:
        if item.row is not None:
            return store.seen(item.key)
        asked = [m for m in item.messages if not (regenerate_all and m["role"] == "assistant")]
        return store.seen(content_key(asked, item.tools))

    def fits(self, item: Conversation, store: Store, regenerate_all: bool) -> bool:
        """Whether an augmented conversation can be used and is none that is there already."""
        try:
            return not self._too_long(item) and not self._seen(item, store, regenerate_all)
        except BadRow:
            return False

    def _too_long(self, item: Conversation) -> bool:
        first = next(item.prompts())
        if sum(len(message["content"]) for message in first) > self.longest_text:
            return True
        return len(self.template.prompt(first, item.tools)) > self.longest_prompt

    def _check_tokens(self, row: Row) -> None:
        wrong = next((token for token in row.tokens if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise BadRow("not the target's tokens", f"{wrong} is not in its vocabulary of {self.vocab_size}")

    def all_given(self, store: Store, parts: Parts) -> None:
        """Documents of the training conversations that keep their own answers, into the store."""
        shared = ("given", partial(store.conversations, "NOT anew"), lambda row: self._given_apart(row[1]))
        if parts.group.rank > 0:  # documents are the first process's business
            parts.make(*shared)
            return
        for (n, conversation), (documents, numbers, events) in parts.each(*shared):
            self.numbers.update(numbers)
            self.tally.repeat(events, conversation)
            rows = [(messages, tokens, mask) for messages, tokens, mask in documents]
            store.add_documents(n, [Document(conversation, *row, "given", "train") for row in rows])

    def _given_apart(self, conversation: Conversation) -> tuple[list[Any], dict[str, int], list[Event]]:
        """Of one conversation: its documents, what is to be counted, and what is to be noted."""
        answered = any(message["role"] == "assistant" for message in conversation.messages)
        if not conversation.row and (conversation.changed_by or not answered):
            return [], {}, [(False, "no given answer, and not regenerated", "")]
        events = Events()
        own = replace(self, tally=events, numbers=Counter())
        found = [(item.messages, item.tokens, item.loss_mask) for item in own.given(conversation)]
        return found, dict(own.numbers), events.noted

    def given(self, conversation: Conversation) -> list[Document]:
        """Documents with the conversation's own answers, for training."""
        if conversation.row is not None:
            rows = [self._cut(row, conversation) for row in [conversation.row]]
            return [
                Document(conversation, (), row.tokens, row.loss_mask, "given", "train") for row in rows if row
            ]
        try:
            messages = self.template.without_thoughts(conversation.messages)
            turns = self._turns(messages, conversation)
        except BadRow as error:
            self._bad(error, conversation)
            return []
        while messages[-1]["role"] != "assistant":
            messages.pop()
            self.numbers["messages after the last given answer, not learned from"] += 1
        return [
            Document(conversation, messages, row.tokens, row.loss_mask, "given", "train")
            for row in self._rows(turns, conversation)
        ]

    def regenerated(self, item: Regenerated, split: Split) -> list[Document]:
        """Documents with the target's own answers."""
        self.numbers["answers cut by max_new_tokens"] += item.truncated
        turns = item.turns[-1:] if self.supervise is Supervise.last else item.turns
        return [
            Document(
                item.conversation,
                item.messages,
                row.tokens,
                row.loss_mask,
                "regenerated",
                split,
                item.truncated,
            )
            for row in self._rows(turns, item.conversation)
        ]

    def _turns(self, messages: Sequence[dict[str, object]], conversation: Conversation) -> list[Turn]:
        return given_turns(self.template, messages, conversation.tools, self.supervise is Supervise.last)

    def _rows(self, turns: Sequence[Turn], conversation: Conversation) -> Iterator[Row]:
        self.numbers["turns tokenised in two pieces"] += sum(turn.straddled for turn in turns)
        self.numbers["given answers without end-of-turn token"] += sum(turn.open_ended for turn in turns)
        self.numbers["thoughts the chat template leaves out"] += sum(turn.thought_lost for turn in turns)
        self.numbers["thoughts masked"] += sum(turn.unlearned > 0 for turn in turns)
        for row in join_turns(turns, self.template.eos):
            cut = self._cut(row, conversation)
            if cut is not None:
                yield cut

    def _cut(self, row: Row, conversation: Conversation) -> Row | None:
        cut = Row(row.tokens[: self.max_length], row.loss_mask[: self.max_length])
        if sum(cut.loss_mask) < LEAST_SUPERVISED:
            beyond = sum(row.loss_mask) >= LEAST_SUPERVISED
            reason = "answer beyond data.max_length" if beyond else "answer of fewer than two tokens"
            self.tally.drop_conversation(conversation, reason)
            return None
        self.numbers["documents cut at data.max_length"] += len(cut.tokens) < len(row.tokens)
        return cut

    def _bad(self, error: BadRow, conversation: Conversation) -> None:
        self.tally.bad(error, conversation.source, conversation.line, conversation.id)
