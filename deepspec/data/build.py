"""Prompts in, a data artifact out: every step of preparing data, in order, for any target."""

import platform
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from deepspec.artifacts import (
    MANIFEST,
    check_whole,
    differences,
    fingerprint,
    new_artifact,
    plain,
    read_manifest,
    refuse_to_replace,
    without_name,
)
from deepspec.config.schema import Answers, DataConfig, OnError
from deepspec.data.answers import Batches, Generate, Regenerated, regenerate, regenerated, samples_of
from deepspec.data.conversation import Conversation, Tally
from deepspec.data.dataset import save_documents, save_draft_vocab, save_prompts, save_rows, write_jsonl
from deepspec.data.documents import Reader
from deepspec.data.hygiene import Hygiene
from deepspec.data.prompts import iter_prompts, prompts_sha256
from deepspec.data.selection import builtin_prompts, hold_out, to_regenerate
from deepspec.data.shapes import check_columns
from deepspec.data.store import Split, Store
from deepspec.data.summary import counts, summary
from deepspec.data.template import ChatTemplate, check_system
from deepspec.data.vocab import check_vocab_size, choose_draft_vocab, count_supervised
from deepspec.errors import UserError

FORMAT = 2  # of the artifact; goes up when equal inputs give other rows than before
MAKE = "python -m deepspec.prepare"
ANSWERS = "answers"  # in the artifact: the target's answers as generated, for data of other settings
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


@dataclass(frozen=True)
class TargetFacts:
    """What preparing data needs to know of a target.

    eos: every id that ends an answer. identity: what the target is, for fingerprints.
    """

    tokenizer: PreTrainedTokenizerBase
    eos: tuple[int, ...]
    vocab_size: int
    max_positions: int
    identity: Mapping[str, Any]


def build(
    folder: Path,
    settings: DataConfig,
    gathered: Gathered,
    target: TargetFacts,
    *,
    draft_vocab_size: int | None,
    generate: Generate,
    say: Callable[[str], None] = print,
    overwrite: bool = False,
    made_by: str = MAKE,
) -> dict[str, Any]:
    """Write the data artifact `folder`, unless it is there already, made of the same things; its manifest.

    One that was made of other things stays, and is an error, unless `overwrite`. made_by: the command that
    makes it, for messages.

    generate: the target's ability to answer (see `deepspec.data.answers`); finished batches wait in a folder
    beside `folder` until the artifact is whole, so a stopped run loses at most one. `UserError` for settings,
    files or rows that cannot be used, before anything is generated.
    """
    template = ChatTemplate(
        target.tokenizer,
        target.eos,
        arguments=settings.template_args,
        thinking=settings.thinking,
        tags=settings.thinking_tags,
    )
    _check_target(settings, target, template, draft_vocab_size)
    inputs = {
        "format": FORMAT,
        "settings": {key: value for key, value in deciding(settings).items() if key != "prompts"},
        "sources": gathered.sources,
        "target": dict(target.identity),
        "draft_vocab_size": draft_vocab_size,
    }
    name = _made_of(inputs)
    work = work_folder(folder)
    if (folder / MANIFEST).is_file():
        manifest = read_manifest(folder, made_by, ("inputs.target.name", "inputs.draft_vocab_size"))
        if _made_of(manifest["inputs"]) == name:
            check_whole(folder, manifest, made_by)
            shutil.rmtree(work, ignore_errors=True)
            say(f"{folder} is complete already (fingerprint {manifest.get('fingerprint')}).")
            return manifest
        difference = differences(_by_setting(manifest["inputs"]), _by_setting(inputs))
        if not overwrite:
            raise refuse_to_replace(folder, difference)
        say(f"{folder} was made with other settings ({difference}): replacing it (overwrite=true).")
    reader = Reader(template, settings.max_length, target.vocab_size, gathered.tally, settings.supervise)
    recipe = {
        "target": without_name(target.identity),
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "max_new_tokens": settings.max_new_tokens,
        "batch_size": settings.batch_size,
    }
    batches = Batches(generate, work, recipe, earlier=folder / ANSWERS)
    prompts = _documents(settings, reader, gathered.store, batches)
    manifest = {"stage": "prepare", "fingerprint": name, "config": plain(settings), "inputs": inputs}
    _write(folder, manifest, target, reader, gathered, prompts, batches)
    gathered.store.close()
    shutil.rmtree(work, ignore_errors=True)
    say(summary(manifest, folder))
    return manifest


