"""Where an evaluation's prompts come from: the data's held-out ones, a user's file, or named sets."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepspec.config.schema import Config, OnError
from deepspec.data.conversation import BadRow, Conversation, Tally
from deepspec.data.dataset import HELD_OUT_PROMPTS
from deepspec.data.prompts import prompts_sha256, read_prompts
from deepspec.data.template import ChatTemplate
from deepspec.errors import UserError
from deepspec.evaluation.prompts import Prompt, fitting, question, read_held_out
from deepspec.evaluation.quality.score import check_metrics
from deepspec.evaluation.tasks import Item, Source, read_tasks
from deepspec.evaluation.tasks.item import Check
from deepspec.evaluation.tasks.read import check_tasks
from deepspec.evaluation.turns import opening, turn_id
from deepspec.target import Target


@dataclass
class PromptSource:
    """Prompts as read before anything is loaded: ready ones of the data, or a user's conversations."""

    name: str
    path: Path
    ready: list[Prompt]
    conversations: list[Conversation]
    tally: Tally
    items: list[Item] = field(default_factory=list)
    sets: list[Source] = field(default_factory=list)


def check_prompts(config: Config) -> None:
    """`UserError` for prompts or metrics of one's own that cannot be read; needs no data or draft."""
    check_metrics(config.evaluate.metrics)
    check_tasks(config.evaluate.tasks, config.evaluate.task_files)
    if config.evaluate.tasks and config.evaluate.prompts is not None:
        raise UserError("evaluate.tasks and evaluate.prompts are both set: choose one of them.")
    if config.evaluate.prompts is not None:
        if not Path(config.evaluate.prompts).is_file():
            raise UserError(f"evaluate.prompts: there is no file {config.evaluate.prompts}.")
        read_source(config, "")


def read_source(config: Config, prepare: str) -> PromptSource:
    """Read the prompts and complain about them before any long work. prepare: the command that makes the data."""
    tally = Tally(strict=config.data.on_error is OnError.strict)
    asked = config.evaluate
    if asked.tasks:
        items, sets = read_tasks(asked.tasks, asked.task_files, asked.hub)
        return PromptSource(", ".join(asked.tasks), Path("evaluate.tasks"), [], [], tally, items, sets)
    path = _prompts_file(config)
    if config.evaluate.prompts is None:
        ready = read_held_out(path.parent, prepare)
        return PromptSource("held-out prompts of the data", path, ready, [], tally)
    return PromptSource(path.name, path, [], read_prompts(path, tally), tally)


def prompts_of(source: PromptSource, config: Config, target: Target) -> tuple[list[Prompt], dict[str, int]]:
    """All prompts that can be decoded, by the target's chat template; how many were left out, by reason."""
    prompts = list(source.ready)
    template = template_of(config, target)
    for conversation in source.conversations:
        messages = list(conversation.with_system(config.data.system).messages)
        references: tuple[str, ...] = ()
        if conversation.has_answer:
            references = (str(messages[-1]["content"]),)
            messages = messages[:-1]
        try:
            if conversation.row is not None:
                raise BadRow("ready-made tokens", "a prompt is text")
            tokens = tuple(template.prompt(messages, conversation.tools))
        except BadRow as error:
            source.tally.bad(error, str(source.path), conversation.line, conversation.id)
            continue
        prompts.append(Prompt(conversation.id, conversation.category, question(messages), tokens, references))
    for item in source.items:
        try:
            prompts.append(opening(item, config.data.system, template.prompt))
        except BadRow as error:
            source.tally.bad(error, item.category, 0, item.id)
    kept, too_long = fitting(prompts, target.max_positions - config.decode.max_new_tokens)
    excluded = dict(source.tally.counts) | too_long
    if not kept:
        why = "; ".join(f"{count}: {reason}" for reason, count in excluded.items()) or "it is empty"
        raise UserError(f"{source.path} has no prompt that can be evaluated ({why}).")
    twice = [name for name, count in Counter(prompt.id for prompt in kept).items() if count > 1]
    if twice:  # records are kept by it, and one would stand for both
        raise UserError(
            f"{source.name}: two prompts have the id {twice[0]!r}. Give them ids of their own, and name no set or file "
            "twice."
        )
    return kept, excluded


def _prompts_file(config: Config) -> Path:
    if config.evaluate.prompts is not None:
        return Path(config.evaluate.prompts)
    return Path(config.out) / "data" / HELD_OUT_PROMPTS


def made_of_prompts(config: Config, source: PromptSource) -> Any:
    """What decides the prompts: each set's revision, or the file's content."""
    if source.sets:
        return [one.revision or str(one.error) for one in source.sets]
    return prompts_sha256(_prompts_file(config))


def task_warnings(source: PromptSource) -> list[str]:
    """What a reader must know of the sets that were asked for."""
    return [f"Left out: {one.words()}" for one in source.sets if one.error]


def checks_of(items: Sequence[Item]) -> dict[str, Check]:
    """How an answer is judged, by its prompt's id: the last turn's."""
    last = {turn_id(item, len(item.turns)): item.check for item in items}
    return {name: check for name, check in last.items() if check is not None}


def template_of(config: Config, target: Target) -> ChatTemplate:
    return ChatTemplate(target.tokenizer, target.eos, arguments=config.data.template_args)
