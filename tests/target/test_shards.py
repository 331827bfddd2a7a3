"""Of a checkpoint in many files, only those that an edge needs are fetched."""

from pathlib import Path

import pytest
import torch
import transformers

from deepspec.target import shards
from deepspec.target.edges import shallow
from tests.models import FAMILIES, tiny_model


class Hub:
    """Stands for the hub's cache: gives files of a folder and notes which."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, set()

    def __call__(self, path: str, name: str, **more: object) -> str | None:
        assert path == "somebody/large" and more["revision"] == "abc"
        self.asked.add(name)
        found = self.folder / name
        return str(found) if found.is_file() else None


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_only_the_files_of_the_edges_are_fetched(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    every = {path.name for path in tmp_path.glob("*.safetensors")}
    hub = Hub(tmp_path)
    monkeypatch.setattr(shards, "cached_file", hub)
    with shards.fewer_files("somebody/large", 1, {"revision": "abc"}) as folder:
        few = transformers.AutoModelForCausalLM.from_pretrained(
            folder, config=shallow(model.config, 1), dtype=torch.float64
        )
    asked = {name for name in hub.asked if name.endswith(".safetensors")}
    assert asked < every and len(asked) < 0.7 * len(every)
    whole, kept = model.state_dict(), few.state_dict()
    for name, value in kept.items():
        torch.testing.assert_close(
            value, whole[name].to(value.dtype), msg=lambda text, n=name: f"{n}: {text}"
        )
    assert few.get_output_embeddings().weight.shape == model.get_output_embeddings().weight.shape


def test_a_checkpoint_in_one_file_and_a_folder_are_left_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(tmp_path)
    monkeypatch.setattr(shards, "cached_file", hub)
    with shards.fewer_files("somebody/large", 1, {"revision": "abc"}) as path:
        assert path == "somebody/large"
    with shards.fewer_files(str(tmp_path), 1, {}) as path:
        assert path == str(tmp_path)
    assert hub.asked == {"model.safetensors.index.json"}
