"""A target's chat template: prompts as decoding sees them, and which tokens are the assistant's.

Nothing here knows a family. An answer is, by definition, what the template puts after its own generation
prompt: two renderings, one of the prompt and one with the answer, differ by exactly that. Where the
turn ends is read from a third rendering whose answer is a marker: what follows the marker is the template's.
Rows are put together from *tokens*, prompt as decoding tokenises it and then the answer, so the text a draft
is trained on is the text it will meet.
"""

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from deepspec.config.schema import Thinking
from deepspec.data.conversation import BadRow, Message, Row
from deepspec.errors import UserError

# Base models have no template: the texts follow each other, one a paragraph, an answer ends with EOS.
PLAIN_TEMPLATE = (
    "{% if bos_token is defined and bos_token %}{{ bos_token }}{% endif %}"
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' and eos_token is defined and eos_token %}{{ eos_token }}{% endif %}"
    "{{ '\n' }}{% endfor %}"
)
MARKER = "Qz7vMarkerAnswerQz7v"
TODAY = datetime(2026, 1, 1)
TAGS = ("<think>", "</think>")
MORE_ERRORS = (AttributeError, ArithmeticError, RecursionError)  # of a template that takes a row for another
Tools = Sequence[dict[str, Any]]
DATE_CALL = re.compile(r"""strftime_now\(\s*(["'])([^"']*)\1\s*\)""")


@dataclass(frozen=True)
class Turn:
    """One answer in its context.

    prompt: the tokens decoding starts from. answer: the assistant's tokens, end-of-turn token included where
    there is one (`ended`). open_ended: the template has no end-of-turn token of its own, the next turn's
    first token may serve as one. straddled: text tokenised in one piece would have a token across the border
    of prompt and answer, so the two were tokenised apart. unlearned: how many of the answer's first tokens
    are a thought that is masked. thought_lost: the message has a thought and the template leaves it out.
    """

    prompt: list[int]
    answer: list[int]
    ended: bool
    open_ended: bool = False
    straddled: bool = False
    unlearned: int = 0
    thought_lost: bool = False


