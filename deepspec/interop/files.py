"""Checkpoint folders as they come: `config.json` and tensors, in one file or several."""

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from deepspec.errors import UserError

SINGLE = ("model.safetensors", "pytorch_model.bin")


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json`; `UserError` if it is missing, damaged or no object."""
    path = folder / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{folder} holds no checkpoint (no config.json).") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is damaged or unreadable ({error}).") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is no configuration: it is not a JSON object.")
    return content


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, on the CPU. Pickles are read with `weights_only`: no code of theirs runs."""
    tensors: dict[str, Tensor] = {}
    for path in _files(folder):
        try:
            found = (
                load_file(path)
                if path.suffix == ".safetensors"
                else torch.load(path, "cpu", weights_only=True)
            )
        except (OSError, SafetensorError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
            raise UserError(
                f"{path} is damaged or missing ({' '.join(str(error).split())[:200]})."
            ) from error
        if twice := sorted(tensors.keys() & found.keys()):
            raise UserError(f"{path} has the tensor {twice[0]}, which another file of {folder} has too.")
        tensors |= found
    return tensors


def _files(folder: Path) -> list[Path]:
    for name in SINGLE:
        index = folder / f"{name}.index.json"
        if index.is_file():
            try:
                listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise UserError(f"{index} is damaged ({error}).") from error
            return [folder / part for part in sorted(set(listed.values()))]
        if (folder / name).is_file():
            return [folder / name]
    raise UserError(f"{folder} holds no weights ({' or '.join(SINGLE)}).")
