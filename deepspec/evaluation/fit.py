"""Are the draft, the data and the settings of an evaluation of one make?"""

from pathlib import Path
from typing import Any

from deepspec.artifacts import check_whole, plain, read_manifest
from deepspec.config.schema import Config
from deepspec.data.dataset import HELD_OUT_PROMPTS
from deepspec.errors import UserError


def check_inputs(config: Config, manifest: dict[str, Any], train: str, prepare: str) -> None:
    """UserError where the draft, the settings and (if their prompts are used) the data are not of one make.

    manifest: the draft's. train, prepare: the commands that make draft and data, for the errors.
    """
    out = Path(config.out)
    what = f"The draft in {out / 'draft'}"
    given = {"draft": plain(config.draft), "train": plain(config.train)}
    _check_recipe(manifest.get("recipe") or {}, given, what, train)
    if config.evaluate.prompts is None and not config.evaluate.tasks:
        data = read_manifest(out / "data", prepare, ("fingerprint",))
        # what an imported draft was trained on is not known, which its warnings say
        if "imported" not in manifest:
            _check_data(manifest.get("data"), data["fingerprint"], what, out / "data", train)
        check_whole(out / "data", data, prepare, only=HELD_OUT_PROMPTS)
    check_whole(out / "draft", manifest, train)


def _check_data(trained_on: Any, found: Any, what: str, folder: Path, retrain: str) -> None:
    """UserError unless the data in `folder`, whose held-out prompts are used, are those it was trained on."""
    if trained_on != found:
        raise UserError(
            f"{what} was trained on the data {trained_on}, and {folder} now holds the data {found}, whose "
            f"held-out prompts it may have been trained on. Train again ({retrain}), or give prompts of your "
            "own (evaluate.prompts)."
        )


def _check_recipe(recipe: dict[str, Any], given: dict[str, dict[str, Any]], what: str, retrain: str) -> None:
    """UserError where a setting that a draft's manifest records (`recipe`) is another in the configuration.

    given: `draft` and `train` of the configuration as JSON has them. Settings of `train` that decide nothing
    are not recorded, and may differ.
    """
    changed = [
        (f"{node}.{key}", made, settings[key])
        for node, settings in given.items()
        for key, made in recipe.get(node, {}).items()
        if key in settings and settings[key] != made
    ]
    if changed:
        then = ", ".join(f"{key}={made}" for key, made, _ in changed)
        now = ", ".join(f"{key}={value}" for key, _, value in changed)
        raise UserError(
            f"{what} was trained with {then}; the configuration says {now}. Train again ({retrain}), or "
            f"evaluate what was trained: {then}."
        )
