"""Prompts in, a data artifact out: every step of preparing data, in order, for any target."""

import platform
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from deepspec.data.answers import Batches, Generate, Regenerated, regenerate
from deepspec.data.conversation import Conversation, Tally
from deepspec.data.dataset import (
    Document,
    Split,
    save_documents,
    save_draft_vocab,
    save_prompts,
    save_rows,
    write_jsonl,
)
from deepspec.data.documents import Reader
from deepspec.data.prompts import prompts_sha256, read_prompts
from deepspec.data.selection import builtin_prompts, hold_out, to_regenerate
from deepspec.data.summary import counts, summary
from deepspec.data.template import ChatTemplate, check_system
from deepspec.data.vocab import check_vocab_size, choose_draft_vocab, count_supervised
from deepspec.errors import UserError

FORMAT = 1  # of the artifact; goes up when equal inputs give other rows than before
MAKE = "python -m deepspec.prepare"
ANSWERS = "answers"  # in the artifact: the target's answers as generated, for data of other settings


@dataclass(frozen=True)
class Gathered:
    """All conversations, content hashes of where they come from, and what was left out on the way."""

    conversations: list[Conversation]
    sources: dict[str, Any]
    tally: Tally


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
    template = ChatTemplate(target.tokenizer, target.eos)
    _check_target(settings, target, template, draft_vocab_size)
    inputs = {
        "format": FORMAT,
        "settings": {key: value for key, value in plain(settings).items() if key != "prompts"},
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
    reader = Reader(template, settings.max_length, gathered.tally)
    recipe = {
        "target": without_name(target.identity),
        "temperature": settings.temperature,
        "max_new_tokens": settings.max_new_tokens,
        "batch_size": settings.batch_size,
    }
    batches = Batches(generate, work, recipe, earlier=folder / ANSWERS)
    documents, prompts = _documents(settings, reader, gathered.conversations, batches)
    manifest = {"stage": "prepare", "fingerprint": name, "config": plain(settings), "inputs": inputs}
    _write(folder, manifest, target, reader, documents=documents, prompts=prompts, batches=batches)
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
    *,
    documents: list[Document],
    prompts: list[dict[str, Any]],
    batches: Batches,
) -> None:
    """Choose the draft vocabulary, pack, save; `manifest` gets the counts."""
    train = [(item.tokens, item.loss_mask) for item in documents if item.split == "train"]
    held = [(item.tokens, item.loss_mask) for item in documents if item.split == "held_out"]
    frequency = count_supervised(train, target.vocab_size)
    if int(frequency.sum()) == 0:
        raise UserError(f"No prompt leaves a token to learn from. Left out: {_reasons(reader.tally)}.")
    size = manifest["inputs"]["draft_vocab_size"]
    vocab = choose_draft_vocab(frequency, size, target.tokenizer, target.eos)
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
        if reader.tally.rejects:
            write_jsonl(new / "rejects.jsonl", reader.tally.rejects)
        manifest["template"] = own
        manifest["counts"] = {
            **counts(documents, rows, reader.max_length, len(prompts)),
            "left_out": dict(sorted(reader.tally.counts.items())),
            "noted": {key: count for key, count in sorted(reader.numbers.items()) if count},
        }
        manifest["draft_vocab"] = {
            "size": vocab.size,
            "full": vocab.target_ids is None,
            "always_kept": vocab.always,
            "supervised_tokens_seen": vocab.seen,
            "coverage_train": vocab.coverage(frequency),
            "coverage_held_out": vocab.coverage(count_supervised(held, target.vocab_size)) if held else None,
        }


def work_folder(folder: Path) -> Path:
    """Where finished batches wait until the artifact `folder` is whole."""
    return folder.with_name(f".{folder.name}.work")


def check_settings(settings: DataConfig) -> None:
    """`UserError` for settings that do not go together; bounds of single numbers are the configuration's."""
    if settings.prompts is None and settings.builtin_prompts == 0:
        raise UserError("There are no prompts: set data.prompts to a file, or data.builtin_prompts above 0.")
    if settings.answers is Answers.mixed and settings.regenerated_prompts is None:
        raise UserError(
            "data.answers=mixed needs data.regenerated_prompts: how many prompts get the target's own answer."
        )


def gather(settings: DataConfig) -> Gathered:
    """The conversations of the prompts file and of the built-in sources.

    Needs no target, so that a wrong setting or a bad file is known in seconds: `UserError`.
    """
    check_settings(settings)
    tally = Tally(strict=settings.on_error is OnError.strict)
    found: list[Conversation] = []
    sources: dict[str, Any] = {}
    if settings.prompts is not None:
        path = Path(settings.prompts)
        sources["prompts"] = prompts_sha256(path)
        found += read_prompts(path, tally)
        if not found:
            raise UserError(f"{path} leaves no prompt to use. Left out: {_reasons(tally)}.")
    if settings.builtin_prompts:
        limit: int | None = None  # of prompts without a given answer, lest most of them be of no use
        if settings.answers is Answers.given:
            limit = settings.held_out_prompts // 2
        elif settings.answers is Answers.mixed:
            limit = (settings.regenerated_prompts or 0) // 2 + settings.held_out_prompts // 2
        builtin, hashes = builtin_prompts(settings.builtin_prompts, limit, settings.seed)
        found += builtin
        sources.update(hashes, python=platform.python_version())
    return Gathered(found, sources, tally)


def _documents(
    settings: DataConfig, reader: Reader, conversations: list[Conversation], batches: Batches
) -> tuple[list[Document], list[dict[str, Any]]]:
    """Split, answer, render: the documents of both sides and the held-out prompts."""
    tally = reader.tally
    all_regenerated = settings.answers is Answers.regenerated
    usable = reader.usable(conversations, settings.system, ignore_answers=all_regenerated)
    if not usable:
        raise UserError(f"No prompt is left after filtering. Left out: {_reasons(tally)}.")
    train, held = hold_out(usable, settings.held_out_prompts, settings.seed, tally)
    if len(held) < settings.held_out_prompts:
        reader.numbers["held-out prompts fewer than asked"] = settings.held_out_prompts - len(held)
    count = {Answers.regenerated: len(train), Answers.given: 0}.get(
        settings.answers, settings.regenerated_prompts or 0
    )
    anew = to_regenerate(train, count, settings.seed)
    documents: list[Document] = []
    for conversation in train:
        if conversation.id in anew:
            continue
        if any(message["role"] == "assistant" for message in conversation.messages):
            documents += reader.given(conversation)
        else:
            tally.drop_conversation(conversation, "no given answer, and not regenerated")
    answered = regenerate(
        [*held, *(item for item in train if item.id in anew)],
        reader.template,
        batches,
        batch_size=settings.batch_size,
        longest_prompt=reader.longest_prompt,
        seed=settings.seed,
        tally=tally,
    )
    outside = {item.id for item in held}
    for item in answered:
        documents += reader.regenerated(item, "held_out" if item.conversation.id in outside else "train")
    prompts = [_prompt(item) for item in answered if item.conversation.id in outside]
    return sorted(documents, key=lambda item: item.conversation.id), prompts


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
