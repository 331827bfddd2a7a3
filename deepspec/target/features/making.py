"""A feature store from start to end, over any number of processes: read `make_store` downwards.

Process 0 settles what is made (`work.json`, channel scales, quality), all write their shards, process 0 writes index
and manifest. A store without a manifest is not there for readers; one that is being extended stays as it was until
the new manifest replaces the old one.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from deepspec.artifacts import (
    LOCK,
    MANIFEST,
    SUMS,
    differences,
    file_sha256,
    fingerprint,
    read_manifest,
    refuse_to_replace,
    versions,
    write_json,
)
from deepspec.config.schema import FeaturesConfig, StoreFormat
from deepspec.data.sharing import ALONE, Group
from deepspec.errors import UserError
from deepspec.target.features.codec import LOSSY, channel_scales
from deepspec.target.features.estimate import Estimate, check_disk, estimated, gib, written_bytes
from deepspec.target.features.files import DONE
from deepspec.target.features.quality import CALIBRATION_ROWS, GATE_ROWS, measured, sample, summary
from deepspec.target.features.store import CHANNELS, KEYS, FeatureStore, recipe_of, write_index
from deepspec.target.features.writer import Recipe, Rows, ShardPlan, shard_plans, write_shards

WORK = "work.json"
BATCH = 8


@dataclass(frozen=True)
class Order:
    """What is to be stored. made_of: all that decides a document's features. data: fingerprint of the packed rows,
    splits: the rows of each. made_by: the command, for messages."""

    folder: Path
    made_of: dict[str, Any]
    data: str
    splits: Mapping[str, Rows]
    settings: FeaturesConfig
    made_by: str
    overwrite: bool = False

    @property
    def batch_size(self) -> int:
        """Rows that the target runs at a time."""
        return self.settings.batch_size or BATCH

    @property
    def shard_bytes(self) -> int:
        """Of one shard, about."""
        return self.settings.shard_mib * 2**20

    def size(self) -> Estimate:
        """Of all that is to be stored."""
        recipe, hidden = recipe_of(self.made_of, None), self.made_of["target"]["hidden_size"]
        return sum((estimated(rows, recipe, hidden) for rows in self.splits.values()), Estimate())


def make_store(
    order: Order,
    target: Any,
    group: Group = ALONE,
    say: Callable[[str], None] = print,
    on_rows: Callable[[int], None] = lambda count: None,
) -> None:
    """Make the store, or add to it what it lacks; every process of the group calls this, resumed or not.

    Errors: a store made with other settings, too little disk, a format that damages the teacher.
    """
    if group.rank == 0:
        _settle(order, target, say)
    group.wait()
    write_own(order, target, group, on_rows)
    group.wait()
    if group.rank == 0:
        _finish(order, say)
    group.wait()


def write_own(
    order: Order, target: Any, group: Group, on_rows: Callable[[int], None] = lambda count: None
) -> None:
    """This process's shards, of a store that process 0 has settled."""
    folder, work = order.folder, _work(order)
    store = FeatureStore(folder, order.made_by) if (folder / MANIFEST).is_file() else None
    known = (lambda key: store.find(key) is not None) if store is not None else lambda key: False
    for split, plans in _plans(order, work).items():
        mine, rows = plans[group.rank :: group.size], order.splits[split]
        write_shards(target, rows, mine, folder, _recipe(order), work["batch_size"], known, on_rows)


def complete(order: Order) -> bool:
    """Whether the store is there and has these data; `UserError` where it was made with other settings."""
    if not (order.folder / MANIFEST).is_file():
        return False
    manifest = read_manifest(order.folder, order.made_by, KEYS)
    if difference := differences(manifest["made_of"], order.made_of):
        if not order.overwrite:
            raise refuse_to_replace(order.folder, difference)
        return False
    return order.data in manifest["data"]


def _settle(order: Order, target: Any, say: Callable[[str], None]) -> None:
    """`work.json` and channel scales; removes what killed processes left, and with `overwrite` another store."""
    folder = order.folder
    before = read_manifest(folder, order.made_by, KEYS) if (folder / MANIFEST).is_file() else None
    work = _unfinished(folder)
    if work is not None and "quality" not in work:
        work = None  # stopped before anything was captured: ours, but nothing to keep
        _remove_unlisted(folder, before)
        (folder / WORK).unlink()
    for found in (before, work):
        difference = differences(found["made_of"], order.made_of) if found is not None else ""
        if difference and not order.overwrite:
            raise refuse_to_replace(folder, difference)
        if difference:
            say(f"{folder} was made with other settings ({difference}): replacing it (overwrite=true).")
            _empty(folder)
            before = work = None
            break
    folder.mkdir(parents=True, exist_ok=True)
    if before is None and work is None:
        _refuse_strangers(folder)
    for path in folder.glob(".*.partial-*"):
        path.unlink(missing_ok=True)
    size = order.size()
    check_disk(size, written_bytes(folder), folder)
    if work is not None and work["data"] == order.data:
        say(f"{folder} is not finished: going on.")
        return
    work = {"made_of": order.made_of, "data": order.data}
    write_json(folder / WORK, work)  # from here on the folder is known to be ours
    _remove_unlisted(folder, before)
    say(f"features  {size.tokens} tokens in {size.rows} rows, about {gib(size.bytes)} in {folder}")
    quality = _calibrate(order, target, say) if before is None else before["quality"]
    a_batch = size.bytes / max(size.rows, 1) * order.batch_size
    work |= {
        "generation": 0 if before is None else len(before["data"]),
        "batch_size": order.batch_size,
        "rows_each": max(1, int(order.shard_bytes / max(a_batch, 1))) * order.batch_size,
        "quality": quality,
    }
    write_json(folder / WORK, work)


