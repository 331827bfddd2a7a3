"""What feature stores cost and save: `python -m benchmarks.features [--tiny] [--train-steps 60] [--out FILE]`.

Bytes a token of real store files, beside six bf16 vectors of a 2,560 wide target; the speed of capture beside the
target's plain forward over the same batches, taking turns; how long a training step waits for features; memory of
reading a store and one four times as large, each in a process of its own; what each format does to the teacher; τ on
held-out text of heads trained from each format and online, from the same start on the same rows, with 95% intervals
over documents. Run it on an idle machine. Prints a table a question and writes JSON.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks.train import TINY, _target
from deepspec.artifacts import plain
from deepspec.config.schema import (
    Answers,
    Config,
    DataConfig,
    Dtype,
    FeaturesConfig,
    KeepBest,
    Parallel,
    StoreFormat,
    TargetConfig,
    TrainConfig,
)
from deepspec.data.dataset import load_draft_vocab, load_rows
from deepspec.drafts.options import Eagle3Options
from deepspec.drafts.registry import new_draft
from deepspec.evaluation.machine import describe_machine, load_average
from deepspec.evaluation.statistics import Bootstrap
from deepspec.target import Captured, Target, load_target
from deepspec.target.features import FeatureStore, Order, Rows, StoredRows, make_store
from deepspec.target.features.codec import LOSSY, Codec, channel_scales
from deepspec.target.features.documents import columns
from deepspec.target.features.quality import sample
from deepspec.target.features.writer import Recipe, shard_plans, write_shards
from deepspec.training import history
from deepspec.training.held_out import HeldOut, evaluate_held_out
from deepspec.training.launch import new_accelerator, processes
from deepspec.training.loop import Run, train
from deepspec.training.optimiser import loss_coefficients
from deepspec.training.sources import FromStore, Online, Sources, online

REFERENCE = 30_720  # bytes a token: five layers and the last hidden state in bf16, hidden size 2,560
FORMATS = (StoreFormat.bf16, StoreFormat.int8, StoreFormat.fp8, StoreFormat.int4)
BATCH = 8
WARM = 128  # rows read before memory is compared


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="a model of seconds, to see that it runs")
    parser.add_argument("--train-steps", type=int, default=60, help="of each head, two rows a step")
    parser.add_argument("--prompts", type=int, default=160, help="built-in prompts with their given answers")
    parser.add_argument("--repeats", type=int, default=2, help="turns of plain forward and capture")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        print(json.dumps(reading(options.read)))
        return
    begun, load = time.perf_counter(), load_average()
    with tempfile.TemporaryDirectory(prefix="deepspec-") as scratch:
        found = measured(options, Path(scratch))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found["machine"] = plain(describe_machine(device, load))
    found["seconds"] = time.perf_counter() - begun
    print(f"\ntotal {found['seconds']:.0f} s")
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def measured(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Everything, each part printed as it is known."""
    found: dict[str, Any] = {"bytes": sizes(scratch), "memory": memory(scratch)}
    target, rows, held_out, vocab = _tiny() if options.tiny else _real(options.prompts, scratch)
    draft_options = Eagle3Options(
        ttt_steps=3, start="target", vocab_size=None if vocab is None else len(vocab)
    )
    found["target"], found["rows"] = target.name, len(rows)

    def fresh() -> Any:
        torch.manual_seed(0)
        return new_draft(draft_options, target, vocab)

    layers = fresh().capture_layers
    found["capture"] = speed(target, rows, layers, scratch, options.repeats)
    stores = {
        format.value: _store(target, rows, layers, scratch / format.value, format) for format in FORMATS
    }
    found["quality"] = {name: store.manifest["quality"] for name, store in stores.items()}
    for name, one in found["quality"].items():
        print(f"quality   {name:6} KL {one['kl']:.2e}, top-1 agreement {100 * one['top1_agreement']:.2f}%")
    with _accelerator() as accelerator:
        found["training"] = trained(
            target, rows, held_out, fresh, layers, stores, accelerator, options.train_steps, scratch
        )
    return found


# ---------------------------------------------------------------------- bytes and memory, of a made-up target


