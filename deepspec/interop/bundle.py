"""An export from beginning to end: converted, written, read back, compared, described."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from safetensors.torch import save_file

from deepspec.artifacts import new_artifact
from deepspec.drafts.contract import TrainableDraft
from deepspec.errors import UserError
from deepspec.interop.card import Subject, card
from deepspec.interop.compare import check_same
from deepspec.interop.formats import read, write
from deepspec.interop.layout import Serving
from deepspec.target import Target
from deepspec.training.checkpoint import save_draft
from deepspec.training.saved_draft import WEIGHTS, load_draft

OWN = "hf"


def export(draft: TrainableDraft, target: Target, subject: Subject, folder: Path) -> list[str]:
    """Write `draft` into `folder` in the layout `subject.form`, with a card; what it left behind, in words.

    The folder takes its name only when what was written has been read back and gave the same logits. Its
    manifest has the sha256 of every file. `UserError` for a draft that the layout cannot carry.
    """
    if subject.form == OWN:
        content = {**subject.manifest, "format": OWN}
        with new_artifact(folder, content) as new:
            save_draft(draft, new, draft.state_dict())
            check_same(draft, load_draft(new), target, f"The draft exported to {folder}")
            (new / "README.md").write_text(card(subject), encoding="utf-8")
        return []
    checkpoint = write(draft, subject.form, target, Serving(subject.target, subject.k))
    content = {
        "stage": "export",
        "format": subject.form,
        "draft": subject.manifest,
        "notes": checkpoint.notes,
    }
    with new_artifact(folder, content) as new:
        (new / "config.json").write_text(json.dumps(checkpoint.config, indent=2) + "\n", encoding="utf-8")
        tensors = {name: tensor.contiguous() for name, tensor in checkpoint.tensors.items()}
        save_file(tensors, new / WEIGHTS, metadata={"format": "pt"})
        if checkpoint.tokenizer is not None:
            checkpoint.tokenizer.save_pretrained(new)
        again, _ = read(new, target)
        check_same(draft, again, target, f"The draft exported to {folder}")
        text = card(replace(subject, notes=checkpoint.notes))
        (new / "README.md").write_text(text, encoding="utf-8")
    return checkpoint.notes


def adopt(source: Path, target: Target, folder: Path, manifest: Callable[[TrainableDraft, str], dict]) -> str:
    """Read another project's draft and write it as ours; the name of its layout.

    manifest: the draft and that name → what is recorded. `UserError` for what cannot be brought over.
    """
    if not source.is_dir():
        raise UserError(f"{source} is not a folder. Give the folder of a draft: from=DIR")
    draft, layout = read(source, target)
    with new_artifact(folder, manifest(draft, layout)) as new:
        save_draft(draft, new, draft.state_dict())
        check_same(draft, load_draft(new), target, f"The draft imported from {source}")
    return layout
