"""`python -m deepspec.train +recipe=…`: a data artifact and a target to a trained draft."""

if __name__ == "__main__":
    from deepspec.config.app import start

    start("train")  # before the imports below, which take seconds

import shutil
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator, PartialState
from torch import nn

from deepspec.artifacts import (
    MANIFEST,
    check_whole,
    fingerprint,
    new_artifact,
    plain,
    read_manifest,
    refuse_to_replace,
    without_name,
)
from deepspec.config.app import command
from deepspec.config.machines import flops_of
from deepspec.config.schema import Config, FeatureSource, Precision, StoreFormat, Tracker
from deepspec.data.dataset import load_rows
from deepspec.drafts.contract import Drafter, TrainableDraft
from deepspec.drafts.registry import layers_copied, new_draft
from deepspec.errors import UserError
from deepspec.evaluation.prompts import fitting, read_held_out, spread
from deepspec.prepared import draft_vocab, prepared_data
from deepspec.target import Edges, Target, load_edges, load_target
from deepspec.target.features import FeatureStore, StoredRows, check_store
from deepspec.target.fit import check_fit, same_dtype
from deepspec.training.batches import Rows
from deepspec.training.checkpoint import Counters, recipe_difference, save_draft
from deepspec.training.launch import (
    Processes,
    describe,
    new_accelerator,
    precision_of,
    processes,
    with_accumulation,
)
from deepspec.training.loop import Run, Trained, train
from deepspec.training.memory import split_budget
from deepspec.training.norm_input import settle_norm_input
from deepspec.training.remote import FromServer
from deepspec.training.saved_draft import start_from, weights_sha256
from deepspec.training.sources import FromStore, Sources, online
from deepspec.training.trackers import new_tracker

# Settings of `train` that decide what is learnt; the others (logging, checkpoints, …) may change on resuming.
DECIDES = (
    *("epochs", "max_steps", "optimizer", "learning_rate", "warmup", "weight_decay", "betas", "eps", "clip"),
    *("ema", "loss", "keep_best", "patience", "stop_when", "seed"),
)

NOT_SHOWN = ("meter", "logged_at", "spikes", "worse", "best")


def run(config: Config) -> Path:
    """Train `<out>/draft` unless it is complete already; its path. `UserError` for what a person can mend.

    Under torchrun or `accelerate launch` every process calls this; process 0 writes.
    """
    with processes(config.target.device, config.train.parallel) as joined:
        config = replace(config, train=with_accumulation(config.train, joined.state.num_processes))
        return _run(config, joined)


def _run(config: Config, joined: Processes) -> Path:
    out, command_again = Path(config.out), command("train")
    data = prepared_data(config, out / "data", joined.state)
    if joined.state.is_main_process:
        check_whole(out / "data", data, command("prepare"))
    stored = _from_store(config, joined)
    elsewhere = stored or config.features.source is FeatureSource.server
    target = _target(config, data, joined.state, whole=not elsewhere)
    allow, what = config.target.allow_other_target, f"The data in {out / 'data'}"
    notes = check_fit(data["inputs"]["target"], target.identity(), allow, what)
    accelerator = new_accelerator(joined, config.train, lambda: precision_of(target.dtype))
    say: Callable[[str], None] = print if accelerator.is_main_process else lambda line: None
    recipe = _recipe(config, data, target, accelerator, stored)
    if accelerator.is_main_process:
        _make_room(config, out, recipe, say)
    accelerator.wait_for_everyone()
    if config.train.resume == "auto" and _made_of(out / "draft", recipe):
        say(f"{out / 'draft'} is complete already.")
        return out / "draft"
    for line in [*describe(accelerator, joined.kind, config.train), *notes]:
        say(line)
    # under bf16 autocast a norm's weight is float32, and torch says so once in each run
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    torch.manual_seed(config.train.seed)
    draft = new_draft(config.draft, target, draft_vocab(out / "data", data))
    if isinstance(target, Edges):
        target.release_layers()
    if folder := getattr(config.draft, "init_from", None):
        draft = start_from(draft, Path(folder))
    rows, held_out = load_rows(out / "data", "train"), load_rows(out / "data", "held_out")
    sources = _sources(config, data, target, draft, joined, stored)
    settle_norm_input(
        draft,
        held_out if len(held_out) else rows,
        sources.held_out,
        accelerator,
        config.train.batch_size,
        say,
    )
    full_speed = _full_speed(config, target, rows, accelerator)
    temperature = data["config"]["temperature"]
    kind = config.train.tracker if accelerator.is_main_process else Tracker.none
    with closing(new_tracker(kind, config.name, recipe, out, say)) as tracker:
        settings = Run(target, config.train, accelerator, out, tracker, recipe, command_again, temperature)
        settings.sources, settings.full_speed = sources, full_speed
        if config.train.decode_every:
            settings.decode = _decoder(config, target, out / "data")
        trained = train(draft, rows, held_out, settings)
    if accelerator.is_main_process:
        skipped = _skipped(trained.counters)
        notes += skipped
        _save(out / "draft", draft, recipe, trained, identity=target.identity(), warnings=notes)
        say(f"{out / 'draft'} is trained: {_result(trained.counters)}.")
        for line in skipped:
            say(f"warning: {line}")
    accelerator.wait_for_everyone()
    return out / "draft"


