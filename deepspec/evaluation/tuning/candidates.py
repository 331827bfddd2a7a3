"""What is worth trying: settings of `decode`, the most promising by the recorded run first."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deepspec.config.schema import DecodeConfig, Fallback, Rule, ScheduleKind, Tree
from deepspec.errors import UserError
from deepspec.evaluation.result import EvaluationResult
from deepspec.evaluation.tuning.predict import (
    Costs,
    best_thresholds,
    confidences,
    predicted_speedups,
    recorded_costs,
    whole_rounds,
)

LEAST_ROUNDS = 50  # fewer say too little about acceptance
CHAINS = 4  # lengths of chains that are tried, of all that were predicted
SHAPES = ((3, 2, 8), (4, 3, 12), (5, 4, 24), (6, 8, 32))  # of dynamic trees: depth, top_k, total_tokens


@dataclass(frozen=True)
class Candidate:
    """words: what a person calls it. settings: of `decode`, as a recipe has them. predicted: speedup over plain
    decoding by the recorded run's acceptance and the seconds of a round at this batch size, where they tell."""

    words: str
    settings: Mapping[str, Any]
    predicted: float | None = None

    def applied(self, decode: DecodeConfig) -> DecodeConfig:
        """`decode` with these settings."""
        kinds = {"tree": Tree, "schedule": ScheduleKind, "fallback": Fallback, "rule": Rule}
        changes: dict[str, Any] = {
            name: kinds[name](value) if name in kinds else value for name, value in self.settings.items()
        }
        return replace(decode, **changes)


def check_record(result: EvaluationResult, where: str) -> None:
    """UserError for a recorded run that says nothing about chains of this pair. where: names the file."""
    settings = result.settings.get("decode", {})
    if settings.get("tree", "none") != "none" or settings.get("schedule", "fixed") != "fixed":
        raise UserError(
            f"{where} was decoded with decode.tree={settings.get('tree')} and decode.schedule="
            f"{settings.get('schedule')}. Tuning starts from chains that were verified whole: evaluate with "
            "decode.tree=none decode.schedule=fixed first."
        )
    whole = sum(1 for _ in whole_rounds(result))
    if whole < LEAST_ROUNDS:
        raise UserError(
            f"{where} has {whole} rounds that verified all {result.conditions.k} drafted tokens; tuning needs "
            f"{LEAST_ROUNDS}. Evaluate more or longer answers (evaluate.max_prompts, decode.max_new_tokens)."
        )


def candidates(
    result: EvaluationResult,
    decode: DecodeConfig,
    batch_size: int,
    costs: Costs | None = None,
    temperatures: Sequence[float] = (),
) -> list[Candidate]:
    """The default first; then chains, thresholds, the hardware-aware schedule, trees and rules, as far as draft and
    sampling allow.

    result: of a run that `check_record` takes. costs: at `batch_size`; None: the run's own, which are one request's.
    temperatures: of the draft's confidences, by position. Whether a draft can branch shows when a tree is tried.
    """
    costs = costs or recorded_costs(result)
    chain = {"tree": "none", "schedule": "fixed", "fallback": "off"}
    default = Candidate("as it stands", {**as_settings(decode), "k": result.conditions.k})
    found = [default]
    speedups = _chains(result, costs)
    best = sorted(speedups, key=lambda k: -speedups[k])[:CHAINS]
    found += [
        Candidate(f"chain, K = {k}", {**chain, "k": k}, speedups[k])
        for k in sorted(best or [result.conditions.k])
    ]
    longest = max(speedups, default=result.conditions.k)
    # of longer ones the record says nothing; a draft that cannot do them is left out when it is tried
    found += [Candidate(f"chain, K = {k}", {**chain, "k": k}) for k in (longest + 1, longest + 2)]
    if sure := confidences(result, temperatures):
        found += [
            Candidate(
                f"chain of up to {longest}, confidence above {threshold:g}",
                {**chain, "k": longest, "schedule": "threshold", "confidence_threshold": threshold},
                speedup,
            )
            for threshold, speedup in best_thresholds(sure, costs).items()
        ]
        found.append(
            Candidate(
                f"chain of up to {longest}, hardware-aware", {**chain, "k": longest, "schedule": "hardware"}
            )
        )
    if decode.temperature > 0:  # both are lossless; the other one may be cheaper here
        other = "token" if decode.rule in (Rule.auto, Rule.block) else "block"
        found += [
            replace(
                one,
                words=f"{one.words}, {other} rule",
                settings={**one.settings, "rule": other},
                predicted=None,
            )
            for one in found[1:]
            if one.settings["schedule"] == "fixed" and one.predicted is not None
        ][:2]
    if decode.temperature == 0 or decode.children.value == "sampled":
        parents = list(decode.tree_parents)
        found.append(
            Candidate(f"static tree of {len(parents)}", {**chain, "tree": "static", "tree_parents": parents})
        )
    if decode.temperature == 0:
        found += [
            Candidate(
                f"dynamic tree, depth {depth}, {total} tokens",
                {
                    **chain,
                    "tree": "dynamic",
                    "tree_depth": depth,
                    "tree_top_k": top,
                    "tree_total_tokens": total,
                },
            )
            for depth, top, total in SHAPES
        ]
    if batch_size > 1:  # alone it would only add plain rounds to what is measured against plain decoding
        found += [
            replace(one, words=f"{one.words}, falling back", settings={**one.settings, "fallback": "auto"})
            for one in found[1:]
            if one.settings["tree"] == "none" and one.settings["schedule"] == "fixed"
        ]
    return _once(found)


def as_settings(decode: DecodeConfig) -> dict[str, Any]:
    """What of `decode` tuning decides, as a recipe has it."""
    found: dict[str, Any] = {
        "tree": decode.tree.value,
        "schedule": decode.schedule.value,
        "fallback": decode.fallback.value,
    }
    if decode.tree is Tree.static:
        found["tree_parents"] = list(decode.tree_parents)
    if decode.tree is Tree.dynamic:
        found |= {name: getattr(decode, name) for name in ("tree_depth", "tree_top_k", "tree_total_tokens")}
    if decode.schedule is ScheduleKind.threshold:
        found["confidence_threshold"] = decode.confidence_threshold
    return found


def _chains(result: EvaluationResult, costs: Costs | None) -> dict[int, float]:
    """K → predicted speedup, of all that the recorded run tells of."""
    accepted = [row.unconditional.value for row in result.summary.acceptance]
    if costs is None or any(value is None for value in accepted):
        return {}
    known = [value for value in accepted if value is not None]
    return dict(enumerate(predicted_speedups(known, costs), start=1))


def _once(found: Sequence[Candidate]) -> list[Candidate]:
    """Without those that say the same as one before, which keeps its words and takes over the prediction."""
    kept: list[Candidate] = []
    for one in found:
        same = next((i for i, other in enumerate(kept) if dict(other.settings) == dict(one.settings)), None)
        if same is None:
            kept.append(one)
        elif kept[same].predicted is None:
            kept[same] = replace(kept[same], predicted=one.predicted)
    return kept
