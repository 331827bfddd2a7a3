"""The draft of a run's folder and the target it was made for, as every entry point that decodes needs them."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import nn

from deepspec.artifacts import fingerprint, plain, read_manifest
from deepspec.config.app import command
from deepspec.config.schema import Config
from deepspec.drafts.contract import Drafter, TrainableDraft
from deepspec.drafts.registry import untrained_draft
from deepspec.target import Target, load_target
from deepspec.target.fit import check_fit, same_dtype
from deepspec.training.saved_draft import load_draft


@dataclass
class FoundDraft:
    """What is known before anything is loaded. ready: a draft with nothing to train, None for a trained one.
    what: the artifact that names the target, for messages."""

    manifest: dict[str, Any]
    ready: Drafter | None
    what: str


@dataclass
class Pair:
    """Target and draft on their device; warnings: what does not quite fit. load_draft_seconds: the draft's cold
    start, None for one that needs none."""

    target: Target
    draft: Drafter
    warnings: list[str]
    load_draft_seconds: float | None = None


def find_draft(config: Config) -> FoundDraft:
    """The draft that `config` means; `UserError` with the command that makes it where it is missing.

    With `auto_prepare` what is missing is made.
    """
    out = Path(config.out)
    ready = untrained_draft(config.draft)
    if ready is not None:
        return FoundDraft(_untrained_manifest(config, out), ready, f"The data in {out / 'data'}")
    if config.auto_prepare and not (out / "draft" / "manifest.json").is_file():
        from deepspec.train import run as train

        train(config)
    manifest = read_manifest(out / "draft", command("train"), ("fingerprint", "target.name"))
    return FoundDraft(manifest, None, f"The draft in {out / 'draft'}")


def load_pair(config: Config, found: FoundDraft) -> Pair:
    """Load both; `UserError` where they cannot work together."""
    started = time.perf_counter()
    draft = found.ready or load_draft(Path(config.out) / "draft")
    loaded = time.perf_counter() - started
    made_for = found.manifest.get("target") or {}
    target = load_target(same_dtype(config.target, made_for), draft.capture_layers)
    warnings = [
        *(f"When the draft was trained: {one}" for one in found.manifest.get("warnings") or []),
        *check_fit(made_for, target.identity(), config.target.allow_other_target, found.what),
    ]
    if isinstance(draft, TrainableDraft):
        module: nn.Module = draft
        started = time.perf_counter()
        module.to(target.device, target.dtype)
        loaded += time.perf_counter() - started
    return Pair(target, cast(Drafter, draft), warnings, None if found.ready else loaded)


def _untrained_manifest(config: Config, out: Path) -> dict[str, Any]:
    """What a trained draft's manifest would say of one that has nothing to train; makes missing prompts if asked."""
    made = plain(config.draft)
    manifest = {"fingerprint": fingerprint(made), "recipe": {"draft": made}}
    if config.evaluate.prompts is not None or config.evaluate.tasks:
        return manifest
    if config.auto_prepare and not (out / "data" / "manifest.json").is_file():
        from deepspec.prepare import run as prepare

        prepare(config)
    return manifest | {"target": read_manifest(out / "data", command("prepare"))["inputs"]["target"]}
