"""Prompts in, a data artifact out: every step of preparing data, in order, for any target."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
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
from deepspec.config.schema import Answers, DataConfig, Regenerate
from deepspec.data.answers import Batches, Generate, Regenerated, regenerate, regenerated, samples_of
from deepspec.data.augment import augment, read_augmentations
from deepspec.data.augment.contract import Chat
from deepspec.data.dataset import save_documents, save_draft_vocab, save_prompts, save_rows, write_jsonl
from deepspec.data.documents import Reader
from deepspec.data.gather import Gathered, deciding, reasons
from deepspec.data.ledger import Ledger
from deepspec.data.selection import hold_out, to_regenerate
from deepspec.data.served import NO_ANSWER, Server
from deepspec.data.servers import Pool, Sampling
from deepspec.data.sharing import ALONE, Group, Parts
from deepspec.data.store import Split, Store, stored
from deepspec.data.summary import counts, summary
from deepspec.data.template import ChatTemplate, check_system
from deepspec.data.vocab import check_vocab_size, choose_draft_vocab, count_supervised
from deepspec.errors import UserError

FORMAT = 2  # of the artifact; goes up when equal inputs give other rows than before
MAKE = "python -m deepspec.prepare"
ANSWERS = "answers"  # in the artifact: the target's answers as generated, for data of other settings


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
    group: Group = ALONE,
    retry_errors: bool = False,
    say: Callable[[str], None] = print,
    overwrite: bool = False,
    made_by: str = MAKE,
) -> dict[str, Any]:
    """Write the data artifact `folder`, unless it is there already, made of the same things; its manifest.

    One that was made of other things stays, and is an error, unless `overwrite`. made_by: the command that
    makes it, for messages.

    generate: the target's ability to answer (see `deepspec.data.answers`); finished batches wait in a folder
    beside `folder` until the artifact is whole, so a stopped run loses at most one. retry_errors: ask servers
    again for what failed in an earlier run, also where the artifact is whole without it. `UserError` for
    settings, files or rows that cannot be used, before anything is generated.

    group: the processes that make the artifact together, each with everything gathered. All walk the same steps;
    what takes long is divided (`deepspec.data.sharing`), the first one alone asks servers, joins and writes.
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
    if group.rank > 0:
        say = _silent
    if (folder / MANIFEST).is_file():
        manifest = read_manifest(folder, made_by, ("inputs.target.name", "inputs.draft_vocab_size"))
        failed = manifest.get("counts", {}).get("failed", 0)
        if _made_of(manifest["inputs"]) != name:
            difference = differences(_by_setting(manifest["inputs"]), _by_setting(inputs))
            if not overwrite:
                raise refuse_to_replace(folder, difference)
            say(f"{folder} was made with other settings ({difference}): replacing it (overwrite=true).")
        elif not (retry_errors and failed):
            if group.rank == 0:
                check_whole(folder, manifest, made_by)
            _end(gathered, work, group)
            say(f"{folder} is complete already (fingerprint {manifest.get('fingerprint')}).")
            return manifest
    reader = Reader(template, settings.max_length, target.vocab_size, gathered.tally, settings.supervise)
    recipe = {
        "target": without_name(target.identity),
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "max_new_tokens": settings.max_new_tokens,
        "batch_size": settings.batch_size,
    }
    manifest = {"stage": "prepare", "fingerprint": name, "config": plain(settings), "inputs": inputs}
    with stored(work):
        _usable(settings, reader, gathered.store, Parts(work, group, name))
        together = group if _by_engine(settings) else ALONE  # servers are asked by one process
        if together.size > 1 or group.rank == 0:
            engine = Batches(generate, work, recipe, folder / ANSWERS, together)
            with _answerer(settings, engine, folder / ANSWERS, retry_errors) as answerer:
                _documents(settings, reader, gathered.store, answerer, Parts(work, together, name))
                if group.rank == 0:
                    prompts = _regenerated(settings, reader, gathered.store)
                    _write(folder, manifest, target, reader, gathered, prompts, answerer)
    _end(gathered, work, group)
    if group.rank > 0:
        return read_manifest(folder, made_by)
    say(summary(manifest, folder))
    return manifest


def _by_engine(settings: DataConfig) -> bool:
    return settings.regenerate is Regenerate.engine or settings.answers is Answers.given


def _silent(line: str) -> None:
    """What the first process says is enough."""


