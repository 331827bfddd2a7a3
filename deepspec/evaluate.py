"""`python -m deepspec.evaluate +recipe=X`: how much faster is decoding with the draft, for certain?"""

if __name__ == "__main__":
    from deepspec.config.app import start

    start("evaluate")  # before the imports below, which take seconds

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

from torch import distributed

from deepspec.artifacts import (
    check_whole,
    differences,
    fingerprint,
    plain,
    read_manifest,
    refuse_to_replace,
    without_name,
)
from deepspec.config.app import command
from deepspec.config.ranges import check
from deepspec.config.schema import Config, Dtype, OnError, Parallel
from deepspec.data.conversation import BadRow, Conversation, Tally
from deepspec.data.dataset import HELD_OUT_PROMPTS
from deepspec.data.prompts import prompts_sha256, read_prompts
from deepspec.data.template import ChatTemplate
from deepspec.decoding.engine import schedule_of
from deepspec.drafts.contract import Drafter, TrainableDraft
from deepspec.errors import UserError
from deepspec.evaluation.calibration import store
from deepspec.evaluation.fit import check_data, check_recipe
from deepspec.evaluation.journal import Journal
from deepspec.evaluation.prompts import Prompt, fitting, question, read_held_out
from deepspec.evaluation.quality.metrics import metric_path
from deepspec.evaluation.quality.score import check_metrics
from deepspec.evaluation.result import EvaluationResult, load_result, save_result
from deepspec.evaluation.run import Papers, Subject, evaluate
from deepspec.evaluation.tasks import Item, read_tasks
from deepspec.evaluation.tasks import Source as TaskSource
from deepspec.evaluation.tasks.item import Check
from deepspec.evaluation.tasks.read import check_tasks
from deepspec.evaluation.turns import following, opening, turn_id
from deepspec.pair import find_draft, load_pair
from deepspec.reporting.html import write_report
from deepspec.reporting.words import summary_lines
from deepspec.target import Target, load_target
from deepspec.training.history import read as read_history
from deepspec.training.launch import processes

WHICH = ("name", "path", "revision")  # settings of a target that say which one it is, not how it runs
HISTORY_ROWS = 1000  # of the training's history that the result file keeps


@dataclass
class Source:
    """Prompts as read before anything is loaded: ready ones of the data, or a user's conversations."""

    name: str
    path: Path
    ready: list[Prompt]
    conversations: list[Conversation]
    tally: Tally
    items: list[Item] = field(default_factory=list)
    sets: list[TaskSource] = field(default_factory=list)


@dataclass
class Shared:
    """This process among those that share the prompts. wait: until all have come here."""

    rank: int = 0
    processes: int = 1
    wait: Callable[[], None] = field(default=lambda: None)


def run(config: Config) -> Path:
    """Measure the draft in `config.out`/draft; writes evaluation/result.json and report.html beside it.

    A draft with nothing to train is measured as it is, into a folder named after it. Returns the report's path.
    What was measured with the same draft and settings is not measured again.
    UserError where a result of other settings is in the way, unless `config.overwrite`, and (after writing)
    when a greedy output differs from plain decoding and rounding is not the reason.
    """
    check(config)
    check_prompts(config)
    with sharing(config) as shared:
        return _run(config, shared)


def _run(config: Config, shared: Shared) -> Path:
    out = Path(config.out)
    found = find_draft(config)
    manifest = found.manifest
    folder = "evaluation" if found.ready is None else f"evaluation_{config.draft.algorithm}"
    if found.ready is None:
        _check_inputs(config, out, manifest)
    source = read_source(config)
    path = out / folder / "result.json"
    made_of = fingerprint(_made_of(config, manifest, source))
    done = _already_measured(path, made_of, _settings(config, manifest), config.overwrite)
    shared.wait()  # until all have looked for a result, which the first may write before the last looks
    if done is not None and _is_the_same(config, done, None):
        return _finish_again(done, path, shared)
    pair = load_pair(config, found)
    target, draft = pair.target, pair.draft
    if done is not None:  # the target's name or place is another than then
        if _is_the_same(config, done, target):
            return _finish_again(done, path, shared)
        if not config.overwrite:
            raise refuse_to_replace(path, differences(done.target, target.identity()))
    prompts, excluded = prompts_of(source, config, target)
    papers = Papers(
        command=command("evaluate"),
        fingerprint=made_of,
        settings=_settings(config, manifest),
        draft=_describe(config, draft, manifest),
        training=_history(out / "history.jsonl") if found.ready is None else [],
        prompt_source=source.name,
        excluded=excluded,
        warnings=[*pair.warnings, *_task_warnings(source)],
        sources=source.sets,
        longest_row=config.data.max_length if found.ready is None else None,
        load_draft_seconds=pair.load_draft_seconds,
        checks=_checks(source.items),
    )
    subject = Subject(
        target,
        cast(Drafter, draft),
        lambda dtype: load_target(replace(config.target, dtype=Dtype(dtype))),
        following(_template(config, target).prompt, target.max_positions - config.decode.max_new_tokens),
    )
    journal = Journal(path.parent, made_of, shared.rank, shared.processes)
    result = evaluate(config, subject, prompts, papers, journal, shared.wait)
    if result is None:  # another process of this launch writes it
        return path.with_name("report.html")
    _calibrated(config, result, out / "draft")
    save_result(result, path)
    journal.remove()
    return _finish(result, path)


