"""What stands in a slot whose token is not known yet."""

from typing import Any

import torch
from torch import Tensor, nn

from deepspec.drafts.contract import DraftBatch, TargetModel
from deepspec.errors import UserError

PURPOSE = "draft.mask_token"


class MaskToken(nn.Module):
    """A row of the target's embedding that no text uses, or a vector that the draft learns.

    token: the row's id; None = a learnt vector [hidden], for the many vocabularies without a spare row. A row costs
    nothing and every engine can load it; a learnt vector is no token id, so that engines which embed by id alone
    cannot.
    """

    def __init__(self, hidden: int, token: int | None) -> None:
        super().__init__()
        self.token: Any = token  # an id wherever `embedding` is None
        self.embedding = nn.Parameter(torch.zeros(hidden)) if token is None else None

    @torch.no_grad()
    def start(self, target: TargetModel) -> None:
        """A random vector as long as the target's embedding rows; UserError for a row that does not exist."""
        if self.token is not None and not 0 <= self.token < target.vocab_size:
            raise UserError(
                f"{PURPOSE} is {self.token}; the target's vocabulary has the ids 0 to {target.vocab_size - 1}. Name an "
                "unused one, or null for a mask that the draft learns."
            )
        if self.embedding is not None:
            device = self.embedding.device
            some = target.embed(torch.arange(min(target.vocab_size, 1024), device=device))
            self.embedding.normal_(std=float(some.float().std()))

    def forward(self, target: TargetModel, like: Tensor) -> Tensor:
        """[H] in the dtype of `like`, on its device."""
        if self.embedding is not None:
            return self.embedding.to(like.dtype)
        return target.embed(torch.full((), self.token, device=like.device)).to(like.dtype)

    def check(self, batch: DraftBatch) -> None:
        """UserError if a text uses the row: the draft would take that token for an open slot."""
        if self.token is None:
            return
        if bool(((batch.tokens == self.token) & (batch.documents >= 0)).any()):
            raise UserError(
                f"{PURPOSE} is {self.token}, and that token occurs in the training text. Name an id that no text "
                "uses, or null for a mask that the draft learns."
            )