def _calibrate(order: Order, target: Any, say: Callable[[str], None]) -> dict[str, Any]:
    """Channel scales from training rows, then what the format does to held-out ones."""
    format, layers = StoreFormat(order.made_of["format"]), order.made_of["layers"]
    rows, batch = order.splits["train"], order.batch_size
    if format in LOSSY:
        seen = sample(target, rows, layers, CALIBRATION_ROWS, batch).hidden
        last = recipe_of(order.made_of, None).last
        partial = order.folder / f".{CHANNELS}.partial-{os.getpid()}"
        save_file({"channels": channel_scales(seen if last else seen[:, :-1])}, partial)
        os.replace(partial, order.folder / CHANNELS)
    held_out = order.splits.get("held_out") or rows
    gate = sample(target, held_out if len(held_out) else rows, layers, GATE_ROWS, batch)
    quality = measured(target, _recipe(order), gate)
    say(summary(quality, format.value))
    if quality["kl"] > order.settings.max_kl:
        raise UserError(
            f"Stored as {format.value} the teacher's distributions are off by {quality['kl']:.2g} nats "
            f"(features.max_kl={order.settings.max_kl:g}). Use features.format=bf16, or raise the limit."
        )
    return quality


def _recipe(order: Order) -> Recipe:
    path = order.folder / CHANNELS
    return recipe_of(order.made_of, load_file(path)["channels"] if path.is_file() else None)


def _refuse_strangers(folder: Path) -> None:
    """Never among files that are not ours: unlisted ones are removed."""
    if there := [path.name for path in folder.iterdir() if path.name != LOCK]:
        raise UserError(
            f"{folder} has files in it that are no feature store's ({there[0]}). Choose an empty or new folder with "
            "features.folder=..."
        )


def _plans(order: Order, work: dict[str, Any]) -> dict[str, list[ShardPlan]]:
    return {
        split: shard_plans(f"{split}-{work['generation']:02d}", len(rows), work["rows_each"])
        for split, rows in order.splits.items()
    }


def _finish(order: Order, say: Callable[[str], None]) -> None:
    """Index and manifest, of the old shards and the new ones."""
    work = _work(order)
    folder, plans = order.folder, [plan for group in _plans(order, work).values() for plan in group]
    path = folder / MANIFEST
    before = read_manifest(folder, order.made_by, KEYS) if path.is_file() else None
    shards: dict[str, Any] = dict(before["shards"]) if before else {}
    checksums: dict[str, str] = dict(before[SUMS]) if before else {}
    for plan in plans:
        said = json.loads((folder / plan.name).with_suffix(DONE).read_text(encoding="utf-8"))
        if said["documents"]:
            checksums[plan.name] = said.pop("sha256")
            shards[plan.name] = said
    index = f"index-{work['generation']:02d}.safetensors"
    write_index(folder / index, list(shards))
    checksums = {name: value for name, value in checksums.items() if not name.startswith("index-")}
    checksums[index] = file_sha256(folder / index)
    if (folder / CHANNELS).is_file():
        checksums[CHANNELS] = file_sha256(folder / CHANNELS)
    data = [*(before["data"] if before else []), order.data]
    total = {key: sum(one[key] for one in shards.values()) for key in ("documents", "tokens", "bytes")}
    manifest = {
        "stage": "capture",
        "fingerprint": fingerprint({"made_of": order.made_of, "data": data}),
        "made_of": order.made_of,
        "data": data,
        "quality": work["quality"],
        "total": total,
        "index": index,
        "shards": shards,
        "versions": versions(),
        SUMS: checksums,
    }
    write_json(path, manifest)
    for plan in plans:
        (folder / plan.name).with_suffix(DONE).unlink(missing_ok=True)
    (folder / WORK).unlink(missing_ok=True)
    _remove_unlisted(folder, manifest)
    per_token = total["bytes"] / max(total["tokens"], 1)
    say(f"{folder} has {total['tokens']} tokens, {gib(total['bytes'])}, {per_token:.0f} bytes a token.")


def _work(order: Order) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((order.folder / WORK).read_text(encoding="utf-8"))
    return found


def _unfinished(folder: Path) -> dict[str, Any] | None:
    """What an earlier, killed process had settled."""
    try:
        found = json.loads((folder / WORK).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) and {"made_of", "data"} <= found.keys() else None


def _remove_unlisted(folder: Path, manifest: dict[str, Any] | None) -> None:
    """Shards and other files of unfinished work that no manifest knows."""
    kept = manifest[SUMS].keys() if manifest is not None else set()
    for path in [*folder.glob("*.safetensors"), *folder.glob(f"*-*{DONE}")]:
        if path.name not in kept:
            path.unlink(missing_ok=True)


def _empty(folder: Path) -> None:
    """Remove a store, manifest first: what is left of a killed removal is no store."""
    (folder / MANIFEST).unlink(missing_ok=True)
    for path in folder.iterdir():
        if path.name != LOCK:
            path.unlink()
