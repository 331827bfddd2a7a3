"""Artifact folders: written whole or not at all, each with a `manifest.json` of what it was made of."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from deepspec.errors import UserError

MANIFEST = "manifest.json"
LOCK = ".lock"
# What a run's folder holds, relative to `out`.
FOLDERS = ("data", "features", "draft", "checkpoints", "evaluation", "evaluation/partial")
FILES = (LOCK, "plan.json", "history.jsonl", "evaluation/result.json", "evaluation/report.html")
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
PACKAGES = ("torch", "transformers", "datasets", "accelerate", "tokenizers", "numpy")
TORCH_WRITES = ("inline_container", "PytorchStreamWriter", "iostream error")  # in its errors of failed writes
SUMS = "sha256"  # the manifest's key for {file: sha256 of its bytes}
OBJECTS, LISTS = (
    ("inputs", "target", "recipe", "counts", SUMS),
    ("warnings",),
)  # in a manifest, where they are set


def fingerprint(content: Any) -> str:
    """A short sha256 over `content` as canonical JSON; equal content gives equal text on every machine.

    Only what decides the result belongs in `content`: not times, hosts or paths.
    """
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def plain(value: Any) -> Any:
    """Dataclasses, enums and tuples as JSON has them."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def differences(before: Any, now: Any, most: int = 5) -> str:
    """What two contents differ in, by dotted key: `data.seed was 0, is 1; …`; empty if in nothing."""
    old, new = flat(before), flat(now)
    keys = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    shown = [f"{key} was {old.get(key, 'not set')!r}, is {new.get(key, 'not set')!r}" for key in keys[:most]]
    return "; ".join(shown) + (f" and {len(keys) - most} more" if len(keys) > most else "")


def flat(content: Any, key: str = "") -> dict[str, Any]:
    """Values by dotted key."""
    if not isinstance(content, Mapping):
        return {key: list(content) if isinstance(content, tuple) else content}
    found: dict[str, Any] = {}
    for name, value in content.items():
        found |= flat(value, f"{key}.{name}" if key else str(name))
    return found


def refuse_to_replace(path: Path, difference: str) -> UserError:
    """The one rule of all stages, as an error to raise: what is there stays, unless `overwrite=true`."""
    return UserError(
        f"{path} was made with other settings ({difference}). A stage replaces nothing unasked: set them back, "
        f"choose another folder (out=...), or replace it with overwrite=true (or by removing {path})."
    )


def without_name(target: Mapping[str, Any]) -> dict[str, Any]:
    """A target's identity without what it is called: a model that was moved or renamed is the same one."""
    return {key: value for key, value in target.items() if key != "name"}


