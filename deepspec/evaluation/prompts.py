"""Which prompts are evaluated: spread evenly over the categories, the same ones every time."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspec.data import load_prompts
from deepspec.data.conversation import Message
from deepspec.errors import UserError
from deepspec.evaluation.tasks.item import Item


@dataclass(frozen=True)
class Prompt:
    """One prompt: `tokens` is the templated text with the generation prompt, `text` what a person wrote.

    references: texts that its answers are compared with. item: the conversation it is turn number `turn` of,
    with the messages so far; None for a prompt that stands alone.
    """

    id: str
    category: str
    text: str
    tokens: tuple[int, ...]
    references: tuple[str, ...] = ()
    messages: tuple[Message, ...] = ()
    item: Item | None = None
    turn: int = 1


def read_held_out(folder: Path, made_by: str) -> list[Prompt]:
    """The held-out prompts of a data artifact; `made_by` is the command that makes it, for the error."""
    try:
        rows = load_prompts(folder)
    except (OSError, ValueError) as error:
        raise UserError(
            f"The held-out prompts in {folder} cannot be read ({error}). Make the data again: {made_by}"
        ) from error
    prompts = []
    for number, row in enumerate(rows, start=1):
        try:
            tokens = tuple(int(token) for token in row["tokens"])
            prompts.append(Prompt(str(row["id"]), str(row["category"]), question(row["messages"]), tokens))
        except (ValueError, KeyError, TypeError) as error:
            what = f"Row {number} of the held-out prompts in {folder} is damaged"
            raise UserError(
                f"{what} ({type(error).__name__}: {error}). Make the data again: {made_by}"
            ) from error
    if not prompts:
        raise UserError(
            f"{folder} has no held-out prompts: set data.held_out_prompts above 0 and make the data again: "
            f"{made_by}"
        )
    return prompts


def question(messages: Sequence[dict[str, Any]]) -> str:
    """What the person wrote, without the chat template; several turns are joined with their roles."""
    turns = [m for m in messages if m["role"] != "system"]
    if len(turns) == 1:
        return str(turns[0]["content"])
    return "\n\n".join(f"{m['role']}: {m['content']}" for m in turns)


def fitting(prompts: Sequence[Prompt], longest: int) -> tuple[list[Prompt], dict[str, int]]:
    """The prompts that leave room for the answer, and how many did not, by reason.

    longest: most prompt tokens that still leave room in the target's context.
    """
    kept = [p for p in prompts if 0 < len(p.tokens) <= longest]
    left_out = len(prompts) - len(kept)
    reason = f"longer than {longest} tokens: no room for the answer in the target's context"
    return kept, {reason: left_out} if left_out else {}


def spread(prompts: Sequence[Prompt], number: int) -> list[Prompt]:
    """At most `number` prompts, as many of each category as of any other, taken at even distances.

    Categories take turns in the answer, so a beginning of it is spread as evenly.
    """
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    quotas = dict.fromkeys(sorted(groups), 0)
    wanted = min(number, len(prompts))
    while sum(quotas.values()) < wanted:
        for name in quotas:
            if quotas[name] < len(groups[name]) and sum(quotas.values()) < wanted:
                quotas[name] += 1
    taken = {name: _evenly(groups[name], quota) for name, quota in quotas.items()}
    turns = max(quotas.values(), default=0)
    return [taken[name][turn] for turn in range(turns) for name in quotas if turn < quotas[name]]


def choose(prompts: Sequence[Prompt], main: int, sweep: int) -> tuple[list[Prompt], list[Prompt], int]:
    """Prompts of the main run, those of the sweep over K, and how many the two share.

    The sweep takes prompts that the main run does not use as far as there are any: K is then not chosen on
    the prompts it is judged by.
    """
    chosen = spread(prompts, main)
    ids = {prompt.id for prompt in chosen}
    others = spread([p for p in prompts if p.id not in ids], sweep)
    shared = chosen[: sweep - len(others)]
    return chosen, [*others, *shared], len(shared)


def _evenly(items: list[Prompt], number: int) -> list[Prompt]:
    return [items[(2 * i + 1) * len(items) // (2 * number)] for i in range(number)]