def _by_setting(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """An artifact's inputs under the names of the settings, for a person."""
    named = {key: value for key, value in inputs.items() if key not in ("settings", "draft_vocab_size")}
    named["target"] = without_name(inputs.get("target", {}))
    return {**named, "data": inputs.get("settings"), "draft.vocab_size": inputs.get("draft_vocab_size")}


def _made_of(inputs: Mapping[str, Any]) -> str:
    """The fingerprint of an artifact's inputs, whatever the target was called when it was made."""
    return fingerprint({**inputs, "target": without_name(inputs.get("target", {}))})


def _check_target(
    settings: DataConfig, target: TargetFacts, template: ChatTemplate, draft_vocab_size: int | None
) -> None:
    if settings.max_length > target.max_positions:
        raise UserError(
            f"data.max_length={settings.max_length} is longer than the {target.max_positions} positions the "
            "target was made for: lower it."
        )
    if settings.system:
        check_system(template, settings.system)
    check_vocab_size(draft_vocab_size, target.tokenizer, target.eos, target.vocab_size)


def _write(
    folder: Path,
    manifest: dict[str, Any],
    target: TargetFacts,
    reader: Reader,
    gathered: Gathered,
    prompts: list[dict[str, Any]],
    batches: Batches,
) -> None:
    """Choose the draft vocabulary, pack, save; `manifest` gets the counts."""
    documents, tally = gathered.store.documents(), reader.tally

    def frequency(split: Split) -> Tensor:
        own = ((item.tokens, item.loss_mask) for item in documents if item.split == split)
        return count_supervised(own, target.vocab_size)

    train, held = frequency("train"), frequency("held_out")
    if int(train.sum()) == 0:
        raise UserError(f"No prompt leaves a token to learn from. Left out: {_reasons(tally)}.")
    size = manifest["inputs"]["draft_vocab_size"]
    vocab = choose_draft_vocab(train, size, target.tokenizer, target.eos)
    own = "plain (the tokenizer has none)" if reader.template.plain else "the tokenizer's own"
    with new_artifact(folder, manifest) as new:
        save_documents(new, documents)
        save_prompts(new, prompts)
        batches.keep(new / ANSWERS)
        save_draft_vocab(new, vocab.target_ids)
        splits: tuple[Split, ...] = ("train", "held_out")
        rows: dict[str, int] = {
            split: save_rows(new, split, documents, reader.max_length, _pad(target)) for split in splits
        }
        if tally.rejects:
            write_jsonl(new / "rejects.jsonl", tally.rejects)
        if gathered.overlaps:
            write_jsonl(new / "overlaps.jsonl", gathered.overlaps)
        manifest["template"] = own
        manifest["counts"] = {
            **counts(gathered.store, rows, reader.max_length, len(prompts)),
            "read": gathered.read,
            "shapes": dict(sorted(tally.shapes.items())),
            "left_out": dict(sorted(tally.counts.items())),
            "noted": {key: count for key, count in sorted((reader.numbers + tally.notes).items()) if count},
        }
        manifest["draft_vocab"] = {
            "size": vocab.size,
            "full": vocab.target_ids is None,
            "always_kept": vocab.always,
            "supervised_tokens_seen": vocab.seen,
            "coverage_train": vocab.coverage(train),
            "coverage_held_out": vocab.coverage(held) if int(held.sum()) else None,
        }


def work_folder(folder: Path) -> Path:
    """Where finished batches wait until the artifact `folder` is whole."""
    return folder.with_name(f".{folder.name}.work")


def check_settings(settings: DataConfig) -> None:
    """`UserError` for settings that do not go together; bounds of single numbers are the configuration's."""
    if settings.prompts is None and settings.builtin_prompts == 0:
        raise UserError("There are no prompts: set data.prompts to a file, or data.builtin_prompts above 0.")
    check_columns(settings.columns)
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
    return {key: value for key, value in plain(settings).items() if key not in NOT_DECIDING}


def gather(settings: DataConfig, work: Path | None = None) -> Gathered:
    """The conversations of the prompts source and of the built-in ones, cleaned.

    Needs no target, so that a wrong setting or a bad file is known in seconds: `UserError`. They wait in a
    file in the folder `work` (None: in a temporary file).
    """
    check_settings(settings)
    tally = Tally(strict=settings.on_error is OnError.strict)
    store = Store(work / "conversations.sqlite" if work else None)
    hygiene = Hygiene(settings, store, tally)
    sources: dict[str, Any] = {}
    if settings.prompts is not None:
        sources["prompts"] = prompts_sha256(settings.prompts)
        rows = iter_prompts(settings.prompts, tally, settings.columns, settings.hub)
        _keep(islice(rows, settings.max_prompts), hygiene)
        if store.count() == 0:
            raise UserError(f"{settings.prompts} leaves no prompt to use. Left out: {_reasons(tally)}.")
    if settings.builtin_prompts:
        limit: int | None = None  # of prompts without a given answer, lest most of them be of no use
        if settings.answers is Answers.given:
            limit = settings.held_out_prompts // 2
        elif settings.answers is Answers.mixed:
            limit = (settings.regenerated_prompts or 0) // 2 + settings.held_out_prompts // 2
        builtin, hashes = builtin_prompts(settings.builtin_prompts, limit, settings.seed)
        _keep(builtin, hygiene)
        sources.update(hashes, python=platform.python_version())
    if settings.decontaminate:
        sources["decontaminate"] = [prompts_sha256(name) for name in settings.decontaminate]
    return Gathered(store, sources, tally, hygiene.read, hygiene.overlaps)


def _keep(conversations: Iterable[Conversation], hygiene: Hygiene) -> None:
    with tqdm(conversations, desc="conversations", unit="row", smoothing=0, delay=2) as rows:
        for conversation in rows:
            hygiene.add(conversation)


def _documents(settings: DataConfig, reader: Reader, store: Store, batches: Batches) -> list[dict[str, Any]]:
    """Split, answer, render: documents of both sides into the store; returns the held-out prompts."""
    tally = reader.tally
    reader.usable(store, settings.system, settings.answers is Answers.regenerated, settings.seed)
    if store.count() == 0:
        raise UserError(f"No prompt is left after filtering. Left out: {_reasons(tally)}.")
    held = hold_out(store, settings.held_out_prompts, tally)
    if held < settings.held_out_prompts:
        reader.numbers["held-out prompts fewer than asked"] = settings.held_out_prompts - held
    count = {Answers.regenerated: store.count(), Answers.given: 0}.get(
        settings.answers, settings.regenerated_prompts or 0
    )
    to_regenerate(store, count, settings.seed)
    for n, conversation in store.conversations("NOT anew"):
        if conversation.row or any(message["role"] == "assistant" for message in conversation.messages):
            store.add_documents(n, reader.given(conversation))
        else:
            tally.drop_conversation(conversation, "no given answer, and not regenerated")
    regenerate(
        store,
        reader.template,
        batches,
        batch_size=settings.batch_size,
        longest_prompt=reader.longest_prompt,
        seed=settings.seed,
        samples=settings.samples,
        tally=tally,
    )
    prompts = []
    for n, conversation in store.conversations("anew", "id"):
        side = store.one("SELECT side FROM conversation WHERE n = ?", (n,))
        for sample in range(samples_of(store, n, settings.samples)):
            item = regenerated(store, n, conversation, sample)
            if item.turns:
                store.add_documents(n, reader.regenerated(item, side))
                if side == "held_out":
                    prompts.append(_prompt(item))
    return prompts


def _prompt(item: Regenerated) -> dict[str, Any]:
    """A held-out prompt: the last question, with the target's own answers to those before it."""
    return {
        "id": item.conversation.id,
        "category": item.conversation.category,
        "messages": item.messages[:-1],
        "tokens": item.turns[-1].prompt,
    }


def _pad(target: TargetFacts) -> int:
    pad = target.tokenizer.pad_token_id
    return int(pad) if pad is not None else min(target.eos, default=0)


def _reasons(tally: Tally) -> str:
    return ", ".join(f"{count} × {reason}" for reason, count in sorted(tally.counts.items())) or "none"