@contextmanager
def sharing(config: Config) -> Iterator[Shared]:
    """Join the other processes of a launch (`accelerate launch`, torchrun), if there are any."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield Shared()
        return
    with processes(config.target.device, Parallel.ddp) as joined:
        # One process may have a long answer more than another: minutes are no sign of a lost one.
        group = distributed.new_group(backend="gloo", timeout=timedelta(days=1))
        yield Shared(
            joined.state.process_index, joined.state.num_processes, lambda: distributed.barrier(group=group)
        )


def _checks(items: Sequence[Item]) -> dict[str, Check]:
    """How an answer is judged, by its prompt's id: the last turn's."""
    last = {turn_id(item, len(item.turns)): item.check for item in items}
    return {name: check for name, check in last.items() if check is not None}


def _calibrated(config: Config, result: EvaluationResult, draft: Path) -> None:
    """Store the calibration with the draft, where that was asked for."""
    if not config.evaluate.calibrate:
        return
    if result.calibration is None or not draft.is_dir():
        result.warnings.append(
            "evaluate.calibrate=true: this draft gives no confidence, proposes trees or a schedule cut its rounds "
            "(decode.schedule); nothing was calibrated."
        )
        return
    store(draft, result.calibration)


def check_prompts(config: Config) -> None:
    """`UserError` for prompts or metrics of one's own that cannot be read; needs no data or draft."""
    check_metrics(config.evaluate.metrics)
    check_tasks(config.evaluate.tasks, config.evaluate.task_files)
    if config.evaluate.tasks and config.evaluate.prompts is not None:
        raise UserError("evaluate.tasks and evaluate.prompts are both set: choose one of them.")
    if config.evaluate.prompts is not None:
        if not Path(config.evaluate.prompts).is_file():
            raise UserError(f"evaluate.prompts: the file {config.evaluate.prompts} does not exist.")
        read_source(config)


def _finish_again(result: EvaluationResult, path: Path, shared: Shared) -> Path:
    if shared.rank:
        return path.with_name("report.html")
    print(f"Measured already ({result.created}); to measure again, remove {path}.", flush=True)
    return _finish(result, path)


def _finish(result: EvaluationResult, path: Path) -> Path:
    """Write the report, print warnings and the three lines, and stop if decoding was not lossless."""
    report = write_report(result, path.with_name("report.html"))
    print("\n".join([*summary_lines(result), f"report    {report}"]), flush=True)
    unproven = result.summary.equality.unproven
    if unproven:
        raise UserError(
            f"{unproven} of {result.summary.equality.compared} greedy outputs differ from plain decoding and "
            f"rounding does not explain it: decoding is not lossless here. The differences are in {report}."
        )
    return report


def _made_of(config: Config, manifest: dict[str, Any], source: Source) -> dict[str, Any]:
    """All that decides what is measured (not the machine, whose state no fingerprint knows).

    The target counts by what it is, which the draft's manifest knows, not by its name and place.
    """
    return {
        "draft": {
            "fingerprint": manifest["fingerprint"],
            "target": without_name(manifest.get("target") or {}),
        },
        "target": _how(plain(config.target)),
        "decode": plain(config.decode),
        "evaluate": {key: value for key, value in plain(config.evaluate).items() if key != "prompts"},
        "prompts": _made_of_prompts(config, source),
        "metrics": [_sha256(metric_path(name)) for name in config.evaluate.metrics],
        "system": config.data.system,
        **({"calibration": temperatures} if (temperatures := _temperatures(config)) else {}),
        **({"template": plain(config.data.template_args)} if config.data.template_args else {}),
    }


def _temperatures(config: Config) -> Any:
    """The draft's calibration, where a schedule will go by it."""
    file = Path(config.out) / "draft" / "config.json"
    if not schedule_of(config.decode).cuts or not file.is_file():
        return None
    return json.loads(file.read_text(encoding="utf-8")).get("confidence_temperatures")


def _how(target: dict[str, Any]) -> dict[str, Any]:
    """`target` settings without those that say which one it is."""
    return {key: value for key, value in target.items() if key not in WHICH}


def _is_the_same(config: Config, result: EvaluationResult, target: Target | None) -> bool:
    """Whether a result is of the configured target: of the same place, or, once it is loaded, the same one."""
    if target is not None:
        return without_name(result.target) == without_name(target.identity())
    before, now = result.settings.get("target") or {}, plain(config.target)
    return all(before.get(key) == now[key] for key in WHICH if key != "name")


