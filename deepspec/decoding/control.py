"""What the engine hands to a draft: how many tokens to draft, and how to draw each."""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspec.decoding.randomness import Purpose, uniforms
from deepspec.decoding.request import Request
from deepspec.decoding.sampling import distributions, draw
from deepspec.drafts.contract import DynamicTree, StaticTree


class RoundControl:
    """One round's `Control`.

    positions: each row's output position of the first drafted token. When every request is greedy, tokens are
    plain argmaxes and q is None; otherwise a greedy row's q is a point mass.
    """

    def __init__(self, requests: Sequence[Request], positions: Sequence[int], max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.tree: StaticTree | DynamicTree | None = None
        self.requests = requests
        self.positions = positions
        self.samplings = [request.sampling for request in requests]
        self.greedy = all(sampling.temperature == 0 for sampling in self.samplings)

    def draw(self, logits: Tensor, parent: int, vocab: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """See `deepspec.drafts.contract.Control.draw`."""
        if self.greedy:
            picked, q = logits.argmax(-1), None
        else:
            q = distributions(logits, self.samplings)
            places = [position + parent + 1 for position in self.positions]
            drawn = uniforms([request.seed for request in self.requests], places, Purpose.draft)[:, 0]
            picked = draw(q, torch.from_numpy(drawn))
        return picked if vocab is None else vocab[picked], q

    def draw_children(
        self, logits: Tensor, parent: int, count: int, vocab: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See `deepspec.drafts.contract.Control.draw_children`; deterministic so far."""
        picked = logits.topk(count, dim=-1).indices
        return picked if vocab is None else vocab[picked], None

    def go_on(self, confidence: Tensor) -> Tensor:
        """A fixed length: always."""
        return torch.ones_like(confidence, dtype=torch.bool)
