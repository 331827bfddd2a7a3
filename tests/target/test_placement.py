"""A target spread over memory and disk is the same target (no second device is needed to see that)."""

from functools import partial
from pathlib import Path

import pytest
import torch

from deepspec.config.schema import DeviceMap, Dtype, TargetConfig
from deepspec.decoding import Engine, Request
from deepspec.drafts.ngram import NgramDraft
from deepspec.drafts.options import NgramOptions
from deepspec.errors import UserError
from deepspec.target import Target, chain, load_target
from deepspec.target.placement import places
from tests.models import save_tiny, tiny_model


def bytes_of(module: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def spread(
    folder: Path, memory: int, how: DeviceMap = DeviceMap.sequential, dtype: Dtype = Dtype.float64
) -> Target:
    return load_target(
        TargetConfig(
            name="a target",
            path=str(folder),
            dtype=dtype,
            device_map=how,
            max_memory={"cpu": str(memory)},
            offload_folder=str(folder / "offload"),
        )
    )


def half(family: str) -> int:
    """Memory for the edges and about two of the four layers."""
    model = tiny_model(family)
    layers = bytes_of(model.get_decoder().layers)
    return bytes_of(model) - layers + layers * 5 // 8


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", Dtype.float64),
        ("gemma3", Dtype.float64),
        ("deepseek_v3", Dtype.float32),
    ],  # the library's experts have no float64
)
def test_layers_on_disk_compute_the_same(family: str, dtype: Dtype, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", family)
    whole = load_target(TargetConfig(name="a target", path=str(folder), dtype=dtype))
    target = spread(folder, half(family) // (8 // whole.dtype.itemsize), dtype=dtype)
    close = partial(torch.testing.assert_close, rtol=0, atol=1e-12 if dtype is Dtype.float64 else 1e-5)
    elsewhere = [layer for layer in target.layers if next(layer.parameters()).is_meta]
    assert 0 < len(elsewhere) < target.num_layers
    assert not target.model.get_output_embeddings().weight.is_meta
    assert target.identity() == whole.identity()

    tokens = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(0))
    positions, documents = torch.arange(12).repeat(2, 1), torch.zeros_like(tokens)
    found, expected = (one.capture(tokens, positions, documents, [0, 2]) for one in (target, whole))
    close(found.features, expected.features)
    close(found.last_hidden, expected.last_hidden)
    rows = torch.tensor([3, 5, 90])
    hidden = whole.norm(expected.last_hidden[0])
    for _ in range(2):  # the head's own forward must come back
        close(target.head(hidden, rows), whole.head(hidden)[:, rows])
        close(target.head(hidden), whole.head(hidden))
    close(target.embed(tokens), whole.embed(tokens))
    close(
        target.forward(tokens, target.new_state(2, 16, 2), chain([0, 0], 12, target.device)).logits,
        whole.model(tokens, use_cache=False).logits,
    )


def test_speculative_text_is_the_whole_targets(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", "llama")
    target = spread(folder, half("llama"))
    prompt = [5, 6, 7, 5, 6, 7, 5, 6]
    answer = Engine(target, NgramDraft(NgramOptions()), k=3).generate([Request(prompt, 24)])[0]
    theirs = tiny_model("llama").generate(
        torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None
    )
    assert answer.tokens == theirs[0, len(prompt) :].tolist()


def test_all_of_it_stays_where_there_is_room(tmp_path: Path) -> None:
    target = spread(save_tiny(tmp_path / "model", "llama"), 1 << 30, DeviceMap.balanced)
    assert not any(p.is_meta for p in target.model.parameters())


def test_edges_come_first_and_too_little_room_for_them_is_said(tmp_path: Path) -> None:
    config = tiny_model("llama").config
    found = places(config, torch.float64, {"cpu": str(half("llama"))}, balanced=False, remote_code=False)
    assert {found[name] for name in ("model.embed_tokens", "model.norm", "lm_head")} == {"cpu"}
    assert "disk" in found.values()
    with pytest.raises(UserError, match=r"embedding, norm and head .* Raise target\.max_memory\.cpu"):
        places(config, torch.float64, {"cpu": "1KB"}, balanced=False, remote_code=False)


@pytest.mark.parametrize(
    ("memory", "words"), [({"cpu": "much"}, "target.max_memory"), ({"7": "1GiB"}, "device 7")]
)
def test_memory_that_makes_no_sense_is_named(memory: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        places(tiny_model("llama").config, torch.float64, memory, balanced=False, remote_code=False)


def test_one_of_several_processes_does_not_take_every_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny(tmp_path / "model", "llama")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"target\.device_map spreads one target over all devices"):
        spread(folder, 1 << 30)
