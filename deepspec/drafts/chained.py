"""A chain of drafted tokens being drawn: stopping by confidence, and the proposal it becomes."""

import torch
from torch import Tensor

from deepspec.drafts.contract import Control, Proposal


class ChainedTokens:
    """Draws token after token through `control`; a draft with a confidence head asks it before each draw.

    vocab: [Vd] target id of each draft id, or None.
    """

    def __init__(self, control: Control, vocab: Tensor | None) -> None:
        self.control, self.vocab = control, vocab
        self.tokens: list[Tensor] = []
        self.distributions: list[Tensor] = []
        self.confidences: list[Tensor] = []
        self.going: list[Tensor] = []

    def draw(self, logits: Tensor, confidence: Tensor | None = None) -> Tensor | None:
        """The next token of every row [B], None when no row goes on.

        logits: [B, Vd]. confidence: [B], raw. Rows that have stopped draw along; what they draw does not count.
        """
        if confidence is not None:
            accepted = confidence.sigmoid()
            go_on = self.control.go_on(accepted)
            if self.going:
                go_on = go_on & self.going[-1]
            self.going.append(go_on)
            if not bool(go_on.any()):
                return None
            self.confidences.append(accepted)
        token, q = self.control.draw(logits, len(self.tokens) - 1, self.vocab)
        self.tokens.append(token)
        if q is not None:
            self.distributions.append(q)
        return token

    def proposal(self) -> Proposal:
        count = len(self.tokens)
        if not count:  # no row went on even once
            empty = torch.empty(len(self.going[0]), 0, dtype=torch.long, device=self.going[0].device)
            return Proposal(empty, [0] * len(empty), vocab=self.vocab)
        lengths = (
            torch.stack(self.going[:count], 1).sum(1).tolist()
            if self.going
            else [count] * len(self.tokens[0])
        )
        return Proposal(
            torch.stack(self.tokens, 1),
            lengths,
            q=torch.stack(self.distributions, 1) if self.distributions else None,
            vocab=self.vocab,
            confidence=torch.stack(self.confidences, 1) if self.confidences else None,
        )
