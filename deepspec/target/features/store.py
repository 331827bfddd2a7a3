"""A feature store on disk: opened, compared with what is asked for, read document by document.

Folder: `manifest.json`, `channels.safetensors` (the channel scales, lossy formats only), `index-*.safetensors`
(where each document is) and shards (see `files`). A shard's bytes are compared with the manifest's checksum when it is
first opened; at most `OPEN` are open at a time, so that memory does not grow with the store.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepspec.artifacts import SUMS, check_whole, differences, read_manifest
from deepspec.config.schema import StoreFormat
from deepspec.errors import UserError
from deepspec.target.features.codec import LOSSY, Codec, Encoded
from deepspec.target.features.documents import KEY_BYTES, Span, spans
from deepspec.target.features.files import Shard, Stored
from deepspec.target.features.writer import Recipe
from deepspec.target.model import Captured

CHANNELS = "channels.safetensors"
OPEN = 16  # shards
KEYS = (
    "made_of.target",
    "made_of.layers",
    "made_of.format",
    "made_of.positions",
    "shards",
    "data",
    "index",
    SUMS,
)


class FeatureStore:
    """A whole store, read by document. made_by: the command that makes it, for messages."""

    def __init__(self, folder: Path, made_by: str) -> None:
        self.folder, self.made_by = folder, made_by
        self.manifest = read_manifest(folder, made_by, KEYS)
        self.made_of: dict[str, Any] = self.manifest["made_of"]
        self.names: list[str] = list(self.manifest["shards"])
        for name in (self.manifest["index"], CHANNELS):
            check_whole(folder, self.manifest, made_by, name)
        if missing := [name for name in self.names if not (folder / name).is_file()]:
            raise UserError(
                f"{folder / missing[0]} is missing ({len(missing)} of {len(self.names)} shards). Remove {folder} and "
                f"make it again: {made_by}"
            )
        self.recipe = recipe_of(self.made_of, self._channels())
        index = load_file(folder / self.manifest["index"])
        self._high, self._low = index["high"].numpy(), index["low"].numpy()
        self._where = index["where"].numpy()
        self._open: OrderedDict[str, Shard] = OrderedDict()
        self._sound: set[str] = set()
        self._lock = threading.Lock()  # rows are read ahead in one thread and evaluated in another

    def _channels(self) -> Tensor | None:
        path = self.folder / CHANNELS
        return load_file(path)["channels"] if path.is_file() else None

    def find(self, key: bytes) -> tuple[str, int] | None:
        """Shard and number of a document, or None."""
        high, low = _halves(key)
        at = int(np.searchsorted(self._high, high))
        while at < len(self._high) and self._high[at] == high:
            if self._low[at] == low:
                shard, item = self._where[at].tolist()
                return self.names[shard], item
            at += 1
        return None

    def read(self, key: bytes, part: str) -> Stored:
        """A document's stored rows of `features` or `last`."""
        place = self.find(key)
        if place is None:
            raise UserError(
                f"{self.folder} has no features of a document of these data: it was captured from others. Add what is "
                f"missing: {self.made_by}"
            )
        with self._lock:
            shard = self._shard(place[0])
        return shard.read(part, place[1])

    def _shard(self, name: str) -> Shard:
        if name in self._open:
            self._open.move_to_end(name)
            return self._open[name]
        if name not in self._sound:
            check_whole(self.folder, self.manifest, self.made_by, name)
            self._sound.add(name)
        elif not (self.folder / name).is_file():
            raise UserError(
                f"{self.folder / name} has vanished. Remove {self.folder} and make it again: {self.made_by}"
            )
        while len(self._open) >= OPEN:
            self._open.popitem(last=False)
        self._open[name] = Shard(self.folder / name)
        return self._open[name]


def check_store(store: FeatureStore, made_of: Mapping[str, Any], data: str) -> None:
    """`UserError`, naming what differs, unless the store has what `made_of` asks for, of these data.

    It may have more: further layers, or positions that this draft does not read.
    """
    there = store.made_of
    same = ("target", "template", "format")
    difference = differences({key: there[key] for key in same}, {key: made_of[key] for key in same})
    lacking = [layer for layer in made_of["layers"] if layer not in there["layers"]]
    if lacking:
        layers = ", ".join(map(str, lacking))
        difference = "; ".join(
            [*([difference] if difference else []), f"it lacks layer {layers} and has {there['layers']}"]
        )
    elif not _wider(there["positions"], made_of["positions"]):
        difference = f"positions was {there['positions']!r}, is {made_of['positions']!r}"
    if difference:
        raise UserError(
            f"{store.folder} holds features made with other settings ({difference}). Training does not use them: set "
            "them back, choose another folder (features.folder=...), or make it again: "
            f"{store.made_by} overwrite=true"
        )
    if data not in store.manifest["data"]:
        raise UserError(
            f"{store.folder} was captured from other data (data was {', '.join(store.manifest['data'])}, is {data}). "
            f"Add what is missing: {store.made_by}"
        )


