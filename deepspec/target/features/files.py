"""One shard of a feature store: a safetensors file with the features of whole documents.

Tensors, D documents, N feature rows, M teacher rows, L layers: `keys` uint8 [D, 16]; `starts` int64 [D+1], a
document's feature rows; `places` int32 [N], their positions in the document; `features` [N, L, H] and
`feature_scales` float32 [N, L]; `last_starts`, `last_places`, `last` [M, 1, H], `last_scales` [M, 1] likewise for
the last hidden state. Exact formats have no scales. Where the last layer is among the captured ones the last hidden
state is in `features`, and there is no `last`; without captured layers there is no `features`.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from deepspec.artifacts import write_json
from deepspec.target.features.codec import Encoded
from deepspec.target.features.documents import KEY_BYTES

SUFFIX = ".safetensors"
DONE = ".json"  # beside a finished shard until the store is whole


@dataclass
class Part:
    """`features` or `last` of a shard, as it grows: a batch's encoded rows on the CPU, and whose they are."""

    name: str
    values: list[Tensor] = field(default_factory=list)
    scales: list[Tensor] = field(default_factory=list)
    places: list[NDArray[np.int32]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def add(self, encoded: Encoded) -> None:
        self.values.append(encoded.values)
        if encoded.scales is not None:
            self.scales.append(encoded.scales)

    def tensors(self) -> dict[str, Tensor]:
        prefix = "" if self.name == "features" else "last_"
        found = {
            self.name: torch.cat(self.values),
            f"{prefix}starts": torch.tensor([0, *np.cumsum(self.counts).tolist()]),
            f"{prefix}places": torch.from_numpy(np.concatenate(self.places).astype(np.int32)),
        }
        if self.scales:
            found["feature_scales" if self.name == "features" else "last_scales"] = torch.cat(self.scales)
        return found

    @property
    def rows(self) -> int:
        return sum(self.counts)


@dataclass
class Contents:
    """A shard before it is written. parts: `features`, `last` or both; tokens: of its documents."""

    parts: list[Part]
    keys: list[bytes] = field(default_factory=list)
    tokens: int = 0


def write_shard(path: Path, contents: Contents, sha256: Any) -> None:
    """The file under a temporary name, renamed; then a small file beside it that says that it is finished.

    sha256: path → hex digest. A shard without documents has no file, only the second one.
    """
    counts = {part.name: part.rows for part in contents.parts}
    said = {"documents": len(contents.keys), "tokens": contents.tokens, **counts}
    if contents.keys:
        keys = np.frombuffer(b"".join(contents.keys), dtype=np.uint8).reshape(-1, KEY_BYTES).copy()
        tensors = {"keys": torch.from_numpy(keys)}
        for part in contents.parts:
            tensors |= part.tensors()
        partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
        try:
            save_file(tensors, partial)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        said |= {"bytes": path.stat().st_size, "sha256": sha256(path)}
    write_json(path.with_suffix(DONE), said)


@dataclass(frozen=True)
class Stored:
    """One document's rows of one part: places [n] in the document, and the encoded rows."""

    places: Tensor
    encoded: Encoded


class Shard:
    """An open shard: a memory map; what is read is copied, nothing else stays in memory but the starts."""

    def __init__(self, path: Path) -> None:
        self.file = safe_open(str(path), "pt")
        names = set(self.file.keys())
        self.starts = {name: self.file.get_tensor(name).tolist() for name in names if name.endswith("starts")}
        self.scaled = bool({"feature_scales", "last_scales"} & names)

    def read(self, name: str, item: int) -> Stored:
        """Document number `item`'s part `features` or `last`."""
        prefix, scales = ("", "feature_scales") if name == "features" else ("last_", "last_scales")
        start, end = self.starts[f"{prefix}starts"][item : item + 2]

        def cut(tensor: str) -> Tensor:
            return self.file.get_slice(tensor)[start:end]

        return Stored(cut(f"{prefix}places"), Encoded(cut(name), cut(scales) if self.scaled else None))
