"""The conversations of all sources, cleaned, before any target is known."""

import platform
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from deepspec.artifacts import plain
from deepspec.config.schema import Answers, DataConfig, OnError, Regenerate
from deepspec.data.augment import read_augmentations
from deepspec.data.conversation import Conversation, Tally
from deepspec.data.hygiene import Hygiene, Look
from deepspec.data.prompts import iter_prompts, prompts_sha256
from deepspec.data.selection import builtin_prompts
from deepspec.data.shapes import check_columns
from deepspec.data.sharing import ALONE, Group, Parts
from deepspec.data.store import Store, store_file, stored
from deepspec.errors import UserError

NOT_DECIDING = ("servers", "concurrency", "timeout", "retries")


@dataclass(frozen=True)
class Gathered:
    """All conversations, content hashes of where they come from, and what was left out on the way.

    read: how many there were before any was left out. overlaps: what they share with evaluation prompts.
    """

    store: Store
    sources: dict[str, Any]
    tally: Tally
    read: int
    overlaps: list[dict[str, Any]]


def check_settings(settings: DataConfig) -> None:
    """`UserError` for settings that do not go together; bounds of single numbers are the configuration's."""
    if settings.prompts is None and settings.builtin_prompts == 0:
        raise UserError("There are no prompts: set data.prompts to a file, or data.builtin_prompts above 0.")
    check_columns(settings.columns)
    if read_augmentations(settings.augment) and settings.answers is Answers.given:
        raise UserError(
            "data.augment changes prompts, and data.answers=given has no answers to the changed ones."
        )
    if settings.regenerate is Regenerate.servers and not settings.servers:
        raise UserError("data.regenerate=servers needs data.servers: at least one base URL.")
    if settings.samples > 1 and settings.temperature == 0:
        raise UserError(
            "data.samples above 1 needs data.temperature above 0: greedy answers are all the same."
        )
    if settings.answers is Answers.mixed and settings.regenerated_prompts is None:
        raise UserError(
            "data.answers=mixed needs data.regenerated_prompts: how many prompts get the target's own answer."
        )


def deciding(settings: DataConfig) -> dict[str, Any]:
    """The settings that decide what is in the artifact: not where or how fast answers are fetched."""
    return {
        key: value
        for key, value in plain(settings).items()
        # where no language is chosen, data of before there was a choice are the same
        if key not in NOT_DECIDING and (key != "languages" or value)
    }


def gather(settings: DataConfig, work: Path | None = None, group: Group = ALONE) -> Gathered:
    """The conversations of the prompts source and of the built-in ones, cleaned.

    Needs no target, so that a wrong setting or a bad file is known in seconds: `UserError`. They wait in a
    file in the folder `work` (None: in a temporary file; a group of processes needs a folder). Every process
    of a group gathers all of them; what takes long is looked at by one for all.
    """
    check_settings(settings)
    with stored(work or Path(tempfile.gettempdir())):
        return _gather(settings, work, group)


def _gather(settings: DataConfig, work: Path | None, group: Group) -> Gathered:
    tally = Tally(strict=settings.on_error is OnError.strict)
    store = Store(store_file(work, group.rank) if work else None)
    hygiene = Hygiene(settings, store, tally)
    sources: dict[str, Any] = {}
    if settings.decontaminate:
        sources["decontaminate"] = [prompts_sha256(name) for name in settings.decontaminate]
    if settings.prompts is not None:
        sources["prompts"] = prompts_sha256(settings.prompts)
        parts = Parts(work or Path(tempfile.gettempdir()), group, [deciding(settings), sources])
        _keep(partial(_rows, settings, settings.prompts), hygiene, parts)
        if store.count() == 0:
            raise UserError(f"{settings.prompts} leaves no prompt to use. Left out: {reasons(tally)}.")
    if settings.builtin_prompts:
        limit: int | None = None  # of prompts without a given answer, lest most of them be of no use
        if settings.answers is Answers.given:
            limit = settings.held_out_prompts // 2
        elif settings.answers is Answers.mixed:
            limit = (settings.regenerated_prompts or 0) // 2 + settings.held_out_prompts // 2
        builtin, hashes = builtin_prompts(settings.builtin_prompts, limit, settings.seed)
        for conversation in builtin:
            clean, redactions = hygiene.redacted(conversation)
            hygiene.add(clean, redactions, hygiene.look(clean))
        sources.update(hashes, python=platform.python_version())
    return Gathered(store, sources, tally, hygiene.read, hygiene.overlaps)


def _rows(settings: DataConfig, prompts: str, tally: Tally) -> Iterator[Conversation]:
    return islice(iter_prompts(prompts, tally, settings.columns, settings.hub), settings.max_prompts)


def _keep(read: Callable[[Tally], Iterator[Conversation]], hygiene: Hygiene, parts: Parts) -> None:
    def clean(tally: Tally) -> Iterator[tuple[Conversation, int]]:
        return map(hygiene.redacted, read(tally))

    def look(row: tuple[Conversation, int]) -> Look:
        return hygiene.look(row[0])

    # what is wrong with rows is counted at the second reading
    parts.make("looked", lambda: clean(Tally(strict=hygiene.tally.strict)), look)
    found = parts.join("looked", lambda: clean(hygiene.tally), look)
    quiet = parts.group.rank > 0
    with tqdm(found, desc="conversations", unit="row", smoothing=0, delay=2, disable=quiet) as rows:
        for (conversation, redactions), seen in rows:
            hygiene.add(conversation, redactions, seen)


def reasons(tally: Tally) -> str:
    """What was left out, in words."""
    return ", ".join(f"{count} × {reason}" for reason, count in sorted(tally.counts.items())) or "none"
