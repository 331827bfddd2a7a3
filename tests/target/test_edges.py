"""The target's edges against the whole target, family by family."""

import copy
from pathlib import Path

import pytest
import torch

from deepspec.config.schema import Dtype, TargetConfig
from deepspec.errors import UserError
from deepspec.target import load_edges, load_target
from tests.data.toy_tokenizers import chatml
from tests.models import FAMILIES, tiny_model


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_edges_say_what_the_whole_says(family: str, tmp_path: Path) -> None:
    tokenizer, model = chatml(), copy.deepcopy(tiny_model(family)).float()
    torch.manual_seed(0)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = TargetConfig(name="tiny", path=str(tmp_path), dtype=Dtype.float32, device="cpu")
    whole, edges = load_target(config), load_edges(config)
    assert edges.identity() == whole.identity()
    assert (edges.num_layers, edges.config.num_hidden_layers) == (4, 4)
    edges.release_layers()
    tokens = torch.arange(3, 40)
    captured = whole.capture(tokens[None], torch.arange(37)[None], torch.zeros(1, 37, dtype=torch.long), [0])
    hidden = captured.last_hidden[0]
    for name in ("norm", "logits"):
        assert torch.equal(getattr(edges, name)(hidden), getattr(whole, name)(hidden))
    assert torch.equal(edges.embed(tokens), whole.embed(tokens))
    normed, rows = whole.norm(hidden), torch.tensor([3, 9, 11])
    assert torch.equal(edges.head(normed, rows), whole.head(normed, rows))
    held = {id(one): one.numel() for one in edges.model.parameters()}
    head, table = (
        get().weight for get in (whole.model.get_output_embeddings, whole.model.get_input_embeddings)
    )
    edge_numbers = table.numel() + (head.numel() if head is not table else 0) + whole.hidden_size
    assert sum(held.values()) == edge_numbers
    with pytest.raises(ValueError, match="edges only"):
        edges.capture(tokens, tokens, tokens, [0])
    edges.require("features")
    with pytest.raises(UserError, match=r"chain needs the whole target.*features.source=online"):
        edges.require("features", "chain")


def test_the_first_layers_are_there_until_they_are_released(tmp_path: Path) -> None:
    tokenizer, model = chatml(), copy.deepcopy(tiny_model("gemma3")).float()
    torch.manual_seed(0)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = TargetConfig(name="tiny", path=str(tmp_path), dtype=Dtype.float32, device="cpu")
    edges = load_edges(config, lambda count: count - 1)
    assert len(edges.layers) == 3
    for mine, theirs in zip(edges.layers, model.get_decoder().layers, strict=False):
        for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(one, other)
    edges.release_layers()
    assert len(edges.layers) == 0
