"""Answers rewritten by the target: fixed batches, each whole on disk or not there at all.

A batch is a chunk of the prompts sorted by content, so it is the same whatever the order of the files, and a
stopped run repeats at most one batch. Its file is named after everything that decides it; another setting
never meets an old answer, and one that decides nothing about answers meets them all again.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from deepspec.artifacts import fingerprint
from deepspec.data.conversation import BadRow, Conversation, Message, Tally, hash_order
from deepspec.data.template import ChatTemplate, Turn

Generate = Callable[[list[list[int]], list[int]], list[list[int]]]
"""Token ids of prompts and a seed each → token ids of the answers, the end token included where one came."""


@dataclass
class Regenerated:
    """One conversation with the target's own answers.

    messages: the history up to and including the last answer. turns: prompts and answers as tokens, as
    generated. truncated: the last answer ran into its limit and has no end-of-turn token.
    """

    conversation: Conversation
    messages: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    truncated: bool = False
    open: bool = True

    def take(
        self, asked: Sequence[Message], prompt: list[int], answer: list[int], template: ChatTemplate
    ) -> None:
        ended = bool(answer) and answer[-1] in template.eos
        self.turns.append(Turn(prompt, answer, ended))
        self.messages += [*asked, {"role": "assistant", "content": template.answer_text(answer)}]
        self.truncated = not ended


class Batches:
    """Runs `generate` batch by batch, each result kept as one file under `work`.

    recipe: what else decides an answer (target, sampling, limits); it goes into the files' names. earlier: a
    folder of finished batches (`keep`), read and not written.
    """

    def __init__(
        self, generate: Generate, work: Path, recipe: Mapping[str, Any], earlier: Path | None = None
    ) -> None:
        self.generate = generate
        self.work = work
        self.recipe = dict(recipe)
        self.places = [work] if earlier is None else [work, earlier]
        self.used: dict[str, Path] = {}
        work.mkdir(parents=True, exist_ok=True)

    def answers(self, prompts: list[list[int]], seeds: list[int]) -> tuple[list[list[int]], bool]:
        """Answers of one batch, and whether an earlier run had made them."""
        content = {"recipe": self.recipe, "prompts": prompts, "seeds": seeds}
        name = f"{fingerprint(content)}.json"
        for place in self.places:
            kept = self._read(place / name, len(prompts))
            if kept is not None:
                self.used[name] = place / name
                return kept, True
        path = self.used[name] = self.work / name
        made = [[int(token) for token in answer] for answer in self.generate(prompts, seeds)]
        partial = path.with_suffix(f".partial-{os.getpid()}")
        partial.write_text(json.dumps(made), encoding="utf-8")
        os.replace(partial, path)
        return made, False

    def keep(self, folder: Path) -> None:
        """Copy every batch that was used into `folder`."""
        folder.mkdir()
        for name, path in self.used.items():
            shutil.copyfile(path, folder / name)

    @staticmethod
    def _read(path: Path, count: int) -> list[list[int]] | None:
        """A finished batch; None if there is none or a crash of the machine left it damaged."""
        try:
            answers = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, UnicodeDecodeError, json.JSONDecodeError):
            return None
        return answers if isinstance(answers, list) and len(answers) == count else None


def regenerate(
    conversations: Sequence[Conversation],
    template: ChatTemplate,
    batches: Batches,
    *,
    batch_size: int,
    longest_prompt: int,
    seed: int,
    tally: Tally,
) -> list[Regenerated]:
    """Answer every user turn anew, all first turns before all second ones; result in the order of ids.

    A later turn is left out, with those after it, and counted, when the answer before it was cut, when its
    prompt has more than `longest_prompt` tokens, or when the template refuses the new history. Prompts of
    first turns must be within the limit.
    """
    found = [Regenerated(item) for item in sorted(conversations, key=lambda item: item.key)]
    questions = {item.conversation.id: list(_questions(item.conversation)) for item in found}
    total = sum(len(asked) for asked in questions.values())
    with tqdm(total=total, desc="answers", unit="row", smoothing=0) as bar:
        for turn in range(max((len(asked) for asked in questions.values()), default=0)):
            ready: list[tuple[Regenerated, tuple[Message, ...], list[int]]] = []
            for item in found:
                asked = questions[item.conversation.id][turn:]
                if not asked or not item.open:
                    continue
                prompt = _next_prompt(item, asked[0], template, longest_prompt, tally)
                if prompt is None:
                    item.open = False
                    bar.update(len(asked))
                else:
                    ready.append((item, asked[0], prompt))
            for start in range(0, len(ready), batch_size):
                batch = ready[start : start + batch_size]
                seeds = [hash_order(seed, f"answer {item.conversation.key} {turn}") for item, _, _ in batch]
                answers, kept = batches.answers([prompt for _, _, prompt in batch], seeds)
                for (item, asked_now, prompt), answer in zip(batch, answers, strict=True):
                    item.take(asked_now, prompt, answer, template)
                if kept:
                    bar.initial += len(batch)
                bar.update(len(batch))
    return sorted((item for item in found if item.turns), key=lambda item: item.conversation.id)


def _questions(conversation: Conversation) -> Iterator[tuple[Message, ...]]:
    """The messages that lead to each answer, since the answer before."""
    before = 0
    for prompt in conversation.prompts():
        yield prompt[before:]
        before = len(prompt) + 1


def _next_prompt(
    item: Regenerated, asked: Sequence[Message], template: ChatTemplate, longest: int, tally: Tally
) -> list[int] | None:
    if item.truncated:
        tally.drop_conversation(item.conversation, "later turns: the answer before them was cut")
        return None
    try:
        prompt = template.prompt([*item.messages, *asked])
    except BadRow as error:
        tally.drop_conversation(item.conversation, f"later turns: {error.reason}")
        return None
    if len(prompt) > longest:
        tally.drop_conversation(item.conversation, "later turns: the prompt is too long")
        return None
    return prompt
