"""`python -m deepspec.import_draft from=DIR name=X target=...`: another project's draft, made one of ours."""

if __name__ == "__main__":
    from deepspec.commands import import_draft

    import_draft()  # before the imports below, which take seconds

from pathlib import Path
from typing import Any

from deepspec.artifacts import MANIFEST, file_sha256, fingerprint, read_manifest, refuse_to_replace
from deepspec.config.app import command
from deepspec.config.ranges import check
from deepspec.config.schema import Config
from deepspec.drafts.contract import TrainableDraft
from deepspec.errors import UserError
from deepspec.interop.bundle import adopt
from deepspec.target import load_target

UNKNOWN = "The draft was imported ({layout}): what it was trained on is not known, nor whether it saw these prompts."


def run(config: Config) -> Path:
    """Read the draft in `config.import_from` and write it to `config.out`/draft; that path.

    It is then measured (`deepspec.evaluate`) and trained further (`draft.init_from`) like one trained here. The
    target must be the one that the draft was made for. `UserError` for an unknown layout, tensors that do not fit
    their configuration, and what no draft here computes.
    """
    check(config)
    if config.import_from is None:
        raise UserError("No draft is named. Give the folder of another project's draft: from=DIR")
    source, folder = Path(config.import_from), Path(config.out) / "draft"
    if (folder / MANIFEST).is_file() and not config.overwrite:
        was = (read_manifest(folder, command("import_draft")).get("imported") or {}).get("from", "training")
        raise refuse_to_replace(folder, f"the draft there is from {was}")
    target = load_target(config.target)

    def manifest(draft: TrainableDraft, layout: str) -> dict[str, Any]:
        made_of = {path.name: file_sha256(path) for path in sorted(source.iterdir()) if path.is_file()}
        identity = target.identity()
        return {
            "stage": "import",
            "fingerprint": fingerprint({"files": made_of, "target": identity.get("weights")}),
            "recipe": {"draft": {"algorithm": str(draft.config.model_type).removeprefix("deepspec_")}},
            "target": identity,
            "capture_layers": draft.capture_layers,
            "imported": {"from": str(source), "layout": layout, "sha256": made_of},
            "warnings": [UNKNOWN.format(layout=layout)],
        }

    layout = adopt(source, target, folder, manifest)
    print(f"{folder} is the draft of {source} ({layout}).", flush=True)
    return folder
