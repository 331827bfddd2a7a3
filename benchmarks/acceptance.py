"""Every draft family on the same answers, rows, order and steps: how many tokens a round each is worth.

    python -m benchmarks.acceptance --prompts questions.jsonl --steps 300 --sets gsm8k=FILE humaneval=FILE mtbench=FILE \\
        --out runs/acceptance [--families eagle3 dflash ...]

The target answers the prompts once (greedily); each family then trains in a process of its own, by its recipe
smollm2_FAMILY, on those answers, and is evaluated greedily and at temperature 1 with chains of K tokens. A stage that
is done is not done again: interrupted, or started with other families, the command goes on, over days if need be.
Writes OUT/acceptance.json and OUT/acceptance.md. Speeds and times are of use only on an idle machine; τ is not
concerned.
"""

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import load_from_disk

from benchmarks.acceptance_tables import markdown
from benchmarks.stages import run_stage
from deepspec.artifacts import write_json

FAMILIES = ("eagle", "eagle3", "mtp", "medusa", "peagle", "dflash", "dspark", "standalone")
DRAFTS_K = {"dflash": "block_tokens", "dspark": "block_tokens", "medusa": "heads"}  # options that limit K
HOW = {"greedy": 0.0, "sampled": 1.0}


def main(arguments: Sequence[str] | None = None) -> None:
    options = _arguments(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    answers = options.answers or _answers(options)
    for family in options.families:
        _measure(family, answers, options)
    found = [
        _family(family, options.out)
        for family in FAMILIES
        if _files(options.out, family)["sampled"].is_file()
    ]
    if not found:
        raise SystemExit("error: nothing is measured yet")
    write_json(options.out / "acceptance.json", {"families": found})
    shown = markdown(found)
    (options.out / "acceptance.md").write_text(shown, encoding="utf-8")
    print(shown)


def _answers(options: argparse.Namespace) -> Path:
    """The target's answers as conversations, the ones that all families learn from."""
    path: Path = options.out / "answers.jsonl"
    if path.is_file():
        return path
    run = options.out / "answers"
    run_stage(
        "prepare",
        "smollm2_eagle3",
        run,
        [
            f"data.prompts={options.prompts}",
            f"data.builtin_prompts={options.builtin}",
            "data.answers=regenerated",
            f"target.dtype={options.dtype}",
            *options.overrides,
        ],
    )
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        for row in load_from_disk(str(run / "data" / "conversations")):
            line = {"messages": json.loads(row["messages"]), "category": row["category"]}
            file.write(json.dumps(line) + "\n")
    return partial.replace(path)


def _measure(family: str, answers: Path, options: argparse.Namespace) -> None:
    out, files = options.out / family, _files(options.out, family)
    settings = [
        f"data.prompts={answers}",
        "data.builtin_prompts=0",
        "data.answers=given",
        f"train.max_steps={options.steps}",
        "train.epochs=1000000",
        "train.batch_size=2",
        f"target.dtype={options.dtype}",
        *options.overrides,
        *([f"draft.{DRAFTS_K[family]}={options.k}"] if family in DRAFTS_K else []),
    ]
    recipe = f"smollm2_{family}"
    run_stage("prepare", recipe, out, settings)
    used = run_stage("train", recipe, out, settings)
    if used and not files["training"].is_file():
        write_json(files["training"], used)
    names = [one.split("=", 1)[0] for one in options.sets]
    places = [
        f"+evaluate.task_files.{name}={file}"
        for name, _, file in (s.partition("=") for s in options.sets)
        if file
    ]
    for how, temperature in HOW.items():
        if files[how].is_file():
            continue
        run_stage(
            "evaluate",
            recipe,
            out,
            [
                *settings,
                f"evaluate.tasks=[{','.join(names)}]",
                *places,
                f"evaluate.max_prompts={options.max_prompts * len(names)}",
                "evaluate.sweep=[]",
                "evaluate.baselines=false",
                f"decode.k={options.k}",
                f"decode.max_new_tokens={options.new_tokens}",
                f"decode.temperature={temperature}",
                "overwrite=true",
            ],
        )
        shutil.copy(out / "evaluation" / "result.json", files[how])


def _files(out: Path, family: str) -> dict[str, Path]:
    return {name: out / f"{family}-{name}.json" for name in ("training", *HOW)}


def _family(family: str, out: Path) -> dict[str, Any]:
    """What the stages' own files say about one family."""
    files = _files(out, family)
    history = [
        json.loads(line) for line in (out / family / "history.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    steps = [row for row in history if "seconds" in row]
    found: dict[str, Any] = {"family": family, "steps": steps[-1]["step"], "tokens": steps[-1]["tokens"]}
    found["train_seconds"] = steps[-1]["seconds"]
    if files["training"].is_file():
        found |= json.loads(files["training"].read_text(encoding="utf-8"))
    for how in HOW:
        result = json.loads(files[how].read_text(encoding="utf-8"))
        found |= {
            "parameters": result["draft"].get("trained_parameters", 0),
            "target": result["target"]["name"],
        }
        found[how] = {
            "k": result["conditions"]["k"],
            "max_new_tokens": result["conditions"]["max_new_tokens"],
            "noise": result["conditions"]["noise"]["words"],
            "sets": {name: _numbers(one) for name, one in result["categories"].items()},
            "all": _numbers(result["summary"]),
            "draft_seconds": (result["step_times"] or {"draft": [None]})["draft"][-1],
        }
    return found


def _numbers(summary: dict[str, Any]) -> dict[str, Any]:
    return {
        "prompts": summary["prompts"],
        "tau": summary["tau"],
        "speedup": summary["speedup_same_loop"],
        "acceptance": [row["conditional"]["value"] for row in summary["acceptance"]],
        "equality": summary["equality"],
    }


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompts", type=Path, help="a file of prompts, which the target answers first")
    source.add_argument("--answers", type=Path, help="conversations that the target has answered already")
    parser.add_argument("--builtin", type=int, default=400, help="built-in prompts beside those of --prompts")
    parser.add_argument(
        "--steps", type=int, default=300, help="optimiser steps of two rows, for every family"
    )
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument(
        "--sets", nargs="+", required=True, metavar="SET[=FILE]", help="gsm8k=cases.jsonl ..."
    )
    parser.add_argument("--max-prompts", type=int, default=12, help="of each set")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--k", type=int, default=7)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--overrides", nargs="*", default=[], metavar="KEY=VALUE", help="for every stage")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(given)
    for name in ("prompts", "answers"):
        path = getattr(options, name)
        if path is not None:
            setattr(options, name, path.resolve())
    return options


if __name__ == "__main__":
    main()
