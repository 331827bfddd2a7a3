"""One shard of a feature store: a safetensors file with the features of whole documents.

Tensors, D documents, N feature rows, M teacher rows, L layers: `keys` uint8 [D, 16]; `starts` int64 [D+1], a
document's feature rows; `places` int32 [N], their positions in the document; `features` [N, L, H] and
`feature_scales` float32 [N, L] (int4: [N, L, H/2] and bfloat16 [N, L, H/32]); `last_starts`, `last_places`, `last`
[M, 1, H], `last_scales` [M, 1] likewise for the last hidden state, which beside int4 is int8. Exact formats have no
scales. Where the last layer is among the captured ones the last hidden state is in `features`, and there is no `last`
(but beside int4); without captured layers there is no `features`.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from deepspec.artifacts import write_json
from deepspec.errors import UserError
from deepspec.target.features.codec import Encoded
from deepspec.target.features.documents import KEY_BYTES

SUFFIX = ".safetensors"
DTYPES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}
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
    """An open shard: a memory map. What is read is copied; nothing else stays in memory but the documents' starts.

    The map is read here and not through safetensors' slices, which keep some bytes of every one that was ever cut.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._map = np.memmap(path, np.uint8, "r")
            length = int(self._map[:8].view("<u8")[0])
            self._header: dict[str, Any] = json.loads(self._map[8 : 8 + length].tobytes())
            self._data = 8 + length
            self._starts = {name: self.cut(name) for name in self._header if name.endswith("starts")}
        except (ValueError, KeyError, UnicodeDecodeError) as error:
            raise UserError(f"{path} is no safetensors file ({error}).") from error

    def read(self, name: str, item: int) -> Stored:
        """Document number `item`'s part `features` or `last`."""
        prefix, scales = ("", "feature_scales") if name == "features" else ("last_", "last_scales")
        start, end = self._starts[f"{prefix}starts"][item : item + 2].tolist()
        scaled = self.cut(scales, start, end) if scales in self._header else None
        return Stored(self.cut(f"{prefix}places", start, end), Encoded(self.cut(name, start, end), scaled))

    def cut(self, name: str, start: int = 0, end: int | None = None) -> Tensor:
        """Rows [start, end) of a tensor."""
        said = self._header[name]
        rows, *shape = said["shape"]
        end, width = (
            rows if end is None else end,
            (said["data_offsets"][1] - said["data_offsets"][0]) // max(rows, 1),
        )
        first = self._data + said["data_offsets"][0]
        content = np.array(self._map[first + start * width : first + end * width])
        return torch.from_numpy(content).view(DTYPES[said["dtype"]]).view(end - start, *shape)
