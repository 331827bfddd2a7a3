"""`python -m deepspec.export +recipe=X format=vllm`: a trained draft in the layout that a serving engine loads."""

if __name__ == "__main__":
    from deepspec.config.app import start

    start("export")  # before the imports below, which take seconds

from pathlib import Path
from typing import Any, cast

from deepspec.artifacts import MANIFEST, check_whole, refuse_to_replace
from deepspec.config.app import command
from deepspec.config.ranges import check
from deepspec.config.schema import Config
from deepspec.drafts.contract import TrainableDraft
from deepspec.drafts.registry import untrained_draft
from deepspec.errors import UserError
from deepspec.evaluation.result import EvaluationResult, load_result
from deepspec.interop.bundle import export
from deepspec.interop.card import Subject, licence_of, serving_commands
from deepspec.interop.hub import push, token
from deepspec.pair import find_draft, load_pair
from deepspec.target.builtin import builtin_folder
from deepspec.target.load import BUILTIN

FALLBACK_K = 3  # drafted tokens a round where nothing was measured and the draft says nothing


def run(config: Config) -> Path:
    """Write `config.out`/draft into `config.out_dir` in the layout `config.format`; its path.

    Done means: read back by our own importer, the same logits, sha256 of every file in the manifest. `UserError`
    with the reason and the nearest thing that works for what a format cannot carry.
    """
    check(config)
    _check_hub(config)
    out, form = Path(config.out), config.format.value
    if untrained_draft(config.draft) is not None:
        raise UserError(f"The draft {config.draft.algorithm} has no weights: there is nothing to export.")
    found = find_draft(config)
    manifest = found.manifest
    check_whole(out / "draft", manifest, command("train"))
    folder = Path(config.out_dir) if config.out_dir else out / "export" / form
    _check_folder(folder, config.overwrite)
    pair = load_pair(config, found)
    draft, target = cast(TrainableDraft, pair.draft), pair.target
    for line in pair.warnings:
        print(f"warning: {line}", flush=True)
    result = _result(out / "evaluation" / "result.json", manifest)
    builtin = None
    if config.serve_target is None and config.target.path.startswith(BUILTIN):
        builtin = config.target.path.removeprefix(BUILTIN)
    where = _place(config.serve_target or config.target.path)
    subject = Subject(
        name=config.name,
        form=form,
        algorithm=str(draft.config.model_type).removeprefix("deepspec_"),
        folder=str(config.hub_repo if config.push_to_hub else folder),
        target=where,
        licence=licence_of(_place(config.target.path), target.identity()),
        k=_tokens(draft, result),
        manifest=manifest,
        notes=[],
        result=result,
        builtin=builtin,
    )
    for note in export(draft, target, subject, folder):
        print(f"note      {note}", flush=True)
    print(f"{folder} is written and gave the same logits when read back.", flush=True)
    for line in serving_commands(subject):
        print(f"serve     {line}", flush=True)
    if config.push_to_hub and config.hub_repo:
        print(f"pushed    {push(folder, config.hub_repo, config.hub_private)}", flush=True)
    return folder


def _check_hub(config: Config) -> None:
    """Before anything is loaded: what an upload needs, and a target that others can find."""
    if not config.push_to_hub:
        return
    if not config.hub_repo or config.hub_repo.count("/") != 1:
        raise UserError(
            f"push_to_hub=true needs the repository's name: hub_repo=OWNER/NAME, not {config.hub_repo}."
        )
    where = config.serve_target or config.target.path
    if where.startswith(BUILTIN) or Path(where).expanduser().is_dir():
        raise UserError(
            f"The draft's target is {where}, a folder of this machine, which nobody who finds the draft on the Hub has. "
            "Name the model that it is, or was made of: serve_target=OWNER/NAME"
        )
    token()


def _tokens(draft: TrainableDraft, result: EvaluationResult | None) -> int:
    """Drafted tokens a round: what was measured; but a block is what it was trained as, whole."""
    block = getattr(draft.config, "block_tokens", None)
    measured = result.conditions.k if result else getattr(draft.config, "ttt_steps", FALLBACK_K)
    return int(block or measured)


def _check_folder(folder: Path, overwrite: bool) -> None:
    """A folder that is there is replaced only if it is an export (or a draft) and that was asked for."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / MANIFEST).is_file():
        raise UserError(
            f"{folder} is there and is no export of deepspec. Choose another one with out_dir=..."
        )
    if not overwrite:
        raise refuse_to_replace(folder, "an export is there already")


def _result(path: Path, manifest: dict[str, Any]) -> EvaluationResult | None:
    """The evaluation, if it is of this very draft."""
    if not path.is_file():
        return None
    result = load_result(path)
    measured = result.draft.get("manifest") or {}
    return result if measured.get("fingerprint") == manifest["fingerprint"] else None


def _place(path: str) -> str:
    """Where an engine finds the target: a hub name, or a folder as an absolute path."""
    if path.startswith(BUILTIN):
        return str(builtin_folder(path.removeprefix(BUILTIN)))
    local = Path(path).expanduser()
    return str(local.resolve()) if local.is_dir() else path
