"""Bounds of the values in the configuration, checked before any work; no other file states them."""

from collections.abc import Callable
from dataclasses import is_dataclass
from math import isfinite
from typing import Any

from deepspec.config.schema import Children, Config, DecodeConfig, KeepBest, Rule, ScheduleKind, Tree
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
SEED: Bound = (lambda x: 0 <= x < 2**63, "0 or more and less than 2**63")

# Those of `draft` apply to the drafts that have such an option.
BOUNDS: dict[str, Bound] = {
    "draft.layers": AT_LEAST_1,
    "draft.ttt_steps": AT_LEAST_1,
    "draft.ttt_ramp": FRACTION,
    "draft.step_decay": POSITIVE,
    "draft.vocab_size": AT_LEAST_1,
    "draft.capture_layers": AT_LEAST_0,
    "draft.intermediate_size": AT_LEAST_1,
    "draft.hidden_size": AT_LEAST_1,
    "draft.noise": AT_LEAST_0,
    "draft.block_tokens": AT_LEAST_1,
    "draft.gamma": POSITIVE,
    "draft.anchors": AT_LEAST_1,
    "draft.rank": AT_LEAST_0,
    "draft.heads": AT_LEAST_1,
    "draft.keep_rows": NUCLEUS,
    "draft.mask_token": AT_LEAST_0,
    "data.builtin_prompts": AT_LEAST_0,
    "data.regenerated_prompts": AT_LEAST_0,
    "data.held_out_prompts": AT_LEAST_0,
    "data.max_length": AT_LEAST_16,
    "data.max_new_tokens": AT_LEAST_2,
    "data.temperature": AT_LEAST_0,
    "data.batch_size": AT_LEAST_1,
    "data.max_prompts": AT_LEAST_1,
    "data.near_duplicates": FRACTION,
    "data.decontaminate_words": AT_LEAST_2,
    "data.min_characters": AT_LEAST_0,
    "data.max_characters": AT_LEAST_1,
    "data.top_p": NUCLEUS,
    "data.samples": AT_LEAST_1,
    "data.concurrency": AT_LEAST_1,
    "data.timeout": POSITIVE,
    "data.retries": AT_LEAST_0,
    "data.seed": SEED,
    "features.batch_size": AT_LEAST_1,
    "features.shard_mib": AT_LEAST_1,
    "features.max_kl": POSITIVE,
    "features.prefetch": AT_LEAST_0,
    "train.epochs": (lambda x: 0 < x <= 1e6, "more than 0 and at most a million"),
    "train.max_steps": AT_LEAST_1,
    "train.batch_size": AT_LEAST_1,
    "train.accumulation": AT_LEAST_1,
    "train.learning_rate": POSITIVE,
    "train.warmup": FRACTION,
    "train.weight_decay": AT_LEAST_0,
    "train.betas": BELOW_1,
    "train.clip": AT_LEAST_0,
    "train.loss": AT_LEAST_0,  # each part's weight
    "train.resume": (lambda x: x in ("auto", "never"), "auto or never"),
    "train.log_every": AT_LEAST_1,
    "train.eval_every": AT_LEAST_1,
    "train.eval_rows": AT_LEAST_0,
    "train.eval_steps": AT_LEAST_1,
    "train.checkpoint_every": AT_LEAST_1,
    "train.keep_last": AT_LEAST_1,
    "train.keep_features_gib": AT_LEAST_0,
    "train.seed": SEED,
    "train.global_batch": AT_LEAST_1,
    "train.eps": POSITIVE,
    "train.ema": BELOW_1,
    "train.decode_every": AT_LEAST_0,
    "train.decode_prompts": AT_LEAST_1,
    "train.patience": AT_LEAST_1,
    "train.stop_when.tau": AT_LEAST_1,
    "train.max_not_finite": AT_LEAST_1,
    "decode.k": AT_LEAST_1,
    "decode.tree_depth": AT_LEAST_1,
    "decode.tree_top_k": AT_LEAST_1,
    "decode.tree_total_tokens": AT_LEAST_1,
    "decode.confidence_threshold": FRACTION,
    "decode.max_candidates": AT_LEAST_1,
    "decode.utilization_threshold": FRACTION,
    "decode.temperature": AT_LEAST_0,
    "decode.top_k": AT_LEAST_0,
    "decode.top_p": NUCLEUS,
    "decode.min_p": BELOW_1,
    "decode.repetition_penalty": POSITIVE,
    "decode.max_new_tokens": AT_LEAST_2,
    "decode.seed": SEED,
    "evaluate.max_prompts": AT_LEAST_1,
    "evaluate.code_seconds": POSITIVE,
    "evaluate.sweep": AT_LEAST_1,
    "evaluate.batch_sizes": AT_LEAST_1,
    "evaluate.sweep_prompts": AT_LEAST_0,
    "evaluate.repeats": AT_LEAST_1,
    "evaluate.warmup_prompts": AT_LEAST_0,
    "evaluate.bootstrap": (lambda x: 100 <= x <= 100_000, "between 100 and 100,000"),
    "evaluate.threads": (lambda x: 0 <= x <= 1024, "between 0 and 1,024"),
    "evaluate.price_per_hour": AT_LEAST_0,
    "serve.port": (lambda x: 0 <= x <= 65535, "between 0 (any free one) and 65,535"),
    "serve.max_batch_size": AT_LEAST_1,
    "serve.queue": AT_LEAST_0,
    "serve.max_new_tokens": AT_LEAST_1,
    "serve.max_body": AT_LEAST_1,
    "serve.timeout": POSITIVE,
    "serve.grace": AT_LEAST_0,
    "features.server_seconds": POSITIVE,
    "feature_server.queue": AT_LEAST_1,
    "feature_server.max_body": AT_LEAST_1,
    "feature_server.max_tokens": AT_LEAST_1,
    "feature_server.grace": POSITIVE,
    "feature_server.port": (lambda x: 0 <= x <= 65535, "between 0 and 65,535"),
    "endpoint.requests": AT_LEAST_1,
    "endpoint.concurrency": (lambda x: 1 <= x <= 1024, "between 1 and 1,024"),
    "endpoint.warmup": AT_LEAST_0,
    "endpoint.timeout": POSITIVE,
    "endpoint.retries": AT_LEAST_0,
    "verify.prompts": AT_LEAST_1,
    "verify.rounds": AT_LEAST_1,
    "verify.draws": (lambda x: x >= 1000, "1000 or more"),
    "verify.temperature": POSITIVE,
    "verify.significance": (lambda x: 0 < x < 1, "more than 0 and less than 1"),
    "tuning.batch_size": AT_LEAST_1,
    "tuning.trials": AT_LEAST_1,
    "tuning.confirmations": AT_LEAST_1,
    "simulate.k": AT_LEAST_1,
    "simulate.users": AT_LEAST_1,
    "simulate.rates": POSITIVE,
    "simulate.max_rows": AT_LEAST_1,
    "simulate.requests": AT_LEAST_1,
    "simulate.measured_rows": AT_LEAST_1,
    "simulate.round_trip": AT_LEAST_0,
    "simulate.target_parameters": AT_LEAST_1,
    "simulate.draft_parameters": AT_LEAST_1,
    "simulate.cached_bytes": AT_LEAST_0,
    "simulate.api_round_trip": AT_LEAST_0,
    "simulate.api_ttft": AT_LEAST_0,
    "simulate.api_tpot": POSITIVE,
    "simulate.validate": AT_LEAST_1,
    "simulate.seed": SEED,
    "hardware.flops": AT_LEAST_0,
    "hardware.bandwidth": AT_LEAST_0,
    "hardware.memory_gib": AT_LEAST_0,
    "hardware.devices": AT_LEAST_1,
    "hardware.efficiency": NUCLEUS,
    "hardware.launch_seconds": AT_LEAST_0,
    "plan.answer_tokens": AT_LEAST_1,
    "plan.acceptance": BELOW_1,
}


