"""Every draft algorithm by name: its options, what can be checked of them, how a fresh one is made.

Options and draft stand here as `module:class`, imported when they are asked for: reading a configuration needs the
options of all and no draft, so options that live in a file without torch (`options.py`) keep it fast.
"""

from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from deepspec.drafts.options import check_choices
from deepspec.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from deepspec.drafts.contract import Drafter, TrainableDraft

DRAFTS: dict[str, tuple[str, str]] = {
    "eagle": ("deepspec.drafts.options:EagleOptions", "deepspec.drafts.eagle:EagleDraft"),
    "eagle3": ("deepspec.drafts.options:Eagle3Options", "deepspec.drafts.eagle3:Eagle3Draft"),
    "dflash": ("deepspec.drafts.options:DFlashOptions", "deepspec.drafts.dflash:DFlashDraft"),
    "dspark": ("deepspec.drafts.options:DSparkOptions", "deepspec.drafts.dspark:DSparkDraft"),
    "medusa": ("deepspec.drafts.options:MedusaOptions", "deepspec.drafts.medusa:MedusaDraft"),
    "mtp": ("deepspec.drafts.options:MtpOptions", "deepspec.drafts.mtp:MtpDraft"),
    "peagle": ("deepspec.drafts.options:PEagleOptions", "deepspec.drafts.peagle:PEagleDraft"),
    "standalone": ("deepspec.drafts.options:StandaloneOptions", "deepspec.drafts.standalone:StandaloneDraft"),
}
UNTRAINED: dict[str, tuple[str, str]] = {
    "ngram": ("deepspec.drafts.options:NgramOptions", "deepspec.drafts.ngram:NgramDraft"),
}


def option_classes() -> dict[str, type[Any]]:
    """Algorithm name → the dataclass of its hyper-parameters."""
    return {name: _named(options) for name, (options, _) in (DRAFTS | UNTRAINED).items()}


def draft_classes() -> dict[str, type[Any]]:
    """`model_type` in a saved draft's config → its class."""
    drafts = [_named(draft) for _, draft in DRAFTS.values()]
    return {draft.config_class.model_type: draft for draft in drafts}


def untrained_draft(options: Any) -> "Drafter | None":
    """The draft itself, where it has nothing to train; None for those that have."""
    name = getattr(options, "algorithm", None)  # a configuration may have no draft yet
    return _named(UNTRAINED[name][1])(options) if name in UNTRAINED else None


def check_options(options: Any) -> None:
    """`UserError` for hyper-parameters that no target makes right; bounds of numbers are the configuration's.

    An option class says what is between its options in a method `check()`, if there is anything.
    """
    known = DRAFTS | UNTRAINED
    if options.algorithm not in known:
        raise UserError(
            f"draft.algorithm is {options.algorithm!r}; it must be one of {', '.join(sorted(known))}."
        )
    check_choices(options)
    if hasattr(options, "check"):
        options.check()


def check_target(options: Any, target: Any) -> None:
    """`UserError` if `target` cannot give this draft the features or layers that it reads."""
    if options.algorithm in UNTRAINED:
        return
    target.require("features")
    target.check_layers(getattr(options, "capture_layers", None) or ())


def check_loss_parts(options: Any, chosen: Iterable[str]) -> None:
    """`UserError` for a part of the loss (`train.loss`) that this draft does not have."""
    if options.algorithm in UNTRAINED:
        return
    from deepspec.drafts.statistics import PARTS

    has_confidence = getattr(options, "confidence", True)
    own = getattr(_named(DRAFTS[options.algorithm][1]), "own_parts", ())
    parts = [*(name for name in PARTS if has_confidence or name != "confidence"), *own]
    unknown = [name for name in chosen if name not in parts]
    if unknown:
        raise UserError(f"train.loss.{unknown[0]}: the draft's loss has only the parts {', '.join(parts)}.")


def new_draft(options: Any, target: Any, target_ids: "Tensor | None") -> "TrainableDraft":
    """A fresh draft for `target`. target_ids: [Vd] ascending target ids, None = the whole vocabulary."""
    check_options(options)
    if options.algorithm in UNTRAINED:
        raise UserError(f"The draft {options.algorithm} has nothing to train; evaluate it as it is.")
    check_target(options, target)
    draft = _named(DRAFTS[options.algorithm][1]).from_target(options, target, target_ids)
    target.check_layers(draft.capture_layers)
    return draft


def layers_copied(options: Any, count: int) -> int:
    """How many of the target's `count` decoder layers, from the first, must be there to make a fresh draft."""
    return options.layers_copied(count) if hasattr(options, "layers_copied") else 1


def _named(place: str) -> type[Any]:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
