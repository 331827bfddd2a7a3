"""Does a draft, or data, fit the target it is about to be used with?"""

from dataclasses import replace
from typing import Any

from deepspec.config.schema import Dtype, TargetConfig
from deepspec.errors import UserError

MUST_AGREE = ("tokenizer", "hidden_size", "num_layers", "vocab_size")


def check_fit(
    made_for: dict[str, Any], target: dict[str, Any], allow_other_target: bool, what: str
) -> list[str]:
    """Compare the target's identity with the one an artifact was made for; returns warnings to record.

    Another tokenizer or shape is an error. So are other weights of the same shape, unless asked for: whether
    a draft still fits a fine-tuned model is a fair question, and a recorded one.
    """
    for key in MUST_AGREE:
        if key in made_for and made_for[key] != target[key]:
            raise UserError(
                f"{what} was made for a target with {key} {made_for[key]!r}, {target['name']} has "
                f"{target[key]!r}: they cannot work together. Choose its own target, or make it again."
            )
    if made_for.get("weights", target["weights"]) == target["weights"]:
        return []
    difference = (
        f"{what} was made for other weights ({made_for.get('name')}, {made_for['weights']}) "
        f"than {target['name']}'s ({target['weights']})"
    )
    if not allow_other_target:
        raise UserError(f"{difference}. To use it all the same: target.allow_other_target=true.")
    return [f"{difference}; used all the same (target.allow_other_target=true)."]


def same_dtype(config: TargetConfig, made_for: dict[str, Any]) -> TargetConfig:
    """With dtype=auto, the format the artifact was made in: measuring again may fall the other way."""
    if config.dtype is Dtype.auto and made_for.get("name") == config.name and "dtype" in made_for:
        return replace(config, dtype=Dtype(made_for["dtype"]))
    return config
