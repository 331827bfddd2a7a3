"""Tensors of a checkpoint that the library's model has no place for, read from its files."""

import json
from collections.abc import Callable
from pathlib import Path

from safetensors import safe_open
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file


def stored_tensors(path: str, revision: str | None, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """By their names in the checkpoint, on the CPU, in its format. path: folder or hub name; only the files with wanted
    tensors are fetched. Empty where the checkpoint has none, or no safetensors files."""
    if (index := _file(path, SAFE_WEIGHTS_INDEX_NAME, revision)) is not None:
        places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted({file for name, file in places.items() if wanted(name)})
    else:
        names = [SAFE_WEIGHTS_NAME]
    found: dict[str, Tensor] = {}
    for name in names:
        if (file := _file(path, name, revision)) is None:
            continue
        with safe_open(file, "pt") as tensors:
            found |= {key: tensors.get_tensor(key) for key in tensors.keys() if wanted(key)}  # noqa: SIM118
    return found


def _file(path: str, name: str, revision: str | None) -> Path | None:
    if Path(path).is_dir():
        found = Path(path) / name
        return found if found.is_file() else None
    cached = cached_file(path, name, revision=revision, _raise_exceptions_for_missing_entries=False)
    return None if cached is None else Path(cached)