def _full_speed(config: Config, target: Target, rows: Rows, accelerator: Accelerator) -> float | None:
    """Tokens a second that the devices would learn at their data sheet's rate, for the model FLOPs utilisation that
    process 0 records."""
    if not accelerator.is_main_process:
        return None
    if config.hardware.name != "here":
        rate: float | None = config.hardware.flops
    else:
        rate = flops_of(torch.cuda.get_device_name()) if accelerator.device.type == "cuda" else None
    if not rate:
        return None
    from deepspec.planning.training_work import training_work

    row = {name: column[None] for name, column in rows[0].items()}
    low = torch.bfloat16 if accelerator.mixed_precision == Precision.bf16.value else None
    work = training_work(config.draft, target, config.train.loss, row, low)
    return rate * accelerator.num_processes * float((row["documents"] >= 0).sum()) / work.operations


def _from_store(config: Config, joined: Processes) -> bool:
    """Whether the features come from a store; with `auto_prepare` a missing or shorter one is made.

    `auto` uses a store that is there, and makes none unasked.
    """
    from deepspec.capture import capture, store_is_there

    source = config.features.source
    if source in (FeatureSource.online, FeatureSource.server):
        return False
    if config.auto_prepare:
        return capture(config, joined) is not None
    if source is FeatureSource.auto and not store_is_there(config):
        if joined.state.is_main_process:
            print(
                "features.source=auto: online, as there is no store. If one pays and fits, this makes it: "
                f"{command('capture')}"
            )
        return False
    return True


def _target(config: Config, data: dict[str, Any], processes: PartialState, *, whole: bool) -> Target:
    """The target; the main process first, so that one which must be converted is converted once.

    whole: else its edges only, and the layers that a fresh draft starts from. Decoding while training needs all.
    """
    settings = same_dtype(config.target, data["inputs"]["target"])
    with processes.main_process_first():
        if whole or config.train.decode_every:
            return load_target(settings, getattr(config.draft, "capture_layers", None) or ())
        return load_edges(settings, lambda count: layers_copied(config.draft, count))


def _sources(
    config: Config,
    data: dict[str, Any],
    target: Target,
    draft: TrainableDraft,
    joined: Processes,
    stored: bool,
) -> Sources:
    """Where this draft's features come from. `UserError` where a store is not this target's, draft's or data's."""
    features, layers = config.features, draft.capture_layers
    if stored:
        from deepspec.capture import order

        wanted = order(config, data, target, draft)
        store = FeatureStore(wanted.folder, wanted.made_by)
        check_store(store, wanted.made_of, wanted.data)
        rows = StoredRows(store, layers, target.device, target.dtype)
        return Sources(FromStore(rows, target, features.prefetch), FromStore(rows, target))
    if features.source is FeatureSource.server:
        remote = partial(
            FromServer,
            target,
            layers,
            features.servers,
            seconds=features.server_seconds,
            made_by="python -m deepspec.serve_features with this target",
            resume=command("train"),
            batch_size=features.batch_size,
        )
        learning, held_out = split_budget(config.train.keep_features_gib)
        return Sources(remote(memory=learning, ahead=features.prefetch), remote(memory=held_out))
    memory = config.train.keep_features_gib
    if not features.devices:
        return online(target, layers, memory, features.batch_size)
    device = features.devices[joined.state.local_process_index % len(features.devices)]
    settings = replace(same_dtype(config.target, data["inputs"]["target"]), device=device)
    return online(load_target(settings), layers, memory, features.batch_size, target, features.prefetch)


def _recipe(
    config: Config, data: dict[str, Any], target: Target, accelerator: Accelerator, stored: bool
) -> dict[str, Any]:
    """All that decides the trained draft."""
    train_settings = plain(config.train)
    rows_a_step = accelerator.num_processes * config.train.batch_size * config.train.accumulation
    return {
        "data": data["fingerprint"],
        "target": without_name(target.identity()),
        "draft": plain(config.draft),
        **_started_from(config),
        **_rounded(config, target, stored),
        "train": {key: train_settings[key] for key in DECIDES},
        "precision": accelerator.mixed_precision,
        "effective_batch": rows_a_step,
    }


def _rounded(config: Config, target: Target, stored: bool) -> dict[str, str]:
    """A store's format, where its features are not the target's own to the last bit."""
    format = config.features.format
    exact = format is StoreFormat.fp32 or (format is StoreFormat.bf16 and target.dtype == torch.bfloat16)
    return {"features": format.value} if stored and not exact else {}


