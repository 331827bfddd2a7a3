"""A page that shows what the loss mask covers: documents with learned tokens marked, and everything counted."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from datasets import load_from_disk
from jinja2 import Environment, PackageLoader, StrictUndefined
from transformers import PreTrainedTokenizerBase

from deepspec.artifacts import read_manifest
from deepspec.errors import UserError

ROWS = 40
LISTS = (("Left out", "left_out"), ("Noted", "noted"), ("Recognised as", "shapes"))


def write_audit(
    folder: Path, tokenizer: PreTrainedTokenizerBase, page: Path, made_by: str, rows: int = ROWS
) -> Path:
    """Write `page` about the data artifact `folder`, with up to `rows` of its documents; returns `page`.

    made_by: the command that makes the artifact, for the `UserError` if it is not there.
    """
    manifest = read_manifest(folder, made_by)
    try:
        documents = load_from_disk(str(folder / "conversations"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is damaged ({error}): prepare the data again.") from error
    total = len(documents)
    chosen = sorted({index * total // rows for index in range(rows)} if total > rows else range(total))
    counts = manifest["counts"]
    environment = Environment(
        loader=PackageLoader("deepspec.data", "."), autoescape=True, undefined=StrictUndefined
    )
    text = environment.get_template("audit.html.j2").render(
        name=str(folder),
        fingerprint=manifest["fingerprint"],
        target=manifest["inputs"]["target"].get("name", "unnamed"),
        template=manifest["template"],
        splits=[(split, counts[split]) for split in ("train", "held_out")],
        read=counts["read"],
        vocab=manifest["draft_vocab"],
        lists=[(title, list(counts[key].items())) for title, key in LISTS],
        total=total,
        rows=[_shown(documents[index], tokenizer) for index in chosen],
    )
    page.write_text(text, encoding="utf-8")
    return page


def _shown(document: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    mask = document["loss_mask"]
    head = (
        f"{document['id']} · {document['split']} · answers {document['origin']} · {document['category']} · "
        f"{document['source']} · {sum(mask)} of {len(mask)} tokens supervised"
    )
    head += f" · changed by {document['changed_by']}" if document["changed_by"] else ""
    head += " · cut by max_new_tokens" if document["truncated"] else ""
    marked = zip(mask, pieces(tokenizer, document["tokens"]), strict=True)
    runs = [
        (learned, [piece for _, piece in run]) for learned, run in groupby(marked, key=lambda pair: pair[0])
    ]
    return {"head": head, "runs": runs}


def pieces(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> list[str]:
    """The text of each token, special ones included; together the text of all of them.

    A character that several tokens spell stands with the last of them.
    """
    found, start, shown = [], 0, ""
    for end in range(1, len(tokens) + 1):
        text = _decode(tokenizer, tokens[start:end])
        whole = not text.endswith("�")
        found.append(text[len(shown) :] if whole else "")
        shown = text if whole else shown
        if whole and end - start >= 16:  # a short window keeps this linear; blanks in front keep their place
            start, shown = end - 1, _decode(tokenizer, tokens[end - 1 : end])
            if shown.endswith("�"):
                start, shown = end, ""
    if found and tokens and _decode(tokenizer, tokens[start:]).endswith("�"):
        found[-1] += "�"
    return found


def _decode(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))
