"""Bounds of the numbers in the configuration, checked before any work; no other file states them."""

from collections.abc import Callable
from math import isfinite
from typing import Any

from deepspec.config.schema import Config, KeepBest, Rule
from deepspec.errors import UserError

Bound = tuple[Callable[[Any], bool], str]

POSITIVE: Bound = (lambda x: x > 0 and isfinite(x), "more than 0")
AT_LEAST_0: Bound = (lambda x: x >= 0 and isfinite(x), "0 or more")
AT_LEAST_1: Bound = (lambda x: x >= 1, "1 or more")
# Below these no row has room for a question and an answer, and no answer has a token that a draft could guess.
AT_LEAST_16: Bound = (lambda x: x >= 16, "16 or more")
AT_LEAST_2: Bound = (lambda x: x >= 2, "2 or more")
FRACTION: Bound = (lambda x: 0 <= x <= 1, "between 0 and 1")
NUCLEUS: Bound = (lambda x: 0 < x <= 1, "more than 0 and at most 1")
BELOW_1: Bound = (lambda x: 0 <= x < 1, "0 or more and less than 1")

# Those of `draft` apply to the drafts that have such an option.
BOUNDS: dict[str, Bound] = {
    "draft.layers": AT_LEAST_1,
    "draft.ttt_steps": AT_LEAST_1,
    "draft.step_decay": POSITIVE,
    "draft.vocab_size": AT_LEAST_1,
    "draft.capture_layers": AT_LEAST_0,
    "draft.intermediate_size": AT_LEAST_1,
    "data.builtin_prompts": AT_LEAST_0,
    "data.regenerated_prompts": AT_LEAST_0,
    "data.held_out_prompts": AT_LEAST_0,
    "data.max_length": AT_LEAST_16,
    "data.max_new_tokens": AT_LEAST_2,
    "data.temperature": AT_LEAST_0,
    "data.batch_size": AT_LEAST_1,
    "train.epochs": POSITIVE,
    "train.max_steps": AT_LEAST_1,
    "train.batch_size": AT_LEAST_1,
    "train.accumulation": AT_LEAST_1,
    "train.learning_rate": POSITIVE,
    "train.warmup": FRACTION,
    "train.weight_decay": AT_LEAST_0,
    "train.betas": BELOW_1,
    "train.clip": AT_LEAST_0,
    "train.log_every": AT_LEAST_1,
    "train.eval_every": AT_LEAST_1,
    "train.eval_rows": AT_LEAST_0,
    "train.eval_steps": AT_LEAST_1,
    "train.checkpoint_every": AT_LEAST_1,
    "train.keep_last": AT_LEAST_1,
    "train.keep_features_gib": AT_LEAST_0,
    "train.global_batch": AT_LEAST_1,
    "train.eps": POSITIVE,
    "train.ema": BELOW_1,
    "train.decode_every": AT_LEAST_0,
    "train.decode_prompts": AT_LEAST_1,
    "train.patience": AT_LEAST_1,
    "train.stop_when.tau": AT_LEAST_1,
    "train.max_not_finite": AT_LEAST_1,
    "decode.k": AT_LEAST_1,
    "decode.temperature": AT_LEAST_0,
    "decode.top_k": AT_LEAST_0,
    "decode.top_p": NUCLEUS,
    "decode.min_p": BELOW_1,
    "decode.max_new_tokens": AT_LEAST_2,
    "evaluate.max_prompts": AT_LEAST_1,
    "evaluate.sweep": AT_LEAST_1,
    "evaluate.sweep_prompts": AT_LEAST_0,
    "evaluate.repeats": AT_LEAST_1,
    "evaluate.warmup_prompts": AT_LEAST_0,
    "evaluate.bootstrap": (lambda x: x >= 100, "100 or more"),
    "evaluate.threads": AT_LEAST_0,
    "evaluate.price_per_hour": AT_LEAST_0,
}


def check(config: Config) -> None:
    """Raise a `UserError` for the first number outside its bounds; lists are checked item by item.

    Null passes: where the type has it, it is a choice of its own.
    """
    for key, (fits, words) in BOUNDS.items():
        value: Any = config
        for name in key.split("."):
            value = getattr(value, name, None)
        items = value if isinstance(value, list | tuple) else [value]
        for item in items:
            if item is not None and not fits(item):
                raise UserError(f"`{key}` must be {words}, not {item}.")
    if config.train.resume not in ("auto", "never"):
        raise UserError(f"`train.resume` is auto or never, not {config.train.resume!r}.")
    if config.decode.rule is Rule.greedy and config.decode.temperature > 0:
        raise UserError(
            f"`decode.rule=greedy` accepts by argmax only, and `decode.temperature` is "
            f"{config.decode.temperature}. Use decode.rule=auto, or decode.temperature=0."
        )
    if config.train.patience is not None and config.train.keep_best is KeepBest.none:
        raise UserError(
            "`train.patience` waits for a better evaluation, and `train.keep_best=none` compares none. Use "
            "train.keep_best=tau or loss, or train.patience=null."
        )
    _check_capture_layers(getattr(config.draft, "capture_layers", None))


def _check_capture_layers(layers: list[int] | None) -> None:
    """Their features stand side by side in this order, in the data's memory and in the draft's weights."""
    if layers is not None and (not layers or layers != sorted(set(layers))):
        raise UserError(
            f"`draft.capture_layers` must be ascending layer numbers, at least one and none twice, not {layers}. "
            "Null takes a low, a middle and a high layer."
        )
