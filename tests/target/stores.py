"""A tiny target, packed rows with several documents, and the order for a store of them."""

from pathlib import Path
from typing import Any

import torch

from deepspec.artifacts import fingerprint, without_name
from deepspec.config.schema import FeaturesConfig, StoreFormat
from deepspec.target import Target
from deepspec.target.features import Order
from tests.models import VOCAB

Row = dict[str, list[int]]


def row(lengths: list[tuple[int, int, int]], seed: int, padding: int = 0) -> Row:
    """One packed row. lengths: (prompt, supervised, unsupervised after it) tokens of each document."""
    draw = torch.Generator().manual_seed(seed)
    made: Row = {"tokens": [], "loss_mask": [], "documents": [], "positions": []}
    for number, (before, said, after) in enumerate(lengths):
        count = before + said + after
        made["tokens"] += torch.randint(3, VOCAB, (count,), generator=draw).tolist()
        made["loss_mask"] += [0] * before + [1] * said + [0] * after
        made["documents"] += [number] * count
        made["positions"] += list(range(count))
    for name, pad in (("tokens", 0), ("loss_mask", 0), ("documents", -1), ("positions", 0)):
        made[name] += [pad] * padding
    return made


def rows(count: int, seed: int = 0) -> list[Row]:
    """Documents with and without supervision, answers in the middle and at the end, padding."""
    shapes = [
        ([(5, 7, 0), (4, 6, 4)], 2),
        ([(3, 9, 2)], 10),
        ([(6, 0, 0), (2, 12, 0)], 4),
        ([(8, 3, 0), (1, 5, 3), (2, 2, 0)], 0),
    ]
    return [row(shape, 100 * seed + index, pad) for index, (shape, pad) in enumerate(shapes * count)][:count]


def order(
    folder: Path,
    target: Target,
    layers: list[int],
    format: StoreFormat = StoreFormat.fp32,
    splits: dict[str, Any] | None = None,
    positions: Any = "needed",
    overwrite: bool = False,
    **settings: Any,
) -> Order:
    """Small shards: several of them for a dozen rows."""
    splits = {"train": rows(12), "held_out": rows(4, seed=9)} if splits is None else splits
    settings = {"batch_size": 2, "shard_mib": 1, "max_kl": 10.0, **settings}
    identity = {
        "name": "tiny", "weights": "abc", "hidden_size": target.hidden_size, "num_layers": target.num_layers,
        "vocab_size": target.vocab_size, "tokenizer": "words", "dtype": "float64",
    }  # fmt: skip
    made_of = {
        "target": without_name(identity),
        "template": "none",
        "layers": layers,
        "format": format.value,
        "positions": positions,
    }
    return Order(
        folder,
        made_of,
        fingerprint(splits),
        splits,
        FeaturesConfig(**settings),
        "python -m deepspec.capture",
        overwrite,
    )


def columns(several: list[Row]) -> dict[str, torch.Tensor]:
    """[B, T] each."""
    return {name: torch.tensor([one[name] for one in several]) for name in several[0]}
