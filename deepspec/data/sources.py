"""Where prompts come from: one file, a folder, a pattern of files, or a data set of the Hugging Face hub."""

import glob
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepspec.artifacts import file_sha256
from deepspec.config.schema import HubConfig
from deepspec.data.readers import READERS, Rows, kind_of, read_rows
from deepspec.errors import UserError

HUB = "hf:"
SUFFIXES = (*READERS, ".txt")


def source_rows(source: str, hub: HubConfig) -> Iterator[tuple[str, Rows]]:
    """Names and rows of everything `source` stands for, in a fixed order. `UserError` if there is nothing."""
    if source.startswith(HUB):
        yield source, _hub_rows(source.removeprefix(HUB), hub)
        return
    for path in source_files(source):
        yield str(path), read_rows(path)


def source_files(source: str | Path) -> list[Path]:
    """The files of a file name, a folder (everything readable below it) or a pattern, sorted by name."""
    path = Path(source)
    if path.is_dir():
        found = [
            item
            for item in sorted(path.rglob("*"))
            if item.is_file() and not item.name.startswith(".") and kind_of(item) in SUFFIXES
        ]
        if not found:
            raise UserError(
                f"The folder {path} has no file of prompts (data.prompts): {', '.join(SUFFIXES)}."
            )
        return found
    if not path.exists() and glob.has_magic(str(source)):
        found = [
            Path(name) for name in sorted(glob.glob(str(source), recursive=True)) if Path(name).is_file()
        ]
        if not found:
            raise UserError(f"No file matches {source} (data.prompts).")
        return found
    return [path]


def prompts_sha256(source: str | Path) -> str:
    """What the content of a source is called: sha256 of one file's bytes, or of all files' names and hashes.

    A hub data set goes by its name: its content is the revision's. `UserError` if it cannot be read.
    """
    if str(source).startswith(HUB):
        return hashlib.sha256(str(source).encode()).hexdigest()
    files = source_files(source)
    if len(files) == 1:
        return _sha256(files[0])
    parts = "".join(f"{path.name}\n{_sha256(path)}\n" for path in files)
    return hashlib.sha256(parts.encode()).hexdigest()


def _sha256(path: Path) -> str:
    try:
        return file_sha256(path)
    except FileNotFoundError as error:
        raise UserError(f"The prompts file {path} does not exist (data.prompts).") from error
    except OSError as error:
        raise UserError(
            f"The prompts file {path} cannot be read (data.prompts): {error.strerror}."
        ) from error


def _hub_rows(name: str, options: HubConfig) -> Rows:
    import datasets

    try:
        rows: Any = datasets.load_dataset(
            name,
            options.subset,
            split=options.split,
            revision=options.revision,
            streaming=options.streaming,
        )
    except (OSError, ValueError, RuntimeError) as error:  # the hub's own errors are of these kinds
        raise UserError(
            f"The data set {name} cannot be loaded (data.prompts={HUB}{name}, data.hub): "
            f"{str(error).strip().splitlines()[0]}"
        ) from error
    yield from enumerate(rows, start=1)
