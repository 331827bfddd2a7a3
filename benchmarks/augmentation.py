"""What augmentation is worth: the same head trained with and without it, τ on the same held-out prompts.

    python -m benchmarks.augmentation --prompts questions.jsonl --steps 300 --out runs/augmentation \\
        [--kinds synonyms paraphrase ...] [--probability 0.5]

Each kind alone and all of them: the prompts of the training side are rewritten and added, the target answers old and new
ones (greedily), and a head trains for the same number of steps, by the recipe smollm2_eagle3, each in a process of its
own. Held-out prompts are chosen before anything is rewritten and are the same for all; they are decoded
greedily in chains of K. A stage that is done is not done again. Writes OUT/augmentation.json and OUT/augmentation.md.
"""

import argparse
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.stages import run_stage
from deepspec.artifacts import write_json
from deepspec.evaluation.compare import Difference, compare, incomparable
from deepspec.evaluation.result import EvaluationResult, load_result

KINDS = ("synonyms", "typos", "truncate", "system", "rename", "paraphrase", "back_translation")
NONE, ALL = "none", "all"
RECIPE = "smollm2_eagle3"


def main(arguments: Sequence[str] | None = None) -> None:
    options = _arguments(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = [NONE, *options.kinds, *([ALL] if len(options.kinds) > 1 else [])]
    for variant in wanted:
        _measure(variant, options)
    results = {
        variant: load_result(path)
        for variant in (NONE, *KINDS, ALL)
        if (path := _file(options.out, variant)).is_file()
    }
    found = beside(results)
    write_json(options.out / "augmentation.json", {"variants": found})
    shown = markdown(found)
    (options.out / "augmentation.md").write_text(shown, encoding="utf-8")
    print(shown)


def _measure(variant: str, options: argparse.Namespace) -> None:
    out, file = options.out / variant, _file(options.out, variant)
    if file.is_file():
        return
    kinds = options.kinds if variant == ALL else [variant] if variant in KINDS else []
    rewritten = ",".join(f"{{name:{kind},probability:{options.probability},seed:0}}" for kind in kinds)
    settings = [
        f"data.prompts={options.prompts}",
        f"data.max_prompts={options.max_prompts}",
        "data.builtin_prompts=0",
        "data.answers=regenerated",
        f"data.held_out_prompts={options.held_out}",
        f"data.augment=[{rewritten}]",
        f"train.max_steps={options.steps}",
        "train.epochs=1000000",
        "train.batch_size=2",
        f"target.dtype={options.dtype}",
        *options.overrides,
    ]
    run_stage("prepare", RECIPE, out, settings)
    run_stage("train", RECIPE, out, settings)
    decoding = [f"evaluate.max_prompts={options.held_out}", "evaluate.sweep=[]", "evaluate.baselines=false"]
    decoding += [f"decode.k={options.k}", f"decode.max_new_tokens={options.new_tokens}", "overwrite=true"]
    run_stage("evaluate", RECIPE, out, [*settings, *decoding])
    shutil.copy(out / "evaluation" / "result.json", file)


def _file(out: Path, variant: str) -> Path:
    return out / f"{variant}.json"


def beside(results: Mapping[str, EvaluationResult]) -> list[dict[str, Any]]:
    """Each variant's τ and its ratio to that without augmentation, prompt by prompt."""
    base, rows = results[NONE], []
    for variant, result in results.items():
        row: dict[str, Any] = {
            "variant": variant,
            "tau": asdict(result.summary.tau),
            "prompts": len(result.records),
        }
        if variant != NONE:
            if why := incomparable(base, result):
                raise SystemExit(f"error: {variant} cannot be compared: {'; '.join(why)}. Remove its folder.")
            tau = compare(base, result)[0]
            row |= {"ratio": asdict(tau.ratio), "verdict": _verdict(tau), "needed": tau.prompts_for_1_percent}
        rows.append(row)
    return rows


def _verdict(tau: Difference) -> str:
    words = {"A is higher": "lower: it does harm", "B is higher": "higher: it helps"}
    return words.get(tau.verdict, tau.verdict)


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        f"τ of {rows[0]['prompts']} held-out prompts, 95% intervals over prompts; ratios are taken prompt by prompt.",
        "",
        "| trained with | τ | over none | verdict | prompts that would show 1% |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        ratio = row.get("ratio")
        cells = [row["variant"], _metric(row["tau"]), "" if ratio is None else _metric(ratio)]
        lines.append(f"| {' | '.join([*cells, row.get('verdict', ''), str(row.get('needed') or '')])} |")
    return "\n".join([*lines, ""])


def _metric(one: Mapping[str, Any]) -> str:
    if one["value"] is None:
        return str(one["reason"] or "")
    ends = "" if one["low"] is None else f" ({one['low']:.3f}–{one['high']:.3f})"
    return f"{one['value']:.3f}{ends}"


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, required=True, help="a file of prompts")
    parser.add_argument("--max-prompts", type=int, default=200, help="of them")
    parser.add_argument("--held-out", type=int, default=32)
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=["synonyms", "typos", "system", "paraphrase"]
    )
    parser.add_argument("--probability", type=float, default=0.5, help="that a prompt is rewritten")
    parser.add_argument("--steps", type=int, default=300, help="optimiser steps of two rows")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--overrides", nargs="*", default=[], metavar="KEY=VALUE", help="for every stage")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(given)
    options.prompts = options.prompts.resolve()
    return options


if __name__ == "__main__":
    main()
