"""Answers rewritten by the target: fixed batches, each whole on disk or not there at all.

A batch is a chunk of the prompts sorted by content, so it is the same whatever the order of the files, and a
stopped run repeats at most one batch. Its file is named after everything that decides it; another setting
never meets an old answer, and one that decides nothing about answers meets them all again.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from deepspec.artifacts import fingerprint
from deepspec.data.conversation import BadRow, Conversation, Message, Tally, hash_order
from deepspec.data.sharing import ALONE, Group, chunks, read_whole, write_whole
from deepspec.data.store import Store
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


class Batches:
    """Runs `generate` batch by batch, each result kept as one file under `work`.

    recipe: what else decides an answer (target, sampling, limits); it goes into the files' names. earlier: a
    folder of finished batches (`keep`), read and not written. group: who shares the batches.
    """

    def __init__(
        self,
        generate: Generate,
        work: Path,
        recipe: Mapping[str, Any],
        earlier: Path | None = None,
        group: Group = ALONE,
    ) -> None:
        self.group = group
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
            kept = read_whole(place / name, len(prompts))
            if kept is not None:
                self.used[name] = place / name
                return kept, True
        path = self.used[name] = self.work / name
        made = [[int(token) for token in answer] for answer in self.generate(prompts, seeds)]
        write_whole(path, made)
        return made, False

    def share(
        self,
        batches: Iterable[tuple[list[list[int]], list[int]]],
        on_rows: Callable[[int, bool], object] = lambda count, kept: None,
    ) -> None:
        """This process's batches of them, (prompts, seeds) each; after it those of all are on disk.

        on_rows: told of every batch, another process's too, how many prompts it has and whether it was kept.
        """
        if self.group.size == 1:
            return
        for number, (prompts, seeds) in enumerate(batches):
            kept = self.group.mine(number) and self.answers(prompts, seeds)[1]
            on_rows(len(prompts), kept)
        self.group.wait()

    def keep(self, folder: Path) -> None:
        """Copy every batch that was used into `folder`."""
        folder.mkdir()
        for name, path in self.used.items():
            shutil.copyfile(path, folder / name)


def regenerate(
    store: Store,
    template: ChatTemplate,
    batches: Batches,
    *,
    batch_size: int,
    longest_prompt: int,
    seed: int,
    samples: int,
    tally: Tally,
) -> None:
    """Answer every user turn of the marked conversations anew, all first turns before all second ones.

    A later turn is left out, with those after it, and counted, when the answer before it was cut, when its
    prompt has more than `longest_prompt` tokens, or when the template refuses the new history. Prompts of
    first turns must be within the limit. The answers go to the store: see `regenerated`.
    """
    total = sum(
        len(list(item.prompts())) * samples_of(store, n, samples) for n, item in store.conversations("anew")
    )
    if total == 0:
        return
    walk = partial(_questions, store, template, longest_prompt, samples)
    alone, quiet = batches.group.size == 1, batches.group.rank > 0
    with tqdm(total=total, desc="answers", unit="row", smoothing=0, disable=quiet) as bar:

        def on_rows(count: int, kept: bool) -> None:
            if kept and not bar.disable:
                bar.initial += count
            bar.update(count)

        turn, busy = 0, True
        while busy:
            busy = False
            first_look = chunks(walk(turn, Tally(strict=False), lambda left: None), batch_size)
            batches.share((_asked(ready, seed) for ready in first_look), on_rows)
            for ready in chunks(walk(turn, tally, bar.update), batch_size):
                busy = True
                kept = _answer(ready, store, template, batches, seed)
                if alone:  # else they were counted as they were made
                    on_rows(len(ready), kept)
            turn += 1


def _questions(
    store: Store,
    template: ChatTemplate,
    longest_prompt: int,
    samples: int,
    turn: int,
    tally: Tally,
    left_out: Callable[[int], object],
) -> Iterator["_Question"]:
    """All questions number `turn` that can be asked, by content. left_out: told of each conversation that ends
    here how many it has left."""
    for n, conversation in store.conversations("anew", "key"):
        asked = list(questions(conversation))[turn:]
        for sample in range(samples_of(store, n, samples) if asked else 0):
            item = regenerated(store, n, conversation, sample)
            if len(item.turns) < turn:
                continue
            prompt = _next_prompt(item, asked[0], template, longest_prompt, tally)
            if prompt is None:
                left_out(len(asked))
            else:
                yield _Question(n, sample, turn, asked[0], prompt, conversation.key)


@dataclass(frozen=True)
class _Question:
    n: int
    sample: int
    turn: int
    asked: tuple[Message, ...]
    prompt: list[int]
    key: str

    def seed(self, seed: int) -> int:
        again = f" {self.sample}" if self.sample else ""
        return hash_order(seed, f"answer {self.key} {self.turn}{again}")


def _asked(ready: Sequence[_Question], seed: int) -> tuple[list[list[int]], list[int]]:
    return [item.prompt for item in ready], [item.seed(seed) for item in ready]


def _answer(
    ready: Sequence[_Question], store: Store, template: ChatTemplate, batches: Batches, seed: int
) -> bool:
    """A batch's answers into the store; whether an earlier run had made them."""
    answers, kept = batches.answers(*_asked(ready, seed))
    for item, answer in zip(ready, answers, strict=True):
        ended = bool(answer) and answer[-1] in template.eos
        message = {"role": "assistant", "content": template.answer_text(answer)}
        body = json.dumps([item.prompt, answer, ended, [*item.asked, message]])
        store.run("INSERT INTO turn VALUES (?, ?, ?, ?)", (item.n, item.sample, item.turn, body))
    return kept


def regenerated(store: Store, n: int, conversation: Conversation, sample: int) -> Regenerated:
    """What has been answered of one conversation so far."""
    found = Regenerated(conversation)
    query = "SELECT body FROM turn WHERE conversation = ? AND sample = ? ORDER BY turn"
    for (body,) in store.rows(query, (n, sample)):
        prompt, answer, ended, messages = json.loads(body)
        found.turns.append(Turn(prompt, answer, ended))
        found.messages += messages
        found.truncated = not ended
    return found


def samples_of(store: Store, n: int, samples: int) -> int:
    """How many answers a conversation gets: a held-out one has one, whatever the others have."""
    return 1 if store.one("SELECT side FROM conversation WHERE n = ?", (n,)) == "held_out" else samples


def questions(conversation: Conversation) -> Iterator[tuple[Message, ...]]:
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
        prompt = template.prompt([*item.messages, *asked], item.conversation.tools)
    except BadRow as error:
        tally.drop_conversation(item.conversation, f"later turns: {error.reason}")
        return None
    if len(prompt) > longest:
        tally.drop_conversation(item.conversation, "later turns: the prompt is too long")
        return None
    return prompt