def _wider(stored: Any, asked: Any) -> bool:
    """Whether all positions that are asked for are among the stored ones."""
    order = {"all": 2, "needed": 1}
    if stored in order:
        return order[stored] >= order.get(asked, 0)
    return isinstance(asked, int) and stored >= asked


def recipe_of(made_of: Mapping[str, Any], channels: Tensor | None) -> Recipe:
    """What the shards hold, from a manifest's `made_of`."""
    positions, layers = made_of["positions"], list(made_of["layers"])
    format = StoreFormat(made_of["format"])
    last = made_of["target"]["num_layers"] - 1 not in layers or format is StoreFormat.int4
    everything = positions == "all"
    reach = positions if isinstance(positions, int) else None
    return Recipe(layers, last, reach, everything, Codec(format, channels))


def write_index(path: Path, names: Sequence[str]) -> None:
    """The index of the documents of these shards, which lie beside it; of a document that two have, the first counts."""
    high: list[NDArray[np.int64]] = []
    low: list[NDArray[np.int64]] = []
    where: list[NDArray[np.int32]] = []
    for number, name in enumerate(names):
        keys = Shard(path.with_name(name)).cut("keys").numpy()
        halves = keys.view(">i8").astype(np.int64)
        high.append(halves[:, 0])
        low.append(halves[:, 1])
        where.append(np.stack([np.full(len(keys), number), np.arange(len(keys))], 1).astype(np.int32))
    columns = [np.concatenate(column) for column in (high, low, where)] if names else _nothing()
    order = np.lexsort((columns[1], columns[0]))
    tensors = {
        name: torch.from_numpy(np.ascontiguousarray(column[order]))
        for name, column in zip(("high", "low", "where"), columns, strict=True)
    }
    save_file(tensors, path)


def _nothing() -> list[NDArray[Any]]:
    return [np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 2), np.int32)]


def _halves(key: bytes) -> tuple[np.int64, np.int64]:
    high, low = np.frombuffer(key, dtype=">i8", count=KEY_BYTES // 8).astype(np.int64)
    return high, low


class StoredRows:
    """Packed rows' features out of a store, as the target would give them, for one draft.

    layers: those the draft reads, among the stored ones. device, dtype: of what is returned; the numbers are decoded
    there. Positions that were left out (see `needed`) are zero.
    """

    def __init__(
        self, store: FeatureStore, layers: Sequence[int], device: torch.device, dtype: torch.dtype
    ) -> None:
        self.store, self.device, self.dtype = store, device, dtype
        stored = store.recipe.layers
        self.columns = [stored.index(layer) for layer in layers]
        self.whole = self.columns == list(range(len(stored)))
        self.hidden_size = int(store.made_of["target"]["hidden_size"])
        last_layer = int(store.made_of["target"]["num_layers"]) - 1
        self.last_column = None if store.recipe.last else stored.index(last_layer)

    def read(self, tokens: Tensor, loss_mask: Tensor, documents: Tensor) -> Captured:
        """Columns [B, T] on the CPU → features [B, T, F] and last_hidden [B, T, H]."""
        rows, length = tokens.shape
        found = [
            span for row in range(rows) for span in spans(row, tokens[row], loss_mask[row], documents[row])
        ]
        shape = rows, length
        features = self._part("features", self.columns, found, shape)
        if self.last_column is None:
            last = self._part("last", [0], found, shape)
        elif self.last_column in self.columns:
            at = self.columns.index(self.last_column) * self.hidden_size
            last = features[..., at : at + self.hidden_size]
        else:
            last = self._part("features", [self.last_column], found, shape)
        return Captured(features, last)

    def _part(self, part: str, columns: list[int], found: list[Span], shape: tuple[int, int]) -> Tensor:
        width = len(columns) * self.hidden_size
        result = torch.zeros(*shape, width, dtype=self.dtype, device=self.device)
        if not columns:
            return result
        read, lines, places = [], [], []
        for span in found:
            if self.store.recipe.chosen(part, span).any():
                one = self.store.read(span.key, part)
                read.append(one.encoded)
                places.append(one.places.long() + span.start)
                lines.append(torch.full_like(places[-1], span.row))
        if not read:
            return result
        encoded = self._joined(read, columns if part == "features" else None)
        codec = self.store.recipe.codec_of(part, columns)
        index = torch.cat(lines).to(self.device), torch.cat(places).to(self.device)
        result[index] = codec.decode(encoded, self.dtype).flatten(1)
        return result

    def _joined(self, read: list[Encoded], columns: list[int] | None) -> Encoded:
        """Several documents' rows on the device, of the wanted layers."""
        pick = columns is not None and len(columns) < len(self.store.recipe.layers)
        values = torch.cat([one.values[:, columns] if pick else one.values for one in read]).to(self.device)
        if self.store.recipe.codec.format not in LOSSY:
            return Encoded(values, None)
        scales = torch.cat(
            [one.scales[:, columns] if pick else one.scales for one in read if one.scales is not None]
        )
        return Encoded(values, scales.to(self.device))