class Noise:
    """A target whose hidden states are drawn, fast: sizes do not depend on what the numbers mean."""

    def __init__(self, hidden: int, layers: int) -> None:
        self.hidden_size, self.num_layers, self.device = hidden, layers, torch.device("cpu")

    def capture(self, tokens: Any, positions: Any, documents: Any, layers: Sequence[int]) -> Captured:
        draw = torch.Generator().manual_seed(0)
        shape = *tokens.shape, self.hidden_size
        last = torch.randn(shape, generator=draw)
        return Captured(torch.cat([last] * len(layers), -1), last)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden[:, :64]


class SyntheticRows:
    """`count` rows of two documents of other tokens each, the last part of each supervised."""

    def __init__(self, count: int, length: int, prompt: float) -> None:
        self.count, self.length, self.prompt = count, length, prompt

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        half = self.length // 2
        place = torch.arange(self.length)
        draw = torch.Generator().manual_seed(index)
        return {
            "tokens": torch.randint(1 << 30, (self.length,), generator=draw, dtype=torch.int32),
            "loss_mask": (place % half >= self.prompt * half).int(),
            "documents": place // half,
            "positions": place % half,
        }


def sizes(scratch: Path, count: int = 16) -> dict[str, Any]:
    """Bytes a token of the files, H = 2,560: like for like all positions of all layers are kept."""
    found = {}
    three = [1, 17, 32]
    for name, layers, positions, prompt, format in (
        ("int8, five layers and the last, every position", [1, 9, 17, 25, 32], "all", 0.0, StoreFormat.int8),
        ("int8, three layers and the last, every position", three, "all", 0.0, StoreFormat.int8),
        ("int4, three layers and the last, every position", three, "all", 0.0, StoreFormat.int4),
        (
            "int8, three layers and the last, needed positions, half of each text a prompt",
            three,
            "needed",
            0.5,
            StoreFormat.int8,
        ),
    ):
        folder = scratch / f"sizes-{len(found)}"
        rows = SyntheticRows(count, 512, prompt)
        target = Noise(2560, 36)
        make_store(_order(target, {"train": rows}, layers, folder, format, positions), target, say=_quiet)
        total = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["total"]
        each = sum(path.stat().st_size for path in folder.iterdir()) / total["tokens"]
        found[name] = {"bytes_a_token": each, "of_reference": each / REFERENCE}
        print(f"bytes     {name}: {each:.0f} a token, {each / REFERENCE:.3f} of {REFERENCE}")
    return found


def memory(scratch: Path) -> dict[str, Any]:
    """The largest private memory of a process that reads all rows of a store, and of one four times as large."""
    found = {}
    for count in (128, 512):
        folder = scratch / f"memory-{count}"
        rows = SyntheticRows(count, 256, 0.5)
        target = Noise(512, 12)
        order = _order(target, {"train": rows}, [1, 5, 8], folder, StoreFormat.int8, "needed", shard_mib=2)
        make_store(order, target, say=_quiet)
        call = [sys.executable, "-m", "benchmarks.features", "--read", str(folder)]
        done = subprocess.run(call, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"Reading {folder} failed:\n{done.stderr[-2000:]}")
        found[str(count)] = json.loads(done.stdout.splitlines()[-1])
        one = found[str(count)]
        print(
            f"memory    {count} rows: at most {one['most_mib']:.0f} MiB, {one['grown_mib']:.1f} more than after {WARM}"
        )
    return found


def reading(folder: Path) -> dict[str, float]:
    """Read every row four times; private memory before and at most, without the pages of mapped files."""
    store = FeatureStore(folder, "")
    rows = SyntheticRows(int(folder.name.rpartition("-")[2]), 256, 0.5)
    stored = StoredRows(store, store.recipe.layers, torch.device("cpu"), torch.float32)
    process, before, most = psutil.Process(), 0.0, 0.0
    for index in range(4 * len(rows)):
        batch = columns([rows[index % len(rows)]])
        stored.read(batch.tokens, batch.loss_mask, batch.documents)
        memory = process.memory_info()
        used = memory.rss - getattr(memory, "shared", 0)
        if index == WARM:
            before = used
        most = max(most, used)
    return {"warm_mib": before / 2**20, "most_mib": most / 2**20, "grown_mib": (most - before) / 2**20}


# ---------------------------------------------------------------------- a real target


