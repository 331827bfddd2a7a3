"""Files of rows, read one row at a time: JSON lines, JSON, CSV, Parquet, Arrow, plain text; gzip, zstd."""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from deepspec.data.conversation import BadRow
from deepspec.errors import UserError

Rows = Iterator[tuple[int, Any]]
"""1-based numbers (of the line, else of the row) and what stands there: a JSON value, text, or a `BadRow`."""

ROW_BYTES = 8 << 20  # no row is longer: it is left out before it is parsed
ARRAY_BYTES = 1 << 30  # a JSON array is read as a whole
COMPRESSED = (".gz", ".zst")
UTF8_BOM = b"\xef\xbb\xbf"
UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")


def read_rows(path: Path) -> Rows:
    """The rows of one file, by its suffix; any unknown suffix is plain text, one prompt a line.

    A row that cannot be read comes as a `BadRow`, blank lines as `BlankLine`. `UserError` if the file as a
    whole cannot be read.
    """
    reader = READERS.get(kind_of(path), _text_lines)
    with _reading(path):
        yield from reader(path)


def kind_of(path: Path) -> str:
    """The suffix that says what is inside, compression taken off: `.jsonl` of `a.jsonl.gz`."""
    names = [suffix.lower() for suffix in path.suffixes]
    return next((name for name in reversed(names) if name not in COMPRESSED), "")


class BlankLine(BadRow):
    """Nothing stands there: counted, never an error."""

    def __init__(self) -> None:
        super().__init__("blank line")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """What goes wrong with a file as a whole, in a sentence."""
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f"The prompts file {path} does not exist (data.prompts).") from error
    except (EOFError, gzip.BadGzipFile, zlib.error, pa.ArrowException) as error:
        raise UserError(f"{path} is damaged or not what its suffix says: {error}.") from error
    except OSError as error:
        why = error.strerror or error
        raise UserError(f"The prompts file {path} cannot be read (data.prompts): {why}.") from error


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    """The file's bytes, decompressed, without a byte-order mark. `UserError` if it is empty or UTF-16."""
    with path.open("rb") as raw:
        suffix = path.suffix.lower()
        if suffix == ".gz":
            stream = cast(BinaryIO, gzip.GzipFile(fileobj=raw))
        elif suffix == ".zst":
            stream = cast(BinaryIO, pa.CompressedInputStream(raw, "zstd"))
        else:
            stream = raw
        with io.BufferedReader(cast(Any, stream), 1 << 16) as file:
            head = file.peek(8)
            if head.startswith(UTF16_BOMS):
                raise UserError(
                    f"{path} is UTF-16, and UTF-8 is expected: convert it, for instance with iconv."
                )
            if head.startswith(UTF8_BOM):
                file.read(len(UTF8_BOM))
            yield cast(BinaryIO, file)


def _lines(path: Path) -> Rows:
    """Lines as text. Only a newline ends a line; one longer than `ROW_BYTES` is passed over unread."""
    with _open(path) as file:
        number, filled = 0, False
        while raw := file.readline(ROW_BYTES + 1):
            number += 1
            if len(raw) > ROW_BYTES:
                while raw and not raw.endswith(b"\n"):
                    raw = file.readline(ROW_BYTES)
                filled = True
                yield number, BadRow("row too long", f"more than {ROW_BYTES >> 20} MiB")
                continue
            blank = not raw.strip()
            filled |= not blank
            yield number, BlankLine() if blank else _decode(raw)
        if not filled:
            raise UserError(f"{path} is empty: one prompt a line is expected.")


def _decode(raw: bytes) -> str | BadRow:
    if b"\x00" in raw:
        return BadRow("NUL byte", f"byte {raw.index(0) + 1} of the line")
    try:
        return raw.decode("utf-8").removesuffix("\n").rstrip("\r")
    except UnicodeDecodeError as error:
        return BadRow("not UTF-8", f"byte {error.start + 1} of the line is 0x{raw[error.start]:02x}")


def _text_lines(path: Path) -> Rows:
    for number, text in _lines(path):
        yield number, text.strip() if isinstance(text, str) else text


