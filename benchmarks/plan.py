"""A plan beside the run that it foretells: `python -m benchmarks.plan [--store] [--out FILE]`.

Plans a small run of SmolLM2-135M-Instruct on this machine, then makes it (prepare, capture with --store, train,
evaluate, in this process), and prints bytes and seconds side by side with their ratios. Wanted: bytes within 10%, seconds
within 25%. A few minutes on two cores; run it on an idle machine. Writes JSON with --out.
"""

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from deepspec.artifacts import plain
from deepspec.config.schema import (
    Answers,
    Config,
    DataConfig,
    DecodeConfig,
    EvaluateConfig,
    FeaturesConfig,
    FeatureSource,
    PlanConfig,
    TargetConfig,
    TrainConfig,
)
from deepspec.data.dataset import load_rows
from deepspec.drafts.options import Eagle3Options
from deepspec.evaluation.machine import describe_machine, load_average
from deepspec.plan import make_plan
from deepspec.planning.findings import PlanFindings, lines

NAME = "SmolLM2-135M-Instruct, Q4_1 weights dequantised"
BYTES, SECONDS = 0.10, 0.25  # how far off a prediction may be


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", action="store_true", help="with a feature store")
    parser.add_argument("--prompts", type=int, default=96, help="built-in prompts")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    load = load_average()
    with tempfile.TemporaryDirectory(prefix="deepspec-") as folder:
        config = recipe(Path(folder) / "run", options.prompts, options.store)
        begun = time.perf_counter()
        plan = make_plan(config)
        planning = time.perf_counter() - begun
        print("\n".join([*lines(plan), f"planned in {planning:.0f} s", ""]), flush=True)
        gc.collect()
        rows = beside(config, plan)
    print(table(rows))
    if options.out:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        found = {
            "planning_seconds": planning,
            "compared": rows,
            "machine": plain(describe_machine(device, load)),
        }
        options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def recipe(out: Path, prompts: int, store: bool) -> Config:
    """A run of a few minutes that has all that longer ones have."""
    return Config(
        name="plan",
        out=str(out),
        target=TargetConfig(name=NAME, path="builtin:smollm2_135m"),
        draft=Eagle3Options(ttt_steps=3, vocab_size=4096, start="target"),
        data=DataConfig(
            builtin_prompts=prompts,
            answers=Answers.mixed,
            regenerated_prompts=prompts // 4,
            held_out_prompts=8,
            max_length=512,
            max_new_tokens=64,
            batch_size=16,
        ),
        features=FeaturesConfig(source=FeatureSource.store if store else FeatureSource.online),
        train=TrainConfig(
            epochs=2.0, batch_size=2, eval_every=10, eval_rows=4, eval_steps=3, checkpoint_every=10
        ),
        decode=DecodeConfig(max_new_tokens=48),
        evaluate=EvaluateConfig(max_prompts=6, sweep=[1, 2], sweep_prompts=2),
        plan=PlanConfig(),
    )


def beside(config: Config, plan: PlanFindings) -> list[dict[str, Any]]:
    """The real run; what it took and what was foretold."""
    out, rows = Path(config.out), []

    def add(what: str, predicted: float | None, real: float, allowed: float) -> None:
        rows.append({"what": what, "predicted": predicted, "real": real, "allowed": allowed})

    for stage, predicted in plan.seconds.items():
        add(
            f"{stage}, s",
            predicted,
            _timed(lambda stage=stage: import_module(f"deepspec.{stage}").run(config)),
            SECONDS,
        )
        gc.collect()
    add("together, s", plan.total, sum(row["real"] for row in rows), SECONDS)
    data = json.loads((out / "data" / "manifest.json").read_text(encoding="utf-8"))["counts"]
    for key in ("rows", "tokens", "supervised_tokens"):
        add(f"train {key}", plan.counts[key], data["train"][key], BYTES)
    add("held-out rows", plan.counts["held_out_rows"], len(load_rows(out / "data", "held_out")), BYTES)
    for name in ("data", "features", "draft"):
        if name in plan.disk:
            add(f"{name}, bytes", plan.disk[name], size_of(out / name), BYTES)
    newest = max((out / "checkpoints").glob("step-*"), key=lambda path: int(path.name.partition("-")[2]))
    add("a checkpoint, bytes", plan.checkpoint, size_of(newest), BYTES)
    return rows


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def table(rows: list[dict[str, Any]]) -> str:
    said = [f"{'':24}{'predicted':>16}{'real':>16}{'ratio':>8}"]
    for row in rows:
        if row["predicted"] is None:
            said.append(f"{row['what']:24}{'?':>16}{row['real']:>16,.1f}")
            continue
        ratio = row["predicted"] / row["real"]
        verdict = "" if abs(ratio - 1) <= row["allowed"] else f"  more than {row['allowed']:.0%} off"
        said.append(f"{row['what']:24}{row['predicted']:>16,.1f}{row['real']:>16,.1f}{ratio:>8.2f}{verdict}")
    return "\n".join(said)


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
