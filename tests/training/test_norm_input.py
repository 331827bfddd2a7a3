"""`draft.norm_input=auto` against cross-entropies computed by hand."""

from typing import Any

import pytest
import torch

from deepspec.drafts.mtp import MtpDraft
from deepspec.drafts.options import MtpOptions
from deepspec.drafts.registry import new_draft
from deepspec.target import Target
from deepspec.training.norm_input import settle_norm_input
from deepspec.training.sources import Online
from tests.models import prompts, tiny_target
from tests.training.worker import accelerator_for_tests


def rows(count: int = 4, length: int = 20) -> list[dict[str, Any]]:
    found = []
    for words in prompts(count, seed=3, longest=length):
        text = (words * length)[:length]
        place = torch.arange(length)
        found.append(
            {
                "tokens": torch.tensor(text),
                "loss_mask": (place >= 4).long(),
                "documents": torch.zeros(length, dtype=torch.long),
                "positions": place,
            }
        )
    return found


@torch.no_grad()
def by_hand(draft: MtpDraft, target: Target, data: list[dict[str, Any]], kind: str) -> float:
    """Mean −log q(t_{a+1}) over anchors a whose token and successor are the answer's, row by row."""
    draft.config.norm_input = kind
    total, count = 0.0, 0
    for row in data:
        tokens = row["tokens"][None]
        captured = target.capture(
            tokens, row["positions"][None], row["documents"][None], [target.num_layers - 1]
        )
        hidden = draft.fuse(target, captured.features)[:, :-1]
        embeddings = target.embed(tokens[:, 1:]).to(hidden.dtype)
        x = draft.proj(torch.cat([draft.embedding_norm(embeddings), draft.hidden_norm(hidden)], -1))
        layer = draft.layers[0]  # made to add nothing: what it attends to does not matter
        logits = target.head(draft.norm(layer.finish(x, torch.zeros_like(x)))[0])
        for anchor in range(5, len(tokens[0]) - 1):
            total -= float(logits[anchor - 1].log_softmax(-1)[tokens[0, anchor + 1]])
            count += 1
        first = 4  # an anchor needs a token before it, and its own to be the answer's
        total -= float(logits[first - 1].log_softmax(-1)[tokens[0, first + 1]])
        count += 1
    return total / count


@pytest.mark.parametrize("scale", [0.2, 5.0])
def test_the_lower_cross_entropy_decides(scale: float) -> None:
    target = tiny_target("llama")
    torch.manual_seed(0)
    draft: Any = new_draft(MtpOptions(norm_input="auto", vocab_size=None), target, None).double()
    with torch.no_grad():
        draft.hidden_norm.weight.copy_(scale * torch.rand_like(draft.hidden_norm.weight))
        draft.layers[0].self_attn.o_proj.weight.zero_()
    data, said = rows(), list[str]()
    source = Online(target, draft.capture_layers)
    expected = {kind: by_hand(draft, target, data, kind) for kind in ("before", "after")}
    draft.config.norm_input = "auto"
    settle_norm_input(draft, data, source, accelerator_for_tests(), 2, said.append)
    assert draft.config.norm_input_losses == pytest.approx(expected, rel=1e-6)
    assert draft.config.norm_input == min(expected, key=lambda kind: expected[kind])
    assert len(said) == 1 and "cross-entropy" in said[0]
    settle_norm_input(draft, data, source, accelerator_for_tests(), 2, said.append)
    assert len(said) == 1  # it is settled
