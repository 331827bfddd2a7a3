"""The draft vocabulary: the target tokens a draft can propose."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from deepspec.errors import UserError


@dataclass(frozen=True)
class DraftVocab:
    """target_ids: int64 [Vd] ascending, the target id of each draft id; None = the whole vocabulary."""

    target_ids: Tensor | None
    size: int
    always: int  # special tokens and byte pieces, kept whatever their count
    seen: int  # different supervised tokens in the training rows

    def coverage(self, counts: Tensor) -> float:
        """Share of counted tokens (int64 [V]) that the draft can propose; 1.0 of none."""
        total = int(counts.sum())
        if self.target_ids is None or total == 0:
            return 1.0
        return float(counts[self.target_ids].sum()) / total


def count_supervised(rows: Iterable[tuple[Sequence[int], Sequence[int]]], vocab_size: int) -> Tensor:
    """int64 [V]: how often each token is supervised in (tokens, loss_mask) rows."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for tokens, mask in rows:
        chosen, often = np.unique(np.asarray(tokens)[np.asarray(mask, dtype=bool)], return_counts=True)
        counts[chosen.astype(np.int64)] += often
    return torch.from_numpy(counts)


def choose_draft_vocab(
    counts: Tensor, size: int | None, tokenizer: PreTrainedTokenizerBase, eos: Sequence[int]
) -> DraftVocab:
    """The `size` most frequent supervised tokens (ties: lower id), special and byte tokens always in.

    counts: int64 [V]. Places left when every supervised token is in go to the lowest unused ids. size None or
    ≥ V: the whole vocabulary. `UserError` if `size` cannot hold what must be kept.
    """
    vocab_size = len(counts)
    check_vocab_size(size, tokenizer, eos, vocab_size)
    seen = int((counts > 0).sum())
    always = kept_always(tokenizer, eos, vocab_size)
    if size is None or size >= vocab_size:
        return DraftVocab(None, vocab_size, len(always), seen)
    rank = counts.clone()
    rank[torch.tensor(sorted(always), dtype=torch.int64)] = torch.iinfo(torch.int64).max
    order = torch.sort(rank, descending=True, stable=True).indices
    return DraftVocab(order[:size].sort().values, size, len(always), seen)


def check_vocab_size(
    size: int | None, tokenizer: PreTrainedTokenizerBase, eos: Sequence[int], vocab_size: int
) -> None:
    """`UserError` if a draft vocabulary of `size` cannot hold what is always kept."""
    least = len(kept_always(tokenizer, eos, vocab_size))
    if size is not None and size < least:
        raise UserError(
            f"draft.vocab_size={size} is too small: the tokenizer's special tokens and byte alphabet alone "
            f"are {least}. Set it to that or more, or to null for the whole vocabulary."
        )


def kept_always(tokenizer: PreTrainedTokenizerBase, eos: Sequence[int], vocab_size: int) -> set[int]:
    """Special tokens, end tokens, and the pieces that spell any text: bytes or their stand-ins."""
    added = tokenizer.added_tokens_decoder
    special = {*tokenizer.all_special_ids, *eos, *(i for i, token in added.items() if token.special)}
    vocab = tokenizer.get_vocab()
    pieces = [f"<0x{value:02X}>" for value in range(256)]
    if pieces[0] not in vocab:
        pieces = byte_level_alphabet()
    kept = special | {vocab[piece] for piece in pieces if piece in vocab}
    return {token for token in kept if token is not None and 0 <= token < vocab_size}


def byte_level_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each of the 256 bytes: itself if visible, else the next from 256."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    alphabet, extra = [], 256
    for value in range(256):
        alphabet.append(chr(value if value in visible else extra))
        extra += value not in visible
    return alphabet
