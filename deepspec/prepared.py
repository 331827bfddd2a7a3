"""The data artifact of a run's folder, as the stages behind it read it: whole, and made with these settings."""

from pathlib import Path
from typing import Any

from accelerate import PartialState
from safetensors import SafetensorError
from torch import Tensor

from deepspec.artifacts import MANIFEST, read_manifest
from deepspec.config.app import command
from deepspec.config.schema import Config
from deepspec.data import deciding
from deepspec.data.dataset import load_draft_vocab
from deepspec.data.prompts import prompts_sha256
from deepspec.errors import UserError

# Of the data's manifest, what is read by those stages.
DATA_KEYS = ("fingerprint", "config.temperature", "inputs.target.name", "inputs.draft_vocab_size")


def prepared_data(config: Config, folder: Path, processes: PartialState) -> dict[str, Any]:
    """The data's manifest; makes the data if it is missing and that was asked for."""
    missing = not (folder / MANIFEST).is_file()
    if config.auto_prepare and processes.num_processes == 1 and (missing or stale(config, folder)):
        from deepspec.prepare import run as prepare

        prepare(config)
    manifest = read_manifest(folder, command("prepare"), DATA_KEYS)
    if difference := stale(config, folder):
        raise UserError(
            f"{folder} was made with other settings ({difference}). Set them back, choose another folder (out=...), "
            f"or make it again: {command('prepare')} overwrite=true"
        )
    return manifest


def stale(config: Config, folder: Path) -> str:
    """What the data was not made with: settings, the draft vocabulary's size, the prompts; empty if nothing.

    The prompts file counts by its content, wherever it lies. One that is no longer there cannot have changed.
    """
    manifest = read_manifest(folder, command("prepare"), DATA_KEYS)
    now = {f"data.{key}": value for key, value in deciding(config.data).items()}
    now["draft.vocab_size"] = getattr(config.draft, "vocab_size", None)
    then = {f"data.{key}": value for key, value in manifest["config"].items()}
    then["draft.vocab_size"] = manifest["inputs"]["draft_vocab_size"]
    before, path = then.get("data.prompts"), now["data.prompts"]
    if path is not None and (path != before or Path(path).is_file()):
        now["data.prompts"] = f"{path} (sha256 {prompts_sha256(Path(path))[:16]})"
        made_of = manifest["inputs"].get("sources", {}).get("prompts")
        then["data.prompts"] = f"{path if made_of else before} (sha256 {(made_of or 'none')[:16]})"
    return ", ".join(f"{key} was {then.get(key)}, is {now[key]}" for key in now if then.get(key) != now[key])


def draft_vocab(folder: Path, manifest: dict[str, Any]) -> Tensor | None:
    """The data's draft vocabulary; one that should be there and is not must not pass for the whole vocabulary."""
    again = f"Remove {folder} and make it again: {command('prepare')}"
    try:
        vocab = load_draft_vocab(folder)
    except (OSError, KeyError, SafetensorError) as error:
        raise UserError(f"{folder}'s draft vocabulary is damaged ({error}). {again}") from error
    if vocab is None and manifest.get("draft_vocab", {}).get("full") is False:
        raise UserError(f"{folder} has lost its draft vocabulary (draft_vocab.safetensors). {again}")
    return vocab