def versions() -> dict[str, str]:
    """The versions of deepspec and of the packages that can change a result."""
    from deepspec import __version__

    found = {"deepspec": __version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@contextmanager
def new_artifact(folder: Path, manifest: dict[str, Any]) -> Iterator[Path]:
    """Yield a temporary folder beside `folder`; on success it gets `manifest.json` and takes the name.

    A kill at any moment leaves the old artifact, the new one or (between two renames) none: never a half
    one. `manifest` may be filled while the folder is written; `versions` and the files' sums are added.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        write_json(partial / MANIFEST, {**manifest, "versions": versions(), SUMS: sums(partial)})
        replace_folder(partial, folder)
    except Exception as error:
        why = failed_write(error)
        if why is None:
            raise
        raise UserError(
            f"Could not write {folder / _newest_in(partial)}: {why} ({free_space(folder.parent)}). What was there "
            "before is untouched. Make room and give the same command again."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def failed_write(error: Exception) -> str | None:
    """Why a file could not be written, in words; None if the error is of another kind.

    safetensors and torch do not raise an `OSError` then: theirs are told by what they say.
    """
    text = str(error)
    if isinstance(error, OSError):
        return error.strerror or text
    if type(error).__name__ == "SafetensorError" and "I/O error" in text:
        return text.rpartition("I/O error: ")[2]
    if isinstance(error, RuntimeError) and any(words in text for words in TORCH_WRITES):
        return "a write failed or was cut short"
    return None


def free_space(folder: Path) -> str:
    """`1.2 GiB free in <folder>`, of the file system it is on."""
    return f"{shutil.disk_usage(folder).free / 2**30:.2f} GiB free in {folder}"


def _newest_in(folder: Path) -> Path:
    """The file that was written last, relative to `folder`; `.` if there is none."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    newest = max(found, key=lambda path: path.stat().st_mtime_ns, default=folder)
    return newest.relative_to(folder)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left beside `folder` under its temporary names."""
    for kind in ("partial", "old"):
        for path in folder.parent.glob(f".{folder.name}.{kind}-*"):
            owner = path.name.rpartition("-")[2]
            if owner.isdigit() and not psutil.pid_exists(int(owner)):
                shutil.rmtree(path, ignore_errors=True)


def replace_folder(new: Path, folder: Path) -> None:
    """Give `new` the name `folder`, moving an older one out of the way first (folders cannot be replaced)."""
    old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    if folder.exists():
        os.replace(folder, old)
    try:
        os.replace(new, folder)
    except OSError:
        if old.exists():
            os.replace(old, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def sums(folder: Path) -> dict[str, str]:
    """File below `folder` (but its own manifest) → sha256 of its bytes."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / MANIFEST:
            found[path.relative_to(folder).as_posix()] = file_sha256(path)
    return found


def damage(folder: Path, manifest: Mapping[str, Any], only: str | None = None) -> str | None:
    """The first file of an artifact that is missing or has other bytes than were written, in words; else None.

    only: look at this file alone. An artifact of an earlier version, without sums, has nothing to compare.
    """
    written = manifest.get(SUMS) or {}
    for name in [only] if only else written:
        path = folder / name
        if name in written and not path.is_file():
            return f"{path} is missing"
        if name in written and file_sha256(path) != written[name]:
            return f"{path} is damaged: its bytes are not those that were written (sha256)"
    return None


def check_whole(folder: Path, manifest: Mapping[str, Any], made_by: str, only: str | None = None) -> None:
    """`UserError` naming the first file that is not as it was written (`damage`), and what to do about it."""
    if wrong := damage(folder, manifest, only):
        raise UserError(f"{wrong}. Remove {folder} and make it again: {made_by}")


def file_sha256(path: Path) -> str:
    """sha256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def check_places(out: Path) -> None:
    """`UserError` where a file lies in the place of a folder that a stage writes, or a folder in a file's."""
    for name in (*FOLDERS, *FILES):
        path, folder = out / name, name in FOLDERS
        if path.exists() and path.is_dir() != folder:
            found, wanted = ("a file", "a folder") if folder else ("a folder", "a file")
            raise UserError(
                f"{path} is {found}, and a stage keeps {wanted} there. Move it away, or choose another folder "
                "with out=..."
            )


@contextmanager
def only_process_in(folder: Path) -> Iterator[None]:
    """Keep other processes out of `folder` meanwhile; `UserError` if one is in it.

    The lock is the system's own and ends with the process, however it ends; the empty file that carries it
    stays. Of the ranks of one launch the first locks for all. A file system without locks is used without.
    """
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"Another process works in {folder}. Wait for it to end, or choose another folder with out=..."
            ) from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield


def write_json(path: Path, content: Any) -> None:
    """Write JSON under a temporary name and rename it."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    partial.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


def read_manifest(folder: Path, made_by: str, keys: Sequence[str] = ()) -> dict[str, Any]:
    """The manifest of an artifact; `made_by` is the exact command that makes it, for the error.

    keys: dotted names that must be in it; the sections on the way are objects.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise UserError(f"{folder} does not exist or is not complete. Make it first: {made_by}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(
            f"{path} is damaged ({error}). Remove the folder and make it again: {made_by}"
        ) from error
    wrong = "not a JSON object" if not isinstance(content, dict) else _lacks(content, keys)
    if wrong:
        raise UserError(f"{path} is damaged ({wrong}). Remove the folder and make it again: {made_by}")
    return content


def _lacks(content: dict[str, Any], keys: Sequence[str]) -> str | None:
    """`no inputs.target`, for the first key that is not there, or a section of another kind; else None."""
    for kind, words, names in ((dict, "an object", OBJECTS), (list, "a list", LISTS)):
        for name in names:
            if content.get(name) is not None and not isinstance(content[name], kind):
                return f"{name} is not {words}"
    for key in keys:
        inner: Any = content
        for name in key.split("."):
            if not isinstance(inner, dict) or name not in inner:
                return f"no {key}"
            inner = inner[name]
    return None


def cache_dir() -> Path:
    """Where converted targets and measured tables live: `$XDG_CACHE_HOME/deepspec`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deepspec"
