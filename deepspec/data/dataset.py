"""The data artifact's tables on disk: `conversations/`, packed `train/` and `held_out/`, prompts, draft vocab."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from datasets import Dataset, load_from_disk
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepspec.data.packing import pack
from deepspec.data.store import Document, Split
from deepspec.errors import UserError

COLUMNS = ("tokens", "loss_mask", "documents", "positions")
DRAFT_VOCAB = "draft_vocab.safetensors"
HELD_OUT_PROMPTS = "held_out_prompts.jsonl"
BATCH = 256  # rows in memory at a time
SMALL = pa.list_(pa.int32())
TEXTS = ("id", "group", "category", "source", "origin", "split", "messages")
CONVERSATIONS = pa.schema(
    [
        *((name, pa.string()) for name in TEXTS),
        *(("truncated", pa.bool_()), ("changed_by", pa.string()), ("tokens", SMALL), ("loss_mask", SMALL)),
    ]
)


def save_documents(folder: Path, documents: Iterable[Document]) -> None:
    """`folder/conversations`: one row a document, with what it says and where it comes from."""

    def batches() -> Iterator[pa.RecordBatch]:
        rows: list[dict[str, Any]] = []
        for item in documents:
            rows.append(_row(item))
            if len(rows) == BATCH:
                yield pa.RecordBatch.from_pylist(rows, schema=CONVERSATIONS)
                rows = []
        if rows:
            yield pa.RecordBatch.from_pylist(rows, schema=CONVERSATIONS)

    _save(folder / "conversations", CONVERSATIONS, batches())


def _row(item: Document) -> dict[str, Any]:
    return {
        "id": item.conversation.id,
        "group": item.conversation.group,
        "category": item.conversation.category,
        "source": item.conversation.source,
        "origin": item.origin,
        "split": item.split,
        "messages": json.dumps(list(item.messages), ensure_ascii=False),
        "truncated": item.truncated,
        "changed_by": ", ".join(item.conversation.changed_by),
        "tokens": item.tokens,
        "loss_mask": item.loss_mask,
    }


def save_rows(folder: Path, split: Split, documents: Sequence[Document], length: int, pad: int) -> int:
    """Pack one split's documents into `folder/<split>`; returns the number of rows."""
    own, lengths = [], []
    for index, item in enumerate(documents):
        if item.split == split:
            own.append(index)
            lengths.append(len(item.tokens))
    schema = pa.schema([(name, SMALL) for name in COLUMNS])
    rows = 0

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal rows
        for packed in pack(lengths, lambda index: documents[own[index]], length, pad, BATCH):
            arrays = [pa.array(list(getattr(packed, name)), type=SMALL) for name in COLUMNS]
            rows += len(packed.tokens)
            yield pa.record_batch(arrays, schema=schema)

    _save(folder / split, schema, batches())
    return rows


def _save(folder: Path, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
    """A folder as `Dataset.save_to_disk` makes one, written batch by batch.

    Its fingerprint is one of the content, not datasets' own: equal rows must give equal bytes.
    """
    data = folder.with_name(f"{folder.name}.arrow")
    with pa.OSFile(str(data), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    digest = hashlib.sha256(str(schema).encode())
    with data.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    frame = Dataset(schema.empty_table(), fingerprint=digest.hexdigest()[:16])
    hidden = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        frame.save_to_disk(str(folder), num_shards=1)
    finally:
        if not hidden:
            datasets.enable_progress_bars()
    (empty,) = folder.glob("*.arrow")
    data.replace(empty)


def load_rows(folder: Path, split: Split) -> Dataset:
    """The packed rows of one split of a data artifact, in torch format.

    Columns tokens, loss_mask, documents (−1: padding) and positions, int64 [L] each. `UserError` if the
    artifact does not hold them.
    """
    path = folder / split
    try:
        rows = load_from_disk(str(path))
    except (FileNotFoundError, OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{path} is not a complete folder of packed rows ({error}): prepare the data again."
        ) from error
    if not isinstance(rows, Dataset) or any(name not in rows.column_names for name in COLUMNS):
        raise UserError(f"{path} does not have the columns {', '.join(COLUMNS)}: prepare the data again.")
    return rows.with_format("torch", columns=list(COLUMNS))


def save_draft_vocab(folder: Path, target_ids: Tensor | None) -> None:
    """Write `target_ids` (int64 [Vd], ascending); nothing where the vocabulary is full."""
    if target_ids is not None:
        save_file({"target_ids": target_ids}, str(folder / DRAFT_VOCAB))


def load_draft_vocab(folder: Path) -> Tensor | None:
    """int64 [Vd] ascending, or None: the draft uses the target's whole vocabulary."""
    path = folder / DRAFT_VOCAB
    return load_file(str(path))["target_ids"] if path.is_file() else None


def save_prompts(folder: Path, prompts: Iterable[dict[str, Any]]) -> None:
    """`held_out_prompts.jsonl`: id, category, messages and the templated prompt's tokens, one a line."""
    write_jsonl(folder / HELD_OUT_PROMPTS, prompts)


def load_prompts(folder: Path) -> list[dict[str, Any]]:
    """What `save_prompts` wrote."""
    path = folder / HELD_OUT_PROMPTS
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing: prepare the data again.") from error
    return [json.loads(line) for line in text.split("\n") if line]


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """One JSON object a line, UTF-8."""
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