def check(config: Config) -> None:
    """Raise a `UserError` for the first value outside its bounds; lists and mappings are checked item by item.

    Null passes: where the type has it, it is a choice of its own.
    """
    named(config.out)
    for key, (fits, words) in BOUNDS.items():
        value: Any = config
        for name in key.split("."):
            value = getattr(value, name, None)
        items = list(value.values()) if isinstance(value, dict) else value
        for item in items if isinstance(items, list | tuple) else [items]:
            if item is not None and not fits(item):
                raise UserError(f"`{key}` must be {words}, not {item}.")
    if len(config.train.betas) != 2:
        raise UserError(f"`train.betas` takes 2 numbers, not {len(config.train.betas)}.")
    for key, steps in (
        ("train.eval_steps", config.train.eval_steps),
        *(
            (f"draft.{name}", getattr(config.draft, name, 1))
            for name in ("ttt_steps", "block_tokens", "heads")
        ),
    ):
        # a row's first token is nobody's prediction, and the draft's start takes another
        if steps > config.data.max_length - 2:
            raise UserError(
                f"`{key}` is {steps}, and a row of `data.max_length={config.data.max_length}` tokens has room for "
                f"{config.data.max_length - 2} drafted ones. Lower the one or raise the other."
            )
    if config.train.patience is not None and config.train.keep_best is KeepBest.none:
        raise UserError(
            "`train.patience` waits for a better evaluation, and `train.keep_best=none` compares none. Use "
            "train.keep_best=tau or loss, or train.patience=null."
        )
    _check_decode(config.decode)
    _check_capture_layers(getattr(config.draft, "capture_layers", None))
    if is_dataclass(config.draft):
        _check_draft(config.draft)


