"""A plain loop over the anchors and steps of one text, for losses to be compared with."""

from collections.abc import Iterator

import torch
from torch import Tensor

from deepspec.drafts.contract import DraftLoss
from deepspec.target import Target
from tests.drafts.conformance import decoded
from tests.models import VOCAB


def every_step(
    draft, target: Target, text: list[int], start: int, k: int
) -> Iterator[tuple[int, Tensor, Tensor, int, float | None]]:
    """(step, log q, p, label, confidence) of all of a text's supervised steps, the answer beginning at `start`.

    q from decoding, on all of V; p [V] from the target's own forward; label: the text's token.
    """
    with torch.no_grad():
        p = target.model(torch.tensor([text]), use_cache=False).logits[0].softmax(-1)
    ids = torch.arange(VOCAB) if draft.target_ids is None else draft.target_ids
    for anchor in range(start, len(text) - 1):
        count = min(k, len(text) - 1 - anchor)
        forced = decoded(draft, target, text, anchor, count)
        for step in range(1, count + 1):
            log_q = torch.full((VOCAB,), -torch.inf, dtype=torch.float64)
            log_q[ids] = forced.logits[step - 1].log_softmax(-1)
            confidence = float(forced.confidence[step - 1]) if forced.confidence else None
            yield step, log_q, p[anchor + step - 1], text[anchor + step], confidence


def total(draft, loss: DraftLoss) -> Tensor:
    """The mean that training minimises, all parts at the draft's own weights."""
    return sum(weight * loss.sums[name] / loss.weights[name] for name, weight in draft.default_loss.items())