def speed(target: Target, rows: Rows, layers: list[int], scratch: Path, repeats: int) -> dict[str, Any]:
    """Tokens a second of the plain forward (no hooks, no logits) and of capture to finished files, in turns."""
    few = [rows[index] for index in range(min(len(rows), 2 * BATCH))]
    tokens = sum(int((torch.as_tensor(row["documents"]) >= 0).sum()) for row in few)
    hidden = sample(target, few, layers, 4, BATCH).hidden
    seconds: dict[str, list[float]] = {"plain": [], **{format.value: [] for format in FORMATS}}
    _plain(target, few[:2])
    for turn in range(repeats):
        seconds["plain"].append(_timed(lambda: _plain(target, few)))
        for format in FORMATS:
            folder = scratch / f"speed-{format.value}-{turn}"
            folder.mkdir()
            codec = Codec(format, channel_scales(hidden) if format in LOSSY else None)
            recipe = Recipe(layers, last=True, reach=None, everything=False, codec=codec)
            plans = shard_plans("speed", len(few), len(few))
            seconds[format.value].append(
                _timed(lambda: write_shards(target, few, plans, folder, recipe, BATCH))  # noqa: B023
            )
    found = {name: tokens / statistics.median(times) for name, times in seconds.items()}
    for name, rate in found.items():
        print(f"capture   {name:6} {rate:8.0f} tokens/s, {rate / found['plain']:.3f} of the plain forward")
    return {"tokens": tokens, "tokens_per_second": found, "seconds": seconds}


def _plain(target: Target, rows: list[Any]) -> None:
    for first in range(0, len(rows), BATCH):
        batch = columns(rows[first : first + BATCH])
        where = (x.to(target.device) for x in (batch.tokens, batch.positions, batch.documents))
        target.capture(*where, [])
    if target.device.type == "cuda":
        torch.cuda.synchronize()


