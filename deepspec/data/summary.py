"""What a data artifact holds, counted, and as a table for the person who made it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspec.data.store import Store


def counts(store: Store, rows: Mapping[str, int], max_length: int, prompts: int) -> dict[str, Any]:
    """Documents, tokens and supervised tokens of each split; documents by origin, source and category."""
    found: dict[str, Any] = {"held_out_prompts": prompts}
    for split, packed in rows.items():
        documents, conversations, tokens, answers = store.database.execute(
            "SELECT count(*), count(DISTINCT id), coalesce(sum(length(mask)), 0), coalesce(sum(answers), 0)"
            " FROM document WHERE split = ?",
            (split,),
        ).fetchone()
        supervised = int(
            store.one("SELECT coalesce(sum(supervised), 0) FROM document WHERE split = ?", (split,))
        )
        found[split] = {
            "documents": documents,
            "conversations": conversations,
            "tokens": tokens,
            "supervised_tokens": supervised,
            "mean_answer_tokens": round(supervised / answers, 1) if answers else 0.0,
            "rows": packed,
            "padding": round(1 - tokens / (packed * max_length), 4) if packed else 0.0,
            **{name: _tally(store, split, name) for name in ("origin", "source", "category")},
        }
    return found


def _tally(store: Store, split: str, name: str) -> dict[str, int]:
    """Documents of a split by one of their columns or their conversation's."""
    return dict(
        store.rows(
            f"SELECT {name}, count(*) FROM document JOIN conversation ON document.conversation = conversation.n"
            f" WHERE split = ? GROUP BY {name} ORDER BY {name}",
            (split,),
        )
    )


def summary(manifest: Mapping[str, Any], folder: Path) -> str:
    """A few aligned lines about a finished artifact."""
    numbers, vocab = manifest["counts"], manifest["draft_vocab"]
    lines = [f"Prepared {folder} (fingerprint {manifest['fingerprint']})"]
    header = ("", "documents", "rows", "tokens", "supervised", "mean answer", "padding")
    table: list[tuple[str, ...]] = [header]
    for split in ("train", "held_out"):
        part = numbers[split]
        cells = [f"{part[key]:,}" for key in ("documents", "rows", "tokens", "supervised_tokens")]
        table.append((split, *cells, f"{part['mean_answer_tokens']:,}", f"{part['padding']:.1%}"))
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    for row in table:
        cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        lines.append("  " + "  ".join(cells))
    origin = ", ".join(f"{count} {name}" for name, count in numbers["train"]["origin"].items())
    lines.append(f"  answers in train: {origin}; held-out prompts: {numbers['held_out_prompts']}")
    if vocab["full"]:
        lines.append(f"  draft vocabulary: the target's own, {vocab['size']:,} tokens")
    else:
        held = vocab["coverage_held_out"]
        lines.append(
            f"  draft vocabulary: {vocab['size']:,} tokens, {vocab['coverage_train']:.2%} of the supervised "
            f"tokens of train" + ("" if held is None else f", {held:.2%} of held_out")
        )
    left = sum(numbers["left_out"].values())
    lines.append(f"  conversations read: {numbers['read']:,}; left out, lines and turns included: {left:,}")
    for title, key in (("recognised", "shapes"), ("left out", "left_out"), ("noted", "noted")):
        for reason, count in numbers[key].items():
            lines.append(f"  {title}: {count:,} × {reason}")
    return "\n".join(lines)
