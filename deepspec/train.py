"""`python -m deepspec.train +recipe=…`: a data artifact and a target to a trained draft."""

if __name__ == "__main__":
    from deepspec.config.app import start

    start("train")  # before the imports below, which take seconds

import shutil
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator, PartialState
from safetensors import SafetensorError
from torch import Tensor, nn

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
from deepspec.config.schema import Config, Precision, Tracker
from deepspec.data import deciding
from deepspec.data.dataset import load_draft_vocab, load_rows
from deepspec.data.prompts import prompts_sha256
from deepspec.drafts.contract import Drafter, TrainableDraft
from deepspec.drafts.registry import new_draft
from deepspec.errors import UserError
from deepspec.evaluation.prompts import fitting, read_held_out, spread
from deepspec.target import Target, load_target
from deepspec.target.fit import check_fit, same_dtype
from deepspec.training.checkpoint import Counters, recipe_difference, save_draft
from deepspec.training.launch import Processes, describe, new_accelerator, processes, with_accumulation
from deepspec.training.loop import Run, Trained, train
from deepspec.training.saved_draft import start_from, weights_sha256
from deepspec.training.trackers import new_tracker

# Of the data's manifest, what is read here.
DATA_KEYS = ("fingerprint", "config.temperature", "inputs.target.name", "inputs.draft_vocab_size")
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
    data = _data(config, out / "data", joined.state)
    if joined.state.is_main_process:
        check_whole(out / "data", data, command("prepare"))
    target = _target(config, data, joined.state)
    allow, what = config.target.allow_other_target, f"The data in {out / 'data'}"
    notes = check_fit(data["inputs"]["target"], target.identity(), allow, what)
    accelerator = new_accelerator(joined, config.train, lambda: _precision_of(target))
    say: Callable[[str], None] = print if accelerator.is_main_process else lambda line: None
    recipe = _recipe(config, data, target, accelerator)
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
    draft = new_draft(config.draft, target, _draft_vocab(out / "data", data))
    if folder := getattr(config.draft, "init_from", None):
        draft = start_from(draft, Path(folder))
    rows, held_out = load_rows(out / "data", "train"), load_rows(out / "data", "held_out")
    temperature = data["config"]["temperature"]
    kind = config.train.tracker if accelerator.is_main_process else Tracker.none
    with closing(new_tracker(kind, config.name, recipe, out, say)) as tracker:
        settings = Run(target, config.train, accelerator, out, tracker, recipe, command_again, temperature)
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


def _target(config: Config, data: dict[str, Any], processes: PartialState) -> Target:
    """The target; the main process first, so that one which must be converted is converted once."""
    settings = same_dtype(config.target, data["inputs"]["target"])
    with processes.main_process_first():
        return load_target(settings, getattr(config.draft, "capture_layers", None) or ())


def _data(config: Config, folder: Path, processes: PartialState) -> dict[str, Any]:
    """The data's manifest; makes the data if it is missing and that was asked for."""
    missing = not (folder / MANIFEST).is_file()
    if config.auto_prepare and processes.num_processes == 1 and (missing or _stale(config, folder)):
        from deepspec.prepare import run as prepare

        prepare(config)
    manifest = read_manifest(folder, command("prepare"), DATA_KEYS)
    if stale := _stale(config, folder):
        raise UserError(
            f"{folder} was made with other settings ({stale}). Set them back, choose another folder (out=...), "
            f"or make it again: {command('prepare')} overwrite=true"
        )
    return manifest


def _stale(config: Config, folder: Path) -> str:
    """What the data was not made with: settings, the draft vocabulary's size, the prompts; empty if nothing.

    The prompts file counts by its content, wherever it lies. One that is no longer there cannot have changed.
    """
    manifest = read_manifest(folder, command("prepare"), DATA_KEYS)
    now = {f"data.{key}": value for key, value in deciding(config.data).items()}
    now["draft.vocab_size"] = getattr(config.draft, "vocab_size", None)
    then = {f"data.{key}": value for key, value in manifest["config"].items()}
    then["draft.vocab_size"] = manifest["inputs"]["draft_vocab_size"]
    before, path = then.get("data.prompts"), now["data.prompts"]
    if path is not None and (path != before or Path(path).is_file()):
        now["data.prompts"] = f"{path} (sha256 {prompts_sha256(Path(path))[:16]})"
        made_of = manifest["inputs"].get("sources", {}).get("prompts")
        then["data.prompts"] = f"{path if made_of else before} (sha256 {(made_of or 'none')[:16]})"
    return ", ".join(f"{key} was {then.get(key)}, is {now[key]}" for key in now if then.get(key) != now[key])


def _draft_vocab(folder: Path, manifest: dict[str, Any]) -> Tensor | None:
    """The data's draft vocabulary; one that should be there and is not must not pass for the whole vocabulary."""
    again = f"Remove {folder} and make it again: {command('prepare')}"
    try:
        vocab = load_draft_vocab(folder)
    except (OSError, KeyError, SafetensorError) as error:
        raise UserError(f"{folder}'s draft vocabulary is damaged ({error}). {again}") from error
    if vocab is None and manifest.get("draft_vocab", {}).get("full") is False:
        raise UserError(f"{folder} has lost its draft vocabulary (draft_vocab.safetensors). {again}")
    return vocab


def _precision_of(target: Target) -> Precision:
    """`precision=auto`: as the target runs, whose format was measured or chosen."""
    return Precision.bf16 if target.dtype == torch.bfloat16 else Precision.no


def _recipe(config: Config, data: dict[str, Any], target: Target, accelerator: Accelerator) -> dict[str, Any]:
    """All that decides the trained draft."""
    train_settings = plain(config.train)
    rows_a_step = accelerator.num_processes * config.train.batch_size * config.train.accumulation
    return {
        "data": data["fingerprint"],
        "target": without_name(target.identity()),
        "draft": plain(config.draft),
        **_started_from(config),
        "train": {key: train_settings[key] for key in DECIDES},
        "precision": accelerator.mixed_precision,
        "effective_batch": rows_a_step,
    }


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
    parts = [f"{counters.step} steps", f"{counters.tokens} tokens", f"{counters.seconds:.0f} s of training"]
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
