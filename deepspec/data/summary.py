"""What a data artifact holds, counted, and as a table for the person who made it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepspec.data.dataset import Document


def counts(
    documents: Sequence[Document], rows: Mapping[str, int], max_length: int, prompts: int
) -> dict[str, Any]:
    """Documents, tokens and supervised tokens of each split; documents by origin, source and category."""
    found: dict[str, Any] = {"held_out_prompts": prompts}
    for split, packed in rows.items():
        own = [item for item in documents if item.split == split]
        tokens = sum(len(item.tokens) for item in own)
        found[split] = {
            "documents": len(own),
            "conversations": len({item.conversation.id for item in own}),
            "tokens": tokens,
            "supervised_tokens": sum(sum(item.loss_mask) for item in own),
            "rows": packed,
            "padding": round(1 - tokens / (packed * max_length), 4) if packed else 0.0,
            "origin": dict(sorted(Counter(item.origin for item in own).items())),
            "source": dict(sorted(Counter(item.conversation.source for item in own).items())),
            "category": dict(sorted(Counter(item.conversation.category for item in own).items())),
        }
    return found


def summary(manifest: Mapping[str, Any], folder: Path) -> str:
    """A few aligned lines about a finished artifact."""
    numbers, vocab = manifest["counts"], manifest["draft_vocab"]
    lines = [f"Prepared {folder} (fingerprint {manifest['fingerprint']})"]
    header = ("", "documents", "rows", "tokens", "supervised", "padding")
    table: list[tuple[str, ...]] = [header]
    for split in ("train", "held_out"):
        part = numbers[split]
        cells = [f"{part[key]:,}" for key in ("documents", "rows", "tokens", "supervised_tokens")]
        table.append((split, *cells, f"{part['padding']:.1%}"))
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
    for title, key in (("left out", "left_out"), ("noted", "noted")):
        for reason, count in numbers[key].items():
            lines.append(f"  {title}: {count} × {reason}")
    return "\n".join(lines)