def _check_draft(options: Any) -> None:
    from deepspec.drafts.registry import check_options

    check_options(options)


def named(out: str) -> str:
    """`out` itself; `UserError` if it is empty, and everything would be written into the current folder."""
    if not out.strip():
        raise UserError(
            "`out` is empty: name a folder for everything this run makes, for example out=runs/mine."
        )
    return out


def _check_capture_layers(layers: list[int] | None) -> None:
    """Their features stand side by side in this order, in the data's memory and in the draft's weights."""
    if layers is not None and (not layers or layers != sorted(set(layers))):
        raise UserError(
            f"`draft.capture_layers` must be ascending layer numbers, at least one and none twice, not {layers}. "
            "Null takes a low, a middle and a high layer."
        )


def _check_decode(decode: DecodeConfig) -> None:
    """Before a draft is trained for hours that could not be decoded so."""
    if decode.rule is Rule.greedy and decode.temperature > 0:
        raise UserError(
            f"`decode.rule=greedy` accepts by argmax only, and `decode.temperature` is "
            f"{decode.temperature}. Use decode.rule=auto, or decode.temperature=0."
        )
    if decode.rule is Rule.block and decode.tree is not Tree.none:
        raise UserError("`decode.rule=block` verifies chains. With `decode.tree` use decode.rule=auto.")
    if decode.tree is Tree.dynamic and decode.children is Children.sampled:
        raise UserError(
            "`decode.tree=dynamic` picks children by their probability, which sampled ones must not be: the output "
            "would no longer be the target's. Use decode.children=deterministic, or decode.tree=static."
        )
    cuts = decode.schedule is not ScheduleKind.fixed or decode.utilization_threshold is not None
    if decode.tree is not Tree.none and cuts:
        raise UserError(
            "`decode.schedule` and `decode.utilization_threshold` cut chains; a tree is verified whole. With "
            "`decode.tree` use decode.schedule=fixed and decode.utilization_threshold=null."
        )
    parents = decode.tree_parents
    if decode.tree is Tree.static and not parents:
        raise UserError(
            "`decode.tree=static` needs its shape: give decode.tree_parents, for example [-1,-1,0]."
        )
    if "" in decode.stop:
        raise UserError("`decode.stop` has an empty string, which would stop every answer at once.")
    if wrong := [node for node, parent in enumerate(parents) if not -1 <= parent < node]:
        raise UserError(
            f"`decode.tree_parents` gives node {wrong[0]} the parent {parents[wrong[0]]}. It must be -1 (the pending "
            "token) or a node before it."
        )
