"""What every draft must keep: the logits it is trained on are those it decodes with."""

import torch
from torch import Tensor

from deepspec.drafts.contract import Beginning, DraftContext, DraftLoss
from deepspec.drafts.statistics import StepStatistics
from deepspec.target import Target
from tests.drafts.packed import batch_of


class Forced:
    """A control that 'draws' given tokens and keeps the logits it was shown."""

    tree = None

    def __init__(self, tokens: list[int], steps: int) -> None:
        self.tokens, self.max_tokens, self.logits = tokens, steps, []

    def draw(self, logits, parent, vocab=None):
        self.logits.append(logits[0])
        return torch.tensor([self.tokens[parent + 1]]), None

    def go_on(self, confidence):
        return torch.ones(1, dtype=torch.bool)


def decoding_logits(draft, target: Target, text: list[int], anchor: int, steps: int) -> Tensor:
    """[K, Vd] logits that `propose` computes after `text[:anchor+1]`, forced along the text's own tokens."""
    tokens = torch.tensor([text[: anchor + 1]])
    captured = target.capture(
        tokens[:, :anchor], torch.arange(anchor)[None], torch.zeros(1, anchor).long(), draft.capture_layers
    )
    state = draft.begin(Beginning(DraftContext(target), tokens, captured.features, 64))
    forced = Forced(text[anchor + 1 :], steps)
    with torch.inference_mode():
        draft.propose(state, forced)
    return torch.stack(forced.logits)


def training_logits(draft, batch, monkeypatch) -> tuple[DraftLoss, dict[int, Tensor]]:
    """The loss of a batch, and the logits [n, Vd] of every step at its supervised anchors, row-major."""
    seen: dict[int, Tensor] = {}
    add = StepStatistics.add

    def spy(self, step, logits, *args, **kwargs):
        seen[step] = logits
        return add(self, step, logits, *args, **kwargs)

    monkeypatch.setattr(StepStatistics, "add", spy)
    with torch.no_grad():
        loss = draft(batch)
    monkeypatch.undo()
    return loss, seen


def check_training_is_decoding(
    draft, target: Target, texts: list[list[int]], starts: list[int], steps: int, monkeypatch, every: int = 3
) -> None:
    """At every `every`-th anchor of the packed texts (answers from `starts`), all `steps` steps, to 1e-5."""
    loss, seen = training_logits(draft, batch_of(target, draft, texts, starts), monkeypatch)
    where = [torch.nonzero(loss.valid[0, :, step])[:, 0].tolist() for step in range(steps)]
    offset = checked = 0
    for text, start in zip(texts, starts, strict=True):
        for anchor in range(start, len(text) - steps, every):
            expected = decoding_logits(draft, target, text, anchor, steps)
            for step in range(steps):
                row = where[step].index(offset + anchor)
                torch.testing.assert_close(seen[step][row], expected[step], rtol=1e-5, atol=1e-5)
                checked += 1
        offset += len(text)
    assert checked > 4 * steps
