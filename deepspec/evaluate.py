"""`python -m deepspec.evaluate +recipe=X`: how much faster is decoding with the draft, for certain?"""

if __name__ == "__main__":
    from deepspec.config.app import start

    start("evaluate")  # before the imports below, which take seconds

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from deepspec.artifacts import differences, fingerprint, refuse_to_replace, without_name
from deepspec.config.app import command
from deepspec.config.ranges import check
from deepspec.config.schema import Config, Dtype
from deepspec.data.sharing import Group
from deepspec.drafts.contract import Drafter, TrainableDraft
from deepspec.errors import UserError
from deepspec.evaluation.calibration import store
from deepspec.evaluation.fit import check_inputs
from deepspec.evaluation.identity import already_measured, is_the_same, made_of, settings_of
from deepspec.evaluation.journal import Journal, remove
from deepspec.evaluation.result import EvaluationResult, save_result
from deepspec.evaluation.run import evaluate
from deepspec.evaluation.sharing import sharing
from deepspec.evaluation.sources import (
    check_prompts,
    checks_of,
    prompts_of,
    read_source,
    task_warnings,
    template_of,
)
from deepspec.evaluation.subject import Papers, Subject
from deepspec.evaluation.turns import following
from deepspec.pair import find_draft, load_pair
from deepspec.reporting.html import write_report
from deepspec.reporting.words import summary_lines
from deepspec.target import load_target
from deepspec.training.history import read as read_history

HISTORY_ROWS = 1000  # of the training's history that the result file keeps


def run(config: Config) -> Path:
    """Measure the draft in `config.out`/draft; writes evaluation/result.json and report.html beside it.

    A draft with nothing to train is measured as it is, into a folder named after it. Returns the report's path.
    What was measured with the same draft and settings is not measured again.
    UserError where a result of other settings is in the way, unless `config.overwrite`, and (after writing)
    when a greedy output differs from plain decoding and rounding is not the reason. `config.tune`: see
    `deepspec.tuning`.
    """
    check(config)
    if config.tune:
        from deepspec.tuning import tune

        return tune(config)
    check_prompts(config)
    with sharing(config) as shared:
        return _run(config, shared)


def _run(config: Config, shared: Group) -> Path:
    out = Path(config.out)
    found = find_draft(config)
    manifest = found.manifest
    folder = "evaluation" if found.ready is None else f"evaluation_{config.draft.algorithm}"
    if found.ready is None:
        check_inputs(config, manifest, command("train"), command("prepare"))
    source = read_source(config, command("prepare"))
    path = out / folder / "result.json"
    identity, settings = fingerprint(made_of(config, manifest, source)), settings_of(config, manifest)
    done = already_measured(path, identity, settings, config.overwrite)
    shared.wait()  # until all have looked for a result, which the first may write before the last looks
    if done is not None and is_the_same(config, done, None):
        return _finish_again(done, path, shared)
    pair = load_pair(config, found)
    target, draft = pair.target, pair.draft
    if done is not None:  # the target's name or place is another than then
        if is_the_same(config, done, target):
            return _finish_again(done, path, shared)
        if not config.overwrite:
            raise refuse_to_replace(path, differences(done.target, target.identity()))
    prompts, excluded = prompts_of(source, config, target)
    papers = Papers(
        command=command("evaluate"),
        fingerprint=identity,
        settings=settings,
        draft=_describe(config, draft, manifest),
        training=_history(out / "history.jsonl") if found.ready is None else [],
        prompt_source=source.name,
        excluded=excluded,
        warnings=[*pair.warnings, *task_warnings(source)],
        sources=source.sets,
        # what an imported draft was trained on is not known
        longest_row=None if found.ready or "imported" in manifest else config.data.max_length,
        load_draft_seconds=pair.load_draft_seconds,
        checks=checks_of(source.items),
    )
    subject = Subject(
        target,
        cast(Drafter, draft),
        lambda dtype: load_target(replace(config.target, dtype=Dtype(dtype))),
        following(template_of(config, target).prompt, target.max_positions - config.decode.max_new_tokens),
    )
    # what the result's fingerprint leaves out, as no result says otherwise yet: which target decodes
    measured = fingerprint([identity, without_name(target.identity())])
    journal = Journal(path.parent, measured, shared.rank, shared.size)
    result = evaluate(config, subject, prompts, papers, journal, shared.wait)
    if result is None:  # another process of this launch writes it
        return path.with_name("report.html")
    _calibrated(config, result, out / "draft")
    save_result(result, path)
    journal.remove()
    return _finish(result, path)


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


def _finish_again(result: EvaluationResult, path: Path, shared: Group) -> Path:
    if shared.rank:
        return path.with_name("report.html")
    remove(path.parent)  # a kill between the result and this; else measuring again would find these records
    remove(path.parent)  # a kill between the result and this; else measuring again would find these records
    print(f"Measured already ({result.created}); to measure again, remove {path}.", flush=True)
    return _finish(result, path)


def _finish(result: EvaluationResult, path: Path) -> Path:
    """Write the report, print warnings and the three lines, and stop if decoding was not lossless."""
    report = write_report(result, path)
    print("\n".join([*summary_lines(result), f"report    {report}"]), flush=True)
    unproven = result.summary.equality.unproven
    if unproven:
        raise UserError(
            f"{unproven} of {result.summary.equality.compared} greedy outputs differ from plain decoding and "
            f"rounding does not explain it: decoding is not lossless here. The differences are in {report}."
        )
    return report


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
