"""Conversations that a target can read, and the documents they become."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from deepspec.data.answers import Regenerated
from deepspec.data.conversation import BadRow, Conversation, Tally, content_key
from deepspec.data.dataset import Document, Split
from deepspec.data.template import ChatTemplate, Row, Turn, given_turns, join_turns

LEAST_SUPERVISED = 2  # a draft starts at a token the assistant wrote and predicts another


@dataclass
class Reader:
    """Turns conversations into documents of at most `max_length` tokens, and counts what happens to them.

    numbers: documents cut at the end, turns whose text is tokenised in two pieces, answers cut by the
    generation limit, given answers for which the template has no end-of-turn token.
    """

    template: ChatTemplate
    max_length: int
    tally: Tally
    numbers: Counter[str] = field(default_factory=Counter)

    @property
    def longest_prompt(self) -> int:
        """Tokens a prompt may have so that something is left to learn."""
        return self.max_length - LEAST_SUPERVISED

    def usable(
        self, conversations: Sequence[Conversation], system: str | None, ignore_answers: bool
    ) -> list[Conversation]:
        """Those the template takes and whose first prompt fits, duplicates left out, `system` in front.

        ignore_answers: conversations that differ in their given answers only are duplicates too.
        """
        found, seen = [], set()
        for bare in conversations:
            item = bare.with_system(system)
            asked = [m for m in item.messages if not (ignore_answers and m["role"] == "assistant")]
            key = content_key(asked)
            if key in seen:
                self.tally.drop_conversation(item, "duplicate")
                continue
            seen.add(key)
            try:
                length = len(self.template.prompt(next(item.prompts())))
            except BadRow as error:
                self._bad(error, item)
                continue
            if length > self.longest_prompt:
                self.tally.drop_conversation(item, "prompt longer than data.max_length")
                continue
            found.append(item)
        return found

    def given(self, conversation: Conversation) -> list[Document]:
        """Documents with the conversation's own answers, for training."""
        try:
            turns = given_turns(self.template, conversation.messages)
        except BadRow as error:
            self._bad(error, conversation)
            return []
        messages = list(conversation.messages)
        while messages[-1]["role"] != "assistant":
            messages.pop()
        return [
            Document(conversation, messages, row.tokens, row.loss_mask, "given", "train")
            for row in self._rows(turns, conversation)
        ]

    def regenerated(self, item: Regenerated, split: Split) -> list[Document]:
        """Documents with the target's own answers."""
        self.numbers["answers cut by max_new_tokens"] += item.truncated
        conversation = item.conversation
        return [
            Document(
                conversation, item.messages, row.tokens, row.loss_mask, "regenerated", split, item.truncated
            )
            for row in self._rows(item.turns, conversation)
        ]

    def _rows(self, turns: Sequence[Turn], conversation: Conversation) -> Iterator[Row]:
        self.numbers["turns tokenised in two pieces"] += sum(turn.straddled for turn in turns)
        self.numbers["given answers without end-of-turn token"] += sum(turn.open_ended for turn in turns)
        for row in join_turns(turns, self.template.eos):
            cut = Row(row.tokens[: self.max_length], row.loss_mask[: self.max_length])
            if sum(cut.loss_mask) < LEAST_SUPERVISED:
                beyond = sum(row.loss_mask) >= LEAST_SUPERVISED
                reason = "answer beyond data.max_length" if beyond else "answer of fewer than two tokens"
                self.tally.drop_conversation(conversation, reason)
                continue
            self.numbers["documents cut at data.max_length"] += len(cut.tokens) < len(row.tokens)
            yield cut

    def _bad(self, error: BadRow, conversation: Conversation) -> None:
        self.tally.bad(error, conversation.source, conversation.line, conversation.id)