def parse_json(text: str) -> Any:
    """A JSON value; `BadRow` for text that is none, or that Python will not read."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise BadRow("broken JSON", f"{error.msg.removesuffix(' at')} at column {error.colno}") from error
    except RecursionError as error:
        raise BadRow("broken JSON", "nested too deeply") from error
    except ValueError as error:  # a number of more digits than Python converts
        raise BadRow("broken JSON", str(error).partition(";")[0]) from error


def _json_lines(path: Path) -> Rows:
    for number, text in _lines(path):
        if not isinstance(text, str):
            yield number, text
            continue
        try:
            yield number, parse_json(text)
        except BadRow as error:
            if number == 1 and text.lstrip().startswith("["):
                raise UserError(
                    f"{path} is one JSON array, and a .jsonl file has one object a line: rename it to .json."
                ) from error
            yield number, error


def _json(path: Path) -> Rows:
    """An array of rows, an object that holds one such array, or JSON lines under another name."""
    with _open(path) as file:
        first = file.readline(ROW_BYTES)
        while first and not first.strip():
            first = file.readline(ROW_BYTES)
        if not first.lstrip().startswith(b"[") and (not first or _is_json(first)):
            yield from _json_lines(path)
            return
        content = first + file.read(ARRAY_BYTES)
    if len(content) >= ARRAY_BYTES:
        raise UserError(f"{path} is too large for one JSON value: write it as .jsonl, one object a line.")
    try:
        whole = json.loads(content)
    except (ValueError, RecursionError) as error:
        if not first.lstrip().startswith(b"["):
            yield from _json_lines(path)  # lines, of which the first is broken
            return
        raise UserError(
            f"{path} is not valid JSON ({error}). As .jsonl, one object a line, its good rows could be used."
        ) from error
    lists = (
        [whole] if isinstance(whole, list) else [part for part in whole.values() if isinstance(part, list)]
    )
    if len(lists) != 1:
        raise UserError(f"{path} is expected to hold one array of rows, and it holds {len(lists)}.")
    yield from enumerate(lists[0], start=1)


def _is_json(line: bytes) -> bool:
    """Whether a first line is a row by itself."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _csv(path: Path) -> Rows:
    """Rows by column name; all values are text, empty cells are missing ones."""
    numbered: list[int] = []

    def texts() -> Iterator[str]:
        for number, text in _lines(path):
            numbered[:] = [number]
            if isinstance(text, str):
                yield text + "\n"
            elif isinstance(text, BlankLine):
                yield "\n"
            else:
                raise UserError(f"{path}, line {number}: {text}.")

    csv.field_size_limit(ROW_BYTES)
    reader = csv.reader(texts(), dialect="excel-tab" if kind_of(path) == ".tsv" else "excel")
    try:
        header = next(reader)
        for cells in reader:
            if not cells:
                yield numbered[0], BlankLine()
            elif len(cells) != len(header):
                yield (
                    numbered[0],
                    BadRow("wrong number of cells", f"{len(cells)}, and the header has {len(header)}"),
                )
            else:
                yield numbered[0], {name: cell or None for name, cell in zip(header, cells, strict=True)}
    except csv.Error as error:
        raise UserError(f"{path}, line {numbered[0]}: not CSV ({error}).") from error


def _parquet(path: Path) -> Rows:
    number = 0
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=256):
            for row in batch.to_pylist():
                number += 1
                yield number, row


def _arrow(path: Path) -> Rows:
    """Arrow's file format or its stream format (as `datasets` writes it)."""
    number = 0
    with pa.memory_map(str(path)) as source:
        try:
            reader: Any = pa.ipc.open_file(source)
            batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
        except pa.ArrowInvalid:
            source.seek(0)
            batches = iter(pa.ipc.open_stream(source))
        for batch in batches:
            for start in range(0, batch.num_rows, 256):
                for row in batch.slice(start, 256).to_pylist():
                    number += 1
                    yield number, row


READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
    ".arrow": _arrow,
    ".feather": _arrow,
}
