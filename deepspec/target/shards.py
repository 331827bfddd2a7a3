"""Of a checkpoint on the hub, the files that a model with fewer layers needs: a trainer's edges of a target of hundreds
of GiB are a few of them."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME
from transformers.utils.hub import cached_file

BESIDE = ("config.json", "generation_config.json")
LAYER = re.compile(
    r"(?:^|\.)(?:layers|layer|blocks|h)\.(\d+)\."
)  # what families call a decoder layer, and its number


@contextmanager
def fewer_files(path: str, layers: int, common: dict[str, Any]) -> Iterator[str]:
    """A folder with the files that hold anything beside layers from number `layers` on; `path` itself where it is a
    folder already, or not in several files. path: hub name or folder. common: as for `from_pretrained`."""
    place = {"revision": common.get("revision")}
    index = None
    if not Path(path).is_dir():
        index = cached_file(
            path, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False, **place
        )
    if index is None:
        yield path
        return
    described = json.loads(Path(index).read_text(encoding="utf-8"))
    wanted = {name: file for name, file in described["weight_map"].items() if not _beyond(name, layers)}
    with TemporaryDirectory(prefix="deepspec-") as folder:
        for file in (*BESIDE, *sorted(set(wanted.values()))):
            found = cached_file(path, file, _raise_exceptions_for_missing_entries=file not in BESIDE, **place)
            if found is not None:
                Path(folder, file).symlink_to(Path(found).resolve())
        text = json.dumps({**described, "weight_map": wanted})
        Path(folder, SAFE_WEIGHTS_INDEX_NAME).write_text(text, encoding="utf-8")
        yield folder


def _beyond(name: str, layers: int) -> bool:
    """Of a multi-token-prediction module too, which follows the last layer in its checkpoint."""
    found = LAYER.search(name)
    return found is not None and int(found[1]) >= layers
