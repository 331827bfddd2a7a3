"""An export's folder, uploaded to the Hugging Face Hub."""

import os
from pathlib import Path

from huggingface_hub import HfApi

from deepspec.errors import UserError

TOKEN = "HF_TOKEN"  # the variable that holds it; nothing stored by other programs is used


def token() -> str:
    """From the environment; `UserError` where there is none."""
    if found := os.environ.get(TOKEN, "").strip():
        return found
    raise UserError(f"push_to_hub=true needs a token that may write, in the environment variable {TOKEN}.")


def push(folder: Path, repository: str, private: bool, endpoint: str | None = None) -> str:
    """Upload `folder` as a model repository, made if it is not there; its address.

    private: of a new repository. endpoint: another Hub than the library's. `UserError` with the Hub's own words.
    """
    api = HfApi(endpoint=endpoint, token=token())
    try:
        made = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message="A draft exported by deepspec"
        )
    except Exception as error:  # of the Hub, or of whichever HTTP library its client is built on
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise UserError(
            f"{repository} could not be uploaded ({said}). The export itself is whole, in {folder}."
        ) from error
    return str(made)
