"""`python -m deepspec.evaluate +recipe=X`: how much faster is decoding with the draft, for certain?"""

import json
from dataclasses import asdict, replace
from enum import Enum
from pathlib import Path
from typing import Any

from deepspec.artifacts import read_manifest
from deepspec.config.app import command, entry
from deepspec.config.schema import Config, Dtype
from deepspec.data.conversation import BadRow, Tally
from deepspec.data.prompts import read_prompts
from deepspec.data.template import ChatTemplate
from deepspec.drafts.contract import TrainableDraft
from deepspec.drafts.registry import load_draft
from deepspec.errors import UserError
from deepspec.evaluation.fit import check_fit
from deepspec.evaluation.prompts import Prompt, fitting, question, read_held_out
from deepspec.evaluation.result import save_result
from deepspec.evaluation.run import Papers, Subject, check_settings, evaluate
from deepspec.reporting.html import write_report
from deepspec.reporting.words import summary_lines
from deepspec.target import Target, load_target

HISTORY_ROWS = 1000  # of the training's history that the result file keeps


def run(config: Config) -> Path:
    """Measure the draft in `config.out`/draft; writes evaluation/result.json and report.html beside it.

    Returns the report's path. UserError (after writing) when a greedy output differs from plain decoding and
    rounding does not explain it.
    """
    check_settings(config)
    out = Path(config.out)
    manifest = _draft_manifest(config, out)
    draft = load_draft(out / "draft")
    target = load_target(config.target, draft.capture_layers)
    warnings = check_fit(
        manifest.get("target") or {},
        target.identity,
        config.target.allow_other_target,
        f"The draft in {out / 'draft'}",
    )
    draft = draft.to(device=target.device, dtype=target.dtype).eval()
    prompts, source, excluded = _prompts(config, target)
    papers = Papers(
        command=command("evaluate"),
        settings=_plain(asdict(config)),
        draft=_describe(draft, manifest),
        training=_history(out / "history.jsonl"),
        prompt_source=source,
        excluded=excluded,
        warnings=warnings,
    )
    subject = Subject(target, draft, lambda dtype: load_target(replace(config.target, dtype=Dtype(dtype))))
    result = evaluate(config, subject, prompts, papers)
    path = out / "evaluation" / "result.json"
    save_result(result, path)
    report = write_report(result, path.with_name("report.html"))
    print("\n".join([*summary_lines(result), f"report    {report}"]), flush=True)
    unproven = result.summary.equality.unproven
    if unproven:
        raise UserError(
            f"{unproven} of {result.summary.equality.compared} greedy outputs differ from plain decoding and "
            f"rounding does not explain it: decoding is not lossless here. The differences are in {report}."
        )
    return report


def _draft_manifest(config: Config, out: Path) -> dict[str, Any]:
    """The trained draft's manifest; trains first where that was asked for."""
    if config.auto_prepare and not (out / "draft" / "manifest.json").is_file():
        from deepspec.train import run as train

        train(config)
    return read_manifest(out / "draft", command("train"))


def _prompts(config: Config, target: Target) -> tuple[list[Prompt], str, dict[str, int]]:
    """All prompts that could be used, where they are from, and how many were left out, by reason."""
    longest = (
        target.max_positions - config.decode.max_new_tokens - max([config.decode.k, *config.evaluate.sweep])
    )
    if config.evaluate.prompts is None:
        path = Path(config.out) / "data" / "held_out_prompts.jsonl"
        prompts, source = read_held_out(path, command("prepare")), "held-out prompts of the data"
        left_out: dict[str, int] = {}
    else:
        path = Path(config.evaluate.prompts)
        prompts, left_out = _read_file(path, config, target)
        source = path.name
    kept, too_long = fitting(prompts, longest)
    if not kept:
        raise UserError(
            f"{path} has no prompt that can be evaluated: {left_out | too_long or 'it is empty'}."
        )
    return kept, source, left_out | too_long


def _read_file(path: Path, config: Config, target: Target) -> tuple[list[Prompt], dict[str, int]]:
    """A user's own prompts file, each prompt as the target's chat template gives it to decoding."""
    tally = Tally(strict=config.data.on_error.value == "strict")
    template = ChatTemplate(target.tokenizer, target.eos)
    prompts = []
    for conversation in read_prompts(path, tally):
        messages = list(conversation.with_system(config.data.system).messages)
        if conversation.has_answer:
            messages = messages[:-1]
        try:
            tokens = tuple(template.prompt(messages))
        except BadRow as error:
            tally.bad(error, str(path), conversation.line, conversation.id)
            continue
        prompts.append(Prompt(conversation.id, conversation.category, question(messages), tokens))
    return prompts, dict(tally.counts)


def _describe(draft: TrainableDraft, manifest: dict[str, Any]) -> dict[str, Any]:
    parameters = list(draft.parameters())
    return {
        "algorithm": str(draft.config.model_type),
        "parameters": sum(p.numel() for p in parameters),
        "trained_parameters": sum(p.numel() for p in parameters if p.requires_grad),
        "capture_layers": draft.capture_layers,
        "manifest": manifest,
    }


def _history(path: Path) -> list[dict[str, Any]]:
    """The training's history: all of it if it is short, else evenly thinned (rows of evaluations stay)."""
    if not path.is_file():
        return []
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    every = -(-len(rows) // HISTORY_ROWS)
    return [row for i, row in enumerate(rows) if i % every == 0 or i == len(rows) - 1 or "tau" in row]


def _plain(value: Any) -> Any:
    """The configuration as JSON has it."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


main = entry("evaluate", run)

if __name__ == "__main__":
    main()
