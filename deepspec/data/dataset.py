"""Documents on disk: unpacked (`conversations/`), packed for training (`train/`, `held_out/`), as prompts."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import datasets
import pyarrow as pa
from datasets import Dataset, load_from_disk
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepspec.artifacts import fingerprint
from deepspec.data.conversation import Conversation, Message
from deepspec.data.packing import pack
from deepspec.errors import UserError

Split = Literal["train", "held_out"]
COLUMNS = ("tokens", "loss_mask", "documents", "positions")
DRAFT_VOCAB = "draft_vocab.safetensors"
HELD_OUT_PROMPTS = "held_out_prompts.jsonl"


@dataclass(frozen=True)
class Document:
    """One training document: a conversation, or one turn of it where the template rewrites history.

    origin: whose answers, "given" or "regenerated". truncated: its last answer ran
    into the generation limit.
    """

    conversation: Conversation
    messages: Sequence[Message]
    tokens: list[int]
    loss_mask: list[int]
    origin: str
    split: Split
    truncated: bool = False


def save_documents(folder: Path, documents: Sequence[Document]) -> None:
    """`folder/conversations`: one row a document, with what it says and where it comes from."""
    small = pa.list_(pa.int32())
    names = [
        *(
            (name, pa.string())
            for name in ("id", "group", "category", "source", "origin", "split", "messages")
        ),
        *(("truncated", pa.bool_()), ("tokens", small), ("loss_mask", small)),
    ]
    rows = [
        {
            "id": item.conversation.id,
            "group": item.conversation.group,
            "category": item.conversation.category,
            "source": item.conversation.source,
            "origin": item.origin,
            "split": item.split,
            "messages": json.dumps(list(item.messages), ensure_ascii=False),
            "truncated": item.truncated,
            "tokens": item.tokens,
            "loss_mask": item.loss_mask,
        }
        for item in documents
    ]
    _save(pa.Table.from_pylist(rows, schema=pa.schema(names)), folder / "conversations")


def save_rows(folder: Path, split: Split, documents: Sequence[Document], length: int, pad: int) -> int:
    """Pack one split's documents into `folder/<split>`; returns the number of rows."""
    own = [item for item in documents if item.split == split]
    packed = pack([item.tokens for item in own], [item.loss_mask for item in own], length, pad)
    column = pa.list_(pa.int32())
    arrays = {name: pa.array(list(getattr(packed, name)), type=column) for name in COLUMNS}
    _save(pa.table(arrays), folder / split)
    return len(packed.tokens)


def _save(table: pa.Table, folder: Path) -> None:
    # A fingerprint of the content, not datasets' own: equal rows must give equal bytes.
    digest = fingerprint([folder.name, str(table.schema), table.num_rows, _digest(table)])
    rows = Dataset(table, fingerprint=digest)
    hidden = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        rows.save_to_disk(str(folder), num_shards=1)
    finally:
        if not hidden:
            datasets.enable_progress_bars()


def _digest(table: pa.Table) -> str:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return hashlib.sha256(sink.getvalue()).hexdigest()


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


def save_prompts(folder: Path, prompts: Sequence[dict[str, Any]]) -> None:
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


def write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """One JSON object a line, UTF-8."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")
