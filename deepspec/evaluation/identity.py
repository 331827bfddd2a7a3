"""What a measurement is made of, and whether a result that is there already is of the same."""

import json
from pathlib import Path
from typing import Any

from deepspec.artifacts import differences, file_sha256, plain, refuse_to_replace, without_name
from deepspec.config.schema import Config
from deepspec.decoding.engine import schedule_of
from deepspec.errors import UserError
from deepspec.evaluation.quality.metrics import metric_path
from deepspec.evaluation.result import EvaluationResult, load_result
from deepspec.evaluation.sources import PromptSource, made_of_prompts
from deepspec.target import Target

WHICH = ("name", "path", "revision")  # settings of a target that say which one it is, not how it runs


def made_of(config: Config, manifest: dict[str, Any], source: PromptSource) -> dict[str, Any]:
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
        "evaluate": {
            key: value
            for key, value in plain(config.evaluate).items()
            # without batches it is the same measurement as before there were any
            if key != "prompts" and (key != "batch_sizes" or value)
        },
        "prompts": made_of_prompts(config, source),
        "metrics": [file_sha256(metric_path(name)) for name in config.evaluate.metrics],
        "system": config.data.system,
        **({"calibration": temperatures} if (temperatures := _temperatures(config)) else {}),
        **({"template": plain(config.data.template_args)} if config.data.template_args else {}),
    }


def settings_of(config: Config, manifest: dict[str, Any]) -> dict[str, Any]:
    """The configuration, with the draft's and the training's settings as the draft's manifest has them."""
    recipe = manifest.get("recipe") or {}
    made = {node: recipe[node] for node in ("draft", "train") if node in recipe}
    return plain(config) | made


def already_measured(
    path: Path, fingerprint: str, settings: dict[str, Any], overwrite: bool
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
    if result.fingerprint == fingerprint:
        return result
    if overwrite:
        return None
    difference = differences(_decisive(result.settings), _decisive(settings))
    raise refuse_to_replace(path, difference or "another draft or other prompts")


def is_the_same(config: Config, result: EvaluationResult, target: Target | None) -> bool:
    """Whether a result is of the configured target: of the same place, or, once it is loaded, the same one."""
    if target is not None:
        return without_name(result.target) == without_name(target.identity())
    before, now = result.settings.get("target") or {}, plain(config.target)
    return all(before.get(key) == now[key] for key in WHICH if key != "name")


def _temperatures(config: Config) -> Any:
    """The draft's calibration, where a schedule will go by it."""
    file = Path(config.out) / "draft" / "config.json"
    if not schedule_of(config.decode).cuts or not file.is_file():
        return None
    return json.loads(file.read_text(encoding="utf-8")).get("confidence_temperatures")


def _decisive(settings: dict[str, Any]) -> dict[str, Any]:
    """The part of a result's settings that it depends on; K is what the sweep chose."""
    found = {key: settings.get(key) or {} for key in ("target", "draft", "train", "decode", "evaluate")}
    found["target"] = _how(found["target"])
    if found["evaluate"].get("sweep"):
        found["decode"] = {key: value for key, value in found["decode"].items() if key != "k"}
    return found


def _how(target: dict[str, Any]) -> dict[str, Any]:
    """`target` settings without those that say which one it is."""
    return {key: value for key, value in target.items() if key not in WHICH}