class ChatTemplate:
    """Renders and tokenises conversations for one tokenizer.

    eos: every id that ends an answer in decoding. arguments: of the template's own, as `enable_thinking`.
    thinking: what becomes of given thoughts; tags: what begins and ends them. Raises `BadRow` for a
    conversation the template refuses.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos: Sequence[int],
        *,
        arguments: Mapping[str, Any] | None = None,
        thinking: Thinking = Thinking.keep,
        tags: Sequence[str] = TAGS,
    ) -> None:
        self.tokenizer = tokenizer
        self.eos = tuple(eos)
        self.arguments = dict(arguments or {})
        self.thinking = thinking
        self.opening, self.closing = tags
        self.plain = not getattr(tokenizer, "chat_template", None)
        self.text = PLAIN_TEMPLATE if self.plain else without_date(tokenizer.get_chat_template())
        self._trailers: dict[str, tuple[int | None, int]] = {}

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Tokens of the templated prompt, generation prompt included: what decoding continues."""
        return self.encode(self.render(messages, generation_prompt=True, tools=tools))

    def turn(self, messages: Sequence[Message], tools: Tools = ()) -> Turn:
        """The last message, an assistant's, as an answer to those before it."""
        before = self.render(messages[:-1], generation_prompt=True, tools=tools)
        whole = self.render(messages, generation_prompt=False, tools=tools)
        trailer = self._trailer(messages, tools)
        if not whole.startswith(before):
            raise BadRow(
                "answer does not continue the prompt",
                "the chat template renders this answer otherwise than its generation prompt begins it "
                "(usual for thoughts and moved system prompts; data.answers=regenerated does not need this)",
            )
        if not whole.endswith(trailer) or len(whole) - len(trailer) < len(before):
            raise BadRow("end of the answer not found", "the chat template rewrites this answer")
        end, after = self._end_of_turn(trailer)
        if end is None:
            whole = whole[: len(whole) - len(trailer)]
        self._check_shown(messages, before, whole[len(before) :])
        turn = self._split(before, whole, end, after)
        return self._thought(turn, messages[-1], before, whole)

    def answered(self, before: Sequence[Message], message: Message, tools: Tools, ended: bool) -> Turn:
        """An answer that came as text, as if it had been decoded here; without an end token unless `ended`.

        Thoughts and calls that the server took apart are put together by the template.
        """
        if message.get("reasoning_content") or message.get("tool_calls"):
            turn = self.turn([*before, message], tools)
            return turn if ended or not turn.ended else replace(turn, answer=turn.answer[:-1], ended=False)
        prompt = self.prompt(before, tools)
        answer = self.encode(message["content"])
        end, _ = self._end_of_turn(self._trailer([*before, message], tools))
        if ended and end is not None:
            answer.append(end)
        if not answer:
            raise BadRow("empty answer", "the server wrote nothing")
        return Turn(prompt, answer, ended=ended and end is not None, open_ended=ended and end is None)

    def _check_shown(self, messages: Sequence[Message], before: str, answer: str) -> None:
        """Raise `BadRow` if the template leaves out what the assistant said or called: most know no tools."""
        for message in messages:
            shown = answer if message is messages[-1] else before
            for call in message.get("tool_calls", ()):
                if call["function"]["name"] not in shown:
                    raise BadRow("tool calls the chat template does not write")
        said = messages[-1]["content"].rpartition(self.closing)[2].strip()
        if said not in answer:
            raise BadRow("end of the answer not found", "the chat template rewrites this answer")

    def _thought(self, turn: Turn, message: Message, before: str, whole: str) -> Turn:
        """The turn with its thought masked, or noted as left out by the template."""
        answer = whole[len(before) :]
        has_one = bool(message.get("reasoning_content")) or self.closing in message["content"]
        if self.thinking is not Thinking.mask:
            return replace(turn, thought_lost=has_one and self.closing not in answer)
        opened = answer.lstrip().startswith(self.opening) or before.rstrip().endswith(self.opening)
        text = self.decode(turn.answer)
        if not opened or self.closing not in text:
            if has_one:
                raise BadRow(
                    "thought not found", "the chat template does not show it where the answer begins"
                )
            return turn
        end = text.index(self.closing) + len(self.closing)
        counts = range(len(turn.answer) + 1)
        count = bisect_left(counts, end, key=lambda first: len(self.decode(turn.answer[:first])))
        return replace(turn, unlearned=count)

    def without_thoughts(self, messages: Sequence[Message]) -> list[Message]:
        """Messages as they are learned from: their thoughts taken out where `thinking` is drop."""
        if self.thinking is not Thinking.drop:
            return list(messages)
        found = []
        for message in messages:
            bare = {key: value for key, value in message.items() if key != "reasoning_content"}
            if message["role"] == "assistant":
                head, closed, rest = message["content"].partition(self.closing)
                if closed and (head.lstrip().startswith(self.opening) or self.opening not in head):
                    bare["content"] = rest.lstrip()
                if not bare["content"].strip() and not bare.get("tool_calls"):
                    raise BadRow("an answer that is only a thought", "and data.thinking=drop")
            found.append(bare)
        return found

    def _split(self, before: str, whole: str, end: int | None, after: int) -> Turn:
        """Tokenise; `after` tokens follow the end-of-turn token `end` and are the template's."""
        prompt = self.encode(before)
        tokens = self.encode(whole)
        tokens = tokens[: len(tokens) - after]
        straddled = tokens[: len(prompt)] != prompt
        if straddled:
            pieces = self.encode(whole[len(before) :])
            pieces = prompt + pieces[: len(pieces) - after]
            if self.decode(pieces) != self.decode(tokens):
                raise BadRow("prompt and answer cannot be tokenised apart")
            tokens = pieces
        answer = tokens[len(prompt) :]
        if end is not None and (not answer or answer[-1] != end):
            raise BadRow(
                "end of the answer not found", "the end-of-turn token is not where the template puts it"
            )
        if not answer:
            raise BadRow("empty answer", "nothing is left of it in the chat template")
        return Turn(prompt, answer, ended=end is not None, open_ended=end is None, straddled=straddled)

    def _trailer(self, messages: Sequence[Message], tools: Tools) -> str:
        """What the template writes after the text of a last answer."""
        text = self.render(
            [*messages[:-1], {"role": "assistant", "content": MARKER}], generation_prompt=False, tools=tools
        )
        at = text.rfind(MARKER)
        if at < 0:
            raise BadRow("end of the answer not found", "the chat template does not render answers")
        return text[at + len(MARKER) :]

    def _end_of_turn(self, trailer: str) -> tuple[int | None, int]:
        """The end-of-turn token of a trailer, or None, and how many of its tokens follow it.

        Special tokens cut the text before anything else is tokenised, so what follows one is tokenised the
        same whatever stands in front.
        """
        if trailer not in self._trailers:
            tokens = self.encode(trailer)
            found: tuple[int | None, int] = (None, 0)
            for ends in (set(self.eos) | self.special_ids, self.added_ids):
                at = next((index for index, token in enumerate(tokens) if token in ends), None)
                if at is not None:
                    found = (tokens[at], len(tokens) - at - 1)
                    break
            self._trailers[trailer] = found
        return self._trailers[trailer]

    @cached_property
    def special_ids(self) -> set[int]:
        added = self.tokenizer.added_tokens_decoder
        return set(self.tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}

    @cached_property
    def added_ids(self) -> set[int]:
        """Added tokens that are words of a format rather than runs of blanks."""
        return {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.content.strip()}

    def render(self, messages: Sequence[Message], generation_prompt: bool, tools: Tools = ()) -> str:
        """The template's text."""
        if tools and "tools" not in self.text:
            raise BadRow("tools the chat template does not read")
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                chat_template=self.text,
                **self.arguments,
            )
        except (TemplateError, TypeError, ValueError, LookupError, *MORE_ERRORS) as error:
            raise BadRow("refused by the chat template", str(error)) from error
        return str(text)

    def encode(self, text: str) -> list[int]:
        """Tokens of rendered text; the template has already written every special token."""
        return [int(token) for token in self.tokenizer(text, add_special_tokens=False)["input_ids"]]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        text = self.tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)

    def answer_text(self, answer: Sequence[int]) -> str:
        """A generated answer as message content: without the token that ended it."""
        return self.decode(answer[:-1] if answer and answer[-1] in self.eos else answer)


