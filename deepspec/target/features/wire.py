"""What a feature server and its clients say to each other: safetensors bytes, no code, the same for every engine.

A question (`POST /v1/features`) holds `tokens`, `positions`, `documents` [B, T] int32 (document −1: padding); an answer
`features` [B, T, layers·H], the asked layers' outputs side by side, and `last_hidden` [B, T, H] before the final norm,
in the target's number format. What else must be known stands in the file's metadata, see docs/feature-server.md.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from deepspec.artifacts import fingerprint, without_name
from deepspec.target.model import Captured

PROTOCOL = "1"
PATH = "/v1/features"
MEDIA_TYPE = "application/vnd.safetensors"
BEFORE_NORM = "before the final norm"
COLUMNS = ("tokens", "positions", "documents")


class Malformed(ValueError):
    """Bytes that are no question or answer of this protocol; the text says what is wrong."""


def identity_of(identity: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same on both sides for features to be the same: all but the target's name."""
    return without_name(dict(identity))


def question(
    tokens: Tensor, positions: Tensor, documents: Tensor, layers: Sequence[int], identity: Mapping[str, Any]
) -> bytes:
    """Bytes that ask for the features of packed rows [B, T]."""
    columns = {
        name: column.to("cpu", torch.int32).contiguous()
        for name, column in zip(COLUMNS, (tokens, positions, documents), strict=True)
    }
    about = {
        "protocol": PROTOCOL,
        "layers": ",".join(map(str, layers)),
        "target": fingerprint(identity_of(identity)),
    }
    return save(columns, metadata=about)


def read_question(content: bytes) -> tuple[dict[str, Tensor], list[int], str]:
    """Columns [B, T] int64, the layers asked for, and the fingerprint of the target that is meant. `Malformed`."""
    columns, about = _read(content)
    if sorted(columns) != sorted(COLUMNS):
        raise Malformed(
            f"tensors {', '.join(COLUMNS)} are expected, not {', '.join(sorted(columns)) or 'none'}"
        )
    shapes = {tuple(column.shape) for column in columns.values()}
    if len(shapes) != 1 or len(next(iter(shapes))) != 2 or not all(next(iter(shapes))):
        raise Malformed(f"{', '.join(COLUMNS)} must have one shape [B, T], not {sorted(shapes)}")
    if wrong := [name for name, column in columns.items() if column.dtype != torch.int32]:
        raise Malformed(
            f"{wrong[0]} must be int32, not {str(columns[wrong[0]].dtype).removeprefix('torch.')}"
        )
    try:
        layers = [int(layer) for layer in about["layers"].split(",") if layer]
    except (KeyError, ValueError) as error:
        raise Malformed("the metadata's `layers` must be numbers with commas between them") from error
    return {name: column.long() for name, column in columns.items()}, layers, about.get("target", "")


def answer(captured: Captured, identity: Mapping[str, Any]) -> bytes:
    """Bytes with the features of the rows that were asked for."""
    tensors = {
        "features": captured.features.to("cpu").contiguous(),
        "last_hidden": captured.last_hidden.to("cpu").contiguous(),
    }
    about = {"protocol": PROTOCOL, "last_hidden": BEFORE_NORM, "target": fingerprint(identity_of(identity))}
    return save(tensors, metadata=about)


def read_answer(content: bytes, rows: int, length: int, layers: int, hidden: int) -> Captured:
    """Features of [rows, length] tokens. `Malformed` unless they are all there and finite."""
    tensors, about = _read(content)
    if about.get("last_hidden") != BEFORE_NORM:
        raise Malformed(f"its last hidden state must be {BEFORE_NORM}, it is {about.get('last_hidden')!r}")
    for name, width in (("features", layers * hidden), ("last_hidden", hidden)):
        found = tuple(tensors[name].shape) if name in tensors else None
        if found != (rows, length, width):
            raise Malformed(
                f"{name} must be {[rows, length, width]}, it is {list(found) if found else 'missing'}"
            )
        if not bool(torch.isfinite(tensors[name]).all()):
            raise Malformed(f"{name} has values that are not finite")
    return Captured(tensors["features"], tensors["last_hidden"])


def _read(content: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        tensors = load(content)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise Malformed(f"these are no safetensors ({error})") from error
    about = _metadata(content)
    if about.get("protocol") != PROTOCOL:
        raise Malformed(f"protocol {PROTOCOL} is expected, not {about.get('protocol')!r}")
    return tensors, about


def _metadata(content: bytes) -> dict[str, str]:
    """Of bytes that `load` took: eight bytes of length, then a JSON header."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    found = header.get("__metadata__") or {}
    return {str(name): str(value) for name, value in found.items()}
