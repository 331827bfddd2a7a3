"""What narrow copies foretell, against the draft itself; the counter of bytes, against sums by hand."""

from dataclasses import replace

import pytest
import torch
import transformers

from deepspec.drafts.registry import UNTRAINED, option_classes
from deepspec.planning.training_work import Alive, _measured, training_work
from deepspec.target import Target
from deepspec.target.outline import Outline

SHAPE = transformers.LlamaConfig(
    vocab_size=1536, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
)  # fmt: skip


def row(length: int) -> dict[str, torch.Tensor]:
    place, quarter = torch.arange(length)[None], length // 4
    columns = {"documents": place // quarter, "positions": place % quarter}
    mask = (columns["positions"] > quarter // 3).long()
    return {"tokens": place % 90, "loss_mask": mask, **columns}


@pytest.mark.parametrize("name", sorted(option_classes().keys() - UNTRAINED.keys()))
def test_narrow_copies_foretell_a_step_of_every_family(name: str) -> None:
    options = option_classes()[name]()
    options = replace(options, vocab_size=512, **({"anchors": 24} if hasattr(options, "anchors") else {}))
    seen = training_work(options, Outline(SHAPE, None, "x", torch.float32, False), {}, row(128), None)
    target = Target(transformers.LlamaForCausalLM(SHAPE), None, "x")
    operations, alive = _measured(options, target, {}, row(128), None)
    assert seen.operations == pytest.approx(operations, rel=0.01)
    assert seen.bytes == pytest.approx(max(alive), rel=0.1)


def test_gradient_checkpointing_is_foretold_to_keep_less() -> None:
    """Where attention over long rows is what is kept."""
    options = replace(option_classes()["eagle3"](), vocab_size=64, ttt_steps=7)
    outline = Outline(SHAPE, None, "x", torch.float32, False)
    plain, less = (training_work(options, outline, {}, row(512), None, on) for on in (False, True))
    assert less.bytes < 0.9 * plain.bytes
    assert less.operations > plain.operations


def test_what_is_let_go_is_not_alive() -> None:
    with Alive() as alive:
        first = torch.zeros(1000)
        view = first[10:]
        second = first + 1
        del first
        third = view * 2
    assert alive.most == 4 * 1000 * 2 + 4 * 990  # the view keeps what it looks at
    assert alive.now == alive.most
    del second, third, view
    assert alive.now == 0