def without_date(template: str) -> str:
    """The template with `TODAY` for today's date: the same recipe must give the same tokens tomorrow."""
    return DATE_CALL.sub(lambda call: f'"{TODAY.strftime(call[2])}"', template)


def given_turns(
    template: ChatTemplate, messages: Sequence[Message], tools: Tools = (), only_last: bool = False
) -> list[Turn]:
    """Every assistant message of a conversation (or the last), each with all that stands before it."""
    ends = [index + 1 for index, message in enumerate(messages) if message["role"] == "assistant"]
    return [template.turn(messages[:end], tools) for end in (ends[-1:] if only_last else ends)]


def join_turns(turns: Sequence[Turn], eos: Sequence[int]) -> list[Row]:
    """One row for turns whose prompts continue each other token for token, else a new row.

    Templates that rewrite history (drop earlier thinking, mark the last turn otherwise) give several rows, in
    which the earlier turns are context only: each is exactly what decoding that turn would read.
    """
    rows: list[Row] = []
    previous: Turn | None = None
    for turn in turns:
        if rows and previous and turn.prompt[: len(rows[-1].tokens)] == rows[-1].tokens:
            row = rows[-1]
            between = turn.prompt[len(row.tokens) :]
            closes = int(previous.open_ended and bool(between) and between[0] in eos)
            row.loss_mask += [closes] * min(1, len(between)) + [0] * (len(between) - 1)
            row.tokens += between
        else:
            row = Row(list(turn.prompt), [0] * len(turn.prompt))
            rows.append(row)
        row.tokens += turn.answer
        row.loss_mask += [0] * turn.unlearned + [1] * (len(turn.answer) - turn.unlearned)
        previous = turn
    return rows


def check_system(template: ChatTemplate, system: str) -> None:
    """`UserError` if the template has no place for a system prompt."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Hello"}]
    try:
        text = template.render(messages, generation_prompt=True)
    except BadRow as error:
        raise UserError(
            f"The target's chat template takes no system prompt ({error}): set data.system=null."
        ) from error
    if system.strip() not in text:
        raise UserError("The target's chat template leaves the system prompt out: set data.system=null.")
