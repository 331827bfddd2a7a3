"""Every draft algorithm by name: its options, what can be checked of them, how a fresh one is made.

Options and draft stand here as `module:class`, imported when they are asked for: reading a configuration needs the
options of all and no draft, so options that live in a file without torch (`options.py`) keep it fast.
"""

from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from deepspec.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from deepspec.drafts.contract import TrainableDraft

DRAFTS: dict[str, tuple[str, str]] = {
    "eagle3": ("deepspec.drafts.options:Eagle3Options", "deepspec.drafts.eagle3:Eagle3Draft"),
}


def option_classes() -> dict[str, type[Any]]:
    """Algorithm name → the dataclass of its hyper-parameters."""
    return {name: _named(options) for name, (options, _) in DRAFTS.items()}


def draft_classes() -> dict[str, type[Any]]:
    """`model_type` in a saved draft's config → its class."""
    drafts = [_named(draft) for _, draft in DRAFTS.values()]
    return {draft.config_class.model_type: draft for draft in drafts}


def check_options(options: Any) -> None:
    """`UserError` for hyper-parameters that no target makes right; bounds of numbers are the configuration's.

    An option class says the rest in a method `check()`, if there is more to say.
    """
    if options.algorithm not in DRAFTS:
        raise UserError(
            f"draft.algorithm is {options.algorithm!r}; it must be one of {', '.join(sorted(DRAFTS))}."
        )
    if hasattr(options, "check"):
        options.check()


def check_target(options: Any, target: Any) -> None:
    """`UserError` if `target` cannot give this draft the features or layers that it reads."""
    target.require("features")
    target.check_layers(getattr(options, "capture_layers", None) or ())


def check_loss_parts(options: Any, chosen: Iterable[str]) -> None:
    """`UserError` for a part of the loss (`train.loss`) that this draft does not have."""
    parts = _named(DRAFTS[options.algorithm][1]).loss_parts
    # a draft whose parts depend on its options tells them when it is made
    unknown = [name for name in chosen if isinstance(parts, tuple) and name not in parts]
    if unknown:
        raise UserError(f"train.loss.{unknown[0]}: the draft's loss has only the parts {', '.join(parts)}.")


def new_draft(options: Any, target: Any, target_ids: "Tensor | None") -> "TrainableDraft":
    """A fresh draft for `target`. target_ids: [Vd] ascending target ids, None = the whole vocabulary."""
    check_options(options)
    check_target(options, target)
    draft = _named(DRAFTS[options.algorithm][1]).from_target(options, target, target_ids)
    target.check_layers(draft.capture_layers)
    return draft


def _named(place: str) -> type[Any]:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
