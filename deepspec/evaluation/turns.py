"""Conversations of several turns: the next turn follows the target's own plain answer to the one before."""

from collections.abc import Callable
from dataclasses import replace

from deepspec.data.conversation import BadRow, Message
from deepspec.evaluation.prompts import Prompt
from deepspec.evaluation.tasks.item import Item

Template = Callable[[list[Message]], list[int]]  # messages → the templated prompt's tokens
Following = Callable[[Prompt, str], Prompt | None]  # a prompt and its plain answer → the next turn's prompt


def opening(item: Item, system: str | None, template: Template) -> Prompt:
    """The first turn of an item. system: a system prompt for items that have none of their own."""
    said = item.system or system
    start: tuple[Message, ...] = ({"role": "system", "content": said},) if said else ()
    prompt = Prompt(item.id, item.category, "", (), messages=start, item=item, turn=0)
    return _asked(prompt, item, template)


def following(template: Template, longest: int) -> Following:
    """longest: most prompt tokens that leave room for the answer; a conversation that outgrows it ends, and so does
    one whose answer the chat template refuses."""

    def next_turn(prompt: Prompt, answer: str) -> Prompt | None:
        if prompt.item is None or prompt.turn >= len(prompt.item.turns):
            return None
        answered = (*prompt.messages, {"role": "assistant", "content": answer})
        try:
            asked = _asked(replace(prompt, messages=answered), prompt.item, template)
        except BadRow:  # the template refuses what the target answered
            return None
        return asked if len(asked.tokens) <= longest else None

    return next_turn


def turn_id(item: Item, turn: int) -> str:
    """The id of a turn's prompt."""
    return item.id if turn == 1 else f"{item.id}, turn {turn}"


def _asked(prompt: Prompt, item: Item, template: Template) -> Prompt:
    """The prompt with its item's next turn said."""
    turn = prompt.turn + 1
    messages = (*prompt.messages, {"role": "user", "content": item.turns[turn - 1]})
    return replace(
        prompt,
        id=turn_id(item, turn),
        text=item.turns[turn - 1],
        tokens=tuple(template(list(messages))),
        references=item.references_of(turn),
        messages=messages,
        turn=turn,
    )