def _end(gathered: Gathered, work: Path, group: Group) -> None:
    """The artifact is whole: the working files go, when no process needs them any more."""
    gathered.store.close()
    group.wait()
    if group.rank == 0:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _answerer(
    settings: DataConfig, engine: Batches, earlier: Path, retry_errors: bool
) -> Iterator[Batches | Server]:
    """What answers: the engine in batches, or servers. earlier: the answers of an artifact made before."""
    if _by_engine(settings):
        yield engine
        return
    sampling = Sampling(settings.temperature, settings.top_p, settings.max_new_tokens, settings.server_args)
    pool = Pool(
        settings.servers,
        sampling,
        model=settings.server_model,
        concurrency=settings.concurrency,
        timeout=settings.timeout,
        retries=settings.retries,
    )
    ledger = Ledger(engine.work / "answers.sqlite")
    try:
        ledger.take_over(earlier)
        if retry_errors:
            ledger.forget_failures()
        asked = {"model": pool.model, "seed": settings.seed, **sampling.body(0)}
        yield Server(pool, ledger, asked, settings.seed)
    finally:
        pool.close()
        ledger.close()


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
    answerer: Batches | Server,
) -> None:
    """Choose the draft vocabulary, pack, save; `manifest` gets the counts."""
    documents, tally = gathered.store.documents(), reader.tally

    def frequency(split: Split) -> Tensor:
        own = ((item.tokens, item.loss_mask) for item in documents if item.split == split)
        return count_supervised(own, target.vocab_size)

    train, held = frequency("train"), frequency("held_out")
    if int(train.sum()) == 0:
        raise UserError(f"No prompt leaves a token to learn from. Left out: {reasons(tally)}.")
    size = manifest["inputs"]["draft_vocab_size"]
    vocab = choose_draft_vocab(train, size, target.tokenizer, target.eos)
    own = "plain (the tokenizer has none)" if reader.template.plain else "the tokenizer's own"
    with new_artifact(folder, manifest) as new:
        save_documents(new, documents)
        save_prompts(new, prompts)
        answerer.keep(new / ANSWERS)
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
            "failed": sum(count for reason, count in tally.counts.items() if reason.endswith(NO_ANSWER)),
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


def _usable(settings: DataConfig, reader: Reader, store: Store, parts: Parts) -> None:
    reader.usable(store, settings.system, settings.answers is Answers.regenerated, settings.seed, parts)
    if store.count() == 0:
        raise UserError(f"No prompt is left after filtering. Left out: {reasons(reader.tally)}.")


def _documents(
    settings: DataConfig, reader: Reader, store: Store, answerer: Batches | Server, parts: Parts
) -> None:
    """Split, augment, render what has an answer and answer the rest, all into the store."""
    tally = reader.tally
    held = hold_out(store, settings.held_out_prompts, tally)
    if held < settings.held_out_prompts:
        reader.numbers["held-out prompts fewer than asked"] = settings.held_out_prompts - held
    augmentations = read_augmentations(settings.augment)
    if augmentations:
        answers_all = settings.answers is Answers.regenerated
        augment(
            store,
            augmentations,
            lambda item: reader.fits(item, store, answers_all),
            _chat(answerer, reader, settings.batch_size),
            tally.notes,
        )
    count = {Answers.regenerated: store.count(), Answers.given: 0}.get(
        settings.answers, settings.regenerated_prompts or 0
    )
    to_regenerate(store, count, settings.seed)
    reader.all_given(store, parts)
    if isinstance(answerer, Server):
        answerer.regenerate(store, reader.template, samples=settings.samples, tally=tally)
    else:
        regenerate(
            store,
            reader.template,
            answerer,
            batch_size=settings.batch_size,
            longest_prompt=reader.longest_prompt,
            seed=settings.seed,
            samples=settings.samples,
            tally=tally,
        )


def _regenerated(settings: DataConfig, reader: Reader, store: Store) -> list[dict[str, Any]]:
    """Documents of the new answers into the store; returns the held-out prompts."""
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


def _chat(answerer: Batches | Server, reader: Reader, batch_size: int) -> Chat:
    """Single questions to whatever answers; a cut or missing answer is None."""
    if isinstance(answerer, Server):
        return answerer.chat
    template = reader.template

    def chat(texts: list[str], seeds: list[int]) -> list[str | None]:
        prompts = [template.prompt([{"role": "user", "content": text}]) for text in texts]
        batches = []
        for start in range(0, len(texts), batch_size):
            part = range(start, min(start + batch_size, len(texts)))
            fitting = [at for at in part if len(prompts[at]) <= reader.longest_prompt]
            if fitting:
                batches.append((fitting, [prompts[at] for at in fitting], [seeds[at] for at in fitting]))
        answerer.share((asked, drawn) for _, asked, drawn in batches)
        found: list[str | None] = [None] * len(texts)
        for fitting, asked, drawn in batches:
            made, _ = answerer.answers(asked, drawn)
            for at, answer in zip(fitting, made, strict=True):
                ended = bool(answer) and answer[-1] in template.eos
                found[at] = template.answer_text(answer) if ended else None
        return found

    return chat


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