def _timed(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def trained(
    target: Target,
    rows: Rows,
    held_out: Rows,
    fresh: Callable[[], Any],
    layers: list[int],
    stores: dict[str, FeatureStore],
    accelerator: Any,
    steps: int,
    scratch: Path,
) -> dict[str, Any]:
    """A head from each source; τ of all on the same held-out documents, with the target's own features."""
    documents = _documents(held_out)
    found: dict[str, Any] = {}
    columns_of: dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = {}
    for name in ("online", *stores):
        if name == "online":
            sources = online(target, layers, 1.0)  # as by default: rows are captured once
        else:
            read = StoredRows(stores[name], layers, target.device, target.dtype)
            sources = Sources(FromStore(read, target, 2), FromStore(read, target))
        config = TrainConfig(
            epochs=1e6, max_steps=steps, batch_size=2, learning_rate=2e-3, log_every=10,
            eval_every=10**9, eval_rows=0, checkpoint_every=10**9, keep_best=KeepBest.none,
        )  # fmt: skip
        out = scratch / f"run-{name}"
        draft = fresh()
        train(draft, rows, held_out, Run(target, config, accelerator, out, sources=sources))
        waits = _waits(out / "history.jsonl")
        columns_of[name] = _walked(draft, documents, target, layers, accelerator)
        found[name] = {"tau": _tau(*columns_of[name]), **waits}
        if name != "online":
            found[name]["tau_minus_online"] = _difference(columns_of[name], columns_of["online"])
        one = found[name]
        print(
            f"train     {name:6} τ {_shown(one['tau'])}"
            + (f", minus online {_shown(one['tau_minus_online'])}" if name != "online" else "")
            + f"; a step takes {one['step_seconds']:.2f} s, {100 * one['data_wait']:.1f}% of it waiting"
        )
    return found


def _waits(path: Path) -> dict[str, float]:
    """Of the steps after the first record, which pays for opening and checking the shards."""
    records = [one for one in history.read(path) if "time" in one]
    waited = seconds = steps = 0.0
    for before, one in pairwise(records):
        spent = one["seconds"] - before["seconds"]
        waited += one["time"].get("data_wait", 0.0) * spent
        seconds, steps = seconds + spent, steps + one["step"] - before["step"]
    return {
        "step_seconds": seconds / steps if steps else 0.0,
        "data_wait": waited / seconds if seconds else 0.0,
        "data_wait_of_first": records[0]["time"].get("data_wait", 0.0) if records else 0.0,
    }


def _walked(draft: Any, documents: list[Any], target: Target, layers: list[int], accelerator: Any) -> Any:
    """Rounds and committed tokens of each document by greedy offline drafting, K = 3."""
    source, rounds, committed = Online(target, layers), [], []
    for document in documents:
        found = evaluate_held_out(
            draft,
            [document],
            HeldOut(rows=1, steps=3, temperature=0.0, seed=0, batch_size=1),
            source=source,
            coefficients=loss_coefficients(draft, {}),
            accelerator=accelerator,
        )
        rounds.append(found["rounds"])
        committed.append(found["committed"])
    return np.array(rounds, dtype=float), np.array(committed, dtype=float)


def _tau(rounds: Any, committed: Any) -> dict[str, Any]:
    made = Bootstrap(len(rounds), 2000).ratio(lambda tokens, all: tokens / all, committed, rounds)
    return {"value": made.value, "low": made.low, "high": made.high, "documents": len(rounds)}


def _difference(own: Any, other: Any) -> dict[str, Any]:
    made = Bootstrap(len(own[0]), 2000).ratio(
        lambda a, b, c, d: a / b - c / d, own[1], own[0], other[1], other[0], lowest=-float("inf")
    )
    return {"value": made.value, "low": made.low, "high": made.high}


def _shown(one: dict[str, Any]) -> str:
    ends = "" if one["low"] is None else f" ({one['low']:.3f} to {one['high']:.3f})"
    return f"{one['value']:.3f}{ends}"


def _documents(rows: Rows) -> list[dict[str, Any]]:
    """Each supervised document of packed rows as a row of its own."""
    found = []
    for index in range(len(rows)):
        row = {name: torch.as_tensor(value) for name, value in rows[index].items()}
        for number in range(int(row["documents"].max()) + 1):
            own = row["documents"] == number
            if bool(row["loss_mask"][own].any()):
                found.append(
                    {name: value[own] for name, value in row.items()}
                    | {"documents": torch.zeros(int(own.sum()))}
                )
    return found


def _store(target: Target, rows: Rows, layers: list[int], folder: Path, format: StoreFormat) -> FeatureStore:
    make_store(_order(target, {"train": rows}, layers, folder, format), target, say=_quiet)
    return FeatureStore(folder, "")


def _order(
    target: Any,
    splits: dict[str, Any],
    layers: list[int],
    folder: Path,
    format: StoreFormat,
    positions: Any = "needed",
    shard_mib: int = 256,
) -> Order:
    made_of = {
        "target": {"hidden_size": target.hidden_size, "num_layers": target.num_layers},
        "template": "",
        "layers": layers,
        "format": format.value,
        "positions": positions,
    }
    settings = FeaturesConfig(format=format, batch_size=BATCH, shard_mib=shard_mib, max_kl=100.0)
    return Order(folder, made_of, "benchmark", splits, settings, "")


def _real(prompts: int, scratch: Path) -> tuple[Target, Rows, Rows, Any]:
    """SmolLM2-135M-Instruct in float32 and built-in prompts with their given answers."""
    from deepspec.prepare import run as prepare

    name = "SmolLM2-135M-Instruct, Q4_1 weights dequantised"
    config = Config(
        name="features",
        target=TargetConfig(name=name, path="builtin:smollm2_135m", dtype=Dtype.float32),
        draft=Eagle3Options(vocab_size=4096),
        data=DataConfig(
            builtin_prompts=prompts,
            answers=Answers.given,
            held_out_prompts=32,
            max_length=512,
            max_new_tokens=128,
        ),
        out=str(scratch / "prepared"),
    )
    data = prepare(config)
    target = load_target(config.target)
    return target, load_rows(data, "train"), load_rows(data, "held_out"), load_draft_vocab(data)


def _tiny() -> tuple[Target, Rows, Rows, Any]:
    target = _target(TINY)

    def rows(count: int, seed: int) -> list[dict[str, Any]]:
        made = [SyntheticRows(1000, TINY["length"], 0.4)[seed + index] for index in range(count)]
        return [{**row, "tokens": row["tokens"] % TINY["vocab"]} for row in made]

    return target, rows(12, 0), rows(6, 500), None


@contextmanager
def _accelerator() -> Iterator[Any]:
    with processes("auto", Parallel.auto) as joined:
        yield new_accelerator(joined, TrainConfig())


def _quiet(line: str) -> None:
    """Says nothing: the numbers are in the manifest."""


if __name__ == "__main__":
    main()
