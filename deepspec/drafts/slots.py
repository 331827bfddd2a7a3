"""Drafting from K slots that one pass has filled: a chain from left to right, or a tree.

Slot k predicts the k-th drafted token whatever the tokens before it are, except for what a family adds once the
one just before is known; so the nodes of a tree's level share their slot.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from deepspec.drafts.chained import ChainedTokens
from deepspec.drafts.contract import Control, Proposal, StaticTree
from deepspec.drafts.tree import Seen, grow
from deepspec.errors import UserError
from deepspec.target.layout import Layout

# (slot's index, the token before it [B, W], what the slot before handed on [B, W, r] or None) → logits [B, W, Vd], the
# raw confidence [B, W] or None, and what this slot hands on. W: nodes of one level; a chain has one.
Slot = Callable[[int, Tensor, Tensor | None], tuple[Tensor, Tensor | None, Tensor | None]]


def propose_from_slots(
    control: Control, pending: Tensor, count: int, slot: Slot, vocab: Tensor | None
) -> Proposal:
    """What the control asks for, behind `pending` [B, 1], no deeper than `count` slots."""
    if control.tree is None:
        return _chain(control, pending, count, slot, vocab)
    return _tree(control, pending, count, slot, vocab)


def _chain(control: Control, pending: Tensor, count: int, slot: Slot, vocab: Tensor | None) -> Proposal:
    drafted, previous = ChainedTokens(control, vocab), pending
    memory: Tensor | None = None
    for index in range(count):
        logits, confidence, memory = slot(index, previous, memory)
        token = drafted.draw(logits[:, 0], None if confidence is None else confidence[:, 0])
        if token is None:
            break
        previous = token[:, None]
    return drafted.proposal()


def _tree(control: Control, pending: Tensor, count: int, slot: Slot, vocab: Tensor | None) -> Proposal:
    if isinstance(control.tree, StaticTree) and (depth := _depth(control.tree)) > count:
        raise UserError(
            f"The tree is {depth} tokens deep, and this draft sees {count} ahead. Give a shallower decode.tree_parents."
        )
    level = 0
    handed: Tensor | None = None  # [B, 1 + nodes, r]: of the pending token's slot, then of every node's

    def seen(tokens: Tensor, memory: Tensor | None) -> Seen:
        nonlocal handed
        logits, confidence, memory = slot(level, tokens, memory)
        if memory is not None:
            handed = memory if handed is None else torch.cat([handed, memory], 1)
        return Seen(logits, None if confidence is None else confidence.sigmoid())

    def run(tokens: Tensor, parents: Tensor, layout: Layout) -> Seen:
        nonlocal level
        level += 1
        if handed is None:
            return seen(tokens, None)
        return seen(tokens, handed.gather(1, (parents + 1)[..., None].expand(-1, -1, handed.shape[-1])))

    lengths = [0] * len(pending)  # nothing is cached: levels need no more than the tokens above them
    return grow(control, seen(pending, None), run, lengths, vocab, deepest=count)


def _depth(tree: StaticTree) -> int:
    depths = {-1: 0}
    for node, parent in enumerate(tree.parents):
        depths[node] = depths[parent] + 1
    return max(depths.values())