def _started_from(config: Config) -> dict[str, str]:
    """What the weights of `draft.init_from` are: another draft may lie in the same folder by now."""
    folder = getattr(config.draft, "init_from", None)
    return {} if folder is None else {"init_from": weights_sha256(Path(folder))}


def _decoder(config: Config, target: Target, data: Path) -> Callable[[TrainableDraft], dict[str, Any]]:
    """τ by greedy decoding of held-out prompts, for evaluations during training."""
    from deepspec.decoding import Engine, Request

    target.require("chain")
    k, longest = config.train.eval_steps, config.decode.max_new_tokens
    prompts = read_held_out(data, command("prepare"))
    prompts, _ = fitting(prompts, target.max_positions - longest)
    requests = [
        Request(list(prompt.tokens), longest, eos=target.eos, id=prompt.id)
        for prompt in spread(prompts, config.train.decode_prompts)
    ]

    @torch.no_grad()
    def decode(draft: TrainableDraft) -> dict[str, Any]:
        module: nn.Module = draft
        module.to(target.device, target.dtype)
        results = Engine(target, cast(Drafter, draft), k=k).generate(requests)
        rounds = [one for result in results for one in result.rounds]
        committed = sum(one.committed for one in rounds)
        return {
            "decoded_tau": committed / len(rounds) if rounds else None,
            "decoded_rounds": len(rounds),
            "decoded_tokens": committed,
            "decoded_prompts": len(requests),
        }

    return decode


def _made_of(folder: Path, recipe: dict[str, Any]) -> bool:
    """Whether a finished draft has this recipe."""
    if not (folder / MANIFEST).is_file():
        return False
    return not recipe_difference(read_manifest(folder, command("train")).get("recipe", {}), recipe)


def _make_room(config: Config, out: Path, recipe: dict[str, Any], say: Callable[[str], None]) -> None:
    """A draft or checkpoints of another recipe are an error, or with `overwrite` give way; a finished draft of
    this one must be whole. The old draft stays until the new one replaces it."""
    again, draft = command("train"), out / "draft"
    starts_over = config.train.resume == "never"  # then checkpoints go in any case
    for folder in [draft, *([] if starts_over else sorted((out / "checkpoints").glob("*-*")))]:
        try:
            manifest = read_manifest(folder, again)
        except UserError:
            if folder == draft and (folder / MANIFEST).exists():
                raise
            continue  # none, or a checkpoint that was cut: resuming passes it over
        if difference := recipe_difference(manifest.get("recipe", {}), recipe):
            if not config.overwrite:
                raise refuse_to_replace(folder, difference)
            say(f"{folder} was made with other settings ({difference}): replacing it (overwrite=true).")
            if folder != draft:
                shutil.rmtree(folder)
        elif folder == draft and not starts_over:
            check_whole(folder, manifest, again)


def _save(
    folder: Path,
    draft: TrainableDraft,
    recipe: dict[str, Any],
    trained: Trained,
    *,
    identity: dict[str, Any],
    warnings: list[str],
) -> None:
    counters = trained.counters
    summary = {key: value for key, value in asdict(counters).items() if key not in NOT_SHOWN}
    if counters.best is not None:
        summary["evaluation"] = counters.best["evaluation"]  # of the draft that is exported
        summary["best"] = {key: value for key, value in counters.best.items() if key != "evaluation"}
    manifest = {
        "stage": "train",
        "fingerprint": fingerprint(recipe),
        "recipe": recipe,
        "target": identity,
        "capture_layers": draft.capture_layers,
        "data": recipe["data"],
        "training": summary,
        "warnings": warnings,
    }
    with new_artifact(folder, manifest) as new:
        save_draft(draft, new, trained.weights)


def _result(counters: Counters) -> str:
    steps = f"{counters.step} step{'s' * (counters.step != 1)}"
    parts = [steps, f"{counters.tokens} tokens", f"{counters.seconds:.0f} s of training"]
    evaluation = counters.evaluation
    if counters.best is not None and counters.best["step"] != counters.step:
        evaluation = counters.best["evaluation"]
        parts.append(f"the draft of step {counters.best['step']}, the best by {counters.best['by']}")
    if evaluation and evaluation["tau"] is not None:
        parts.append(f"offline τ {evaluation['tau']:.2f} at K = {evaluation['k']}")
    return ", ".join(parts)


def _skipped(counters: Counters) -> list[str]:
    """A warning for the draft's manifest, and so for every result of it, where steps were not taken."""
    if not counters.skipped:
        return []
    return [
        f"{counters.skipped} of {counters.step} training steps were skipped, as their loss or gradient was not "
        "finite: the draft has learnt from the others only. A lower train.learning_rate or train.precision=no "
        "avoids it."
    ]