def _already_measured(
    path: Path, made_of: str, settings: dict[str, Any], overwrite: bool
) -> EvaluationResult | None:
    """The result at `path` if it is of the same draft, prompts and settings; None if it must be measured.

    `UserError` where another result, or one that cannot be read, would have to be replaced for that.
    """
    if not path.exists():
        return None
    try:
        result = load_result(path)
    except UserError as error:
        if overwrite:
            return None
        raise UserError(f"{error} To have it replaced: overwrite=true, or remove {path}.") from error
    if result.fingerprint == made_of:
        return result
    if overwrite:
        return None
    difference = differences(_decisive(result.settings), _decisive(settings))
    raise refuse_to_replace(path, difference or "another draft or other prompts")


def _decisive(settings: dict[str, Any]) -> dict[str, Any]:
    """The part of a result's settings that it depends on; K is what the sweep chose."""
    found = {key: settings.get(key) or {} for key in ("target", "draft", "train", "decode", "evaluate")}
    found["target"] = _how(found["target"])
    if found["evaluate"].get("sweep"):
        found["decode"] = {key: value for key, value in found["decode"].items() if key != "k"}
    return found


def _check_inputs(config: Config, out: Path, manifest: dict[str, Any]) -> None:
    """UserError where the draft, the settings and (if their prompts are used) the data are not of one make."""
    what, again = f"The draft in {out / 'draft'}", command("train")
    given = {"draft": plain(config.draft), "train": plain(config.train)}
    check_recipe(manifest.get("recipe") or {}, given, what, again)
    if config.evaluate.prompts is None and not config.evaluate.tasks:
        data = read_manifest(out / "data", command("prepare"), ("fingerprint",))
        # what an imported draft was trained on is not known, which its warnings say
        if "imported" not in manifest:
            check_data(manifest.get("data"), data["fingerprint"], what, out / "data", again)
        check_whole(out / "data", data, command("prepare"), only=HELD_OUT_PROMPTS)
    check_whole(out / "draft", manifest, again)


def _settings(config: Config, manifest: dict[str, Any]) -> dict[str, Any]:
    """The configuration, with the draft's and the training's settings as the draft's manifest has them."""
    recipe = manifest.get("recipe") or {}
    made = {node: recipe[node] for node in ("draft", "train") if node in recipe}
    return plain(config) | made


def _made_of_prompts(config: Config, source: Source) -> Any:
    """What decides the prompts: each set's revision, or the file's content."""
    if source.sets:
        return [one.revision or str(one.error) for one in source.sets]
    return prompts_sha256(_prompts_file(config))


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _prompts_file(config: Config) -> Path:
    if config.evaluate.prompts is not None:
        return Path(config.evaluate.prompts)
    return Path(config.out) / "data" / HELD_OUT_PROMPTS


def read_source(config: Config) -> Source:
    """Read the prompts and complain about them before any long work."""
    tally = Tally(strict=config.data.on_error is OnError.strict)
    asked = config.evaluate
    if asked.tasks:
        items, sets = read_tasks(asked.tasks, asked.task_files, asked.hub)
        return Source(", ".join(asked.tasks), Path("evaluate.tasks"), [], [], tally, items, sets)
    path = _prompts_file(config)
    if config.evaluate.prompts is None:
        ready = read_held_out(path.parent, command("prepare"))
        return Source("held-out prompts of the data", path, ready, [], tally)
    return Source(path.name, path, [], read_prompts(path, tally), tally)


def prompts_of(source: Source, config: Config, target: Target) -> tuple[list[Prompt], dict[str, int]]:
    """All prompts that can be decoded, by the target's chat template; how many were left out, by reason."""
    prompts = list(source.ready)
    template = _template(config, target)
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
    return kept, excluded


def _task_warnings(source: Source) -> list[str]:
    """What a reader must know of the sets that were asked for."""
    return [f"Left out: {one.words()}" for one in source.sets if one.error]


def _template(config: Config, target: Target) -> ChatTemplate:
    return ChatTemplate(target.tokenizer, target.eos, arguments=config.data.template_args)


def _describe(config: Config, draft: Drafter | TrainableDraft, manifest: dict[str, Any]) -> dict[str, Any]:
    parameters = list(draft.parameters()) if isinstance(draft, TrainableDraft) else []
    name = draft.config.model_type if isinstance(draft, TrainableDraft) else config.draft.algorithm
    return {
        "algorithm": str(name),
        "parameters": sum(p.numel() for p in parameters),
        "trained_parameters": sum(p.numel() for p in parameters if p.requires_grad),
        "capture_layers": list(draft.capture_layers),
        "manifest": manifest,
    }


def _history(path: Path) -> list[dict[str, Any]]:
    """The training's history: all of it if it is short, else evenly thinned (rows of evaluations stay)."""
    rows = read_history(path)
    every = max(1, -(-len(rows) // HISTORY_ROWS))
    return [row for i, row in enumerate(rows) if i % every == 0 or i == len(rows) - 1 or "tau" in row]
