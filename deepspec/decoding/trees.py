"""Tree shapes as people and drafts give them: checked before anything runs, or on the device as it runs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspec.drafts.contract import DynamicTree, StaticTree
from deepspec.errors import UserError

PENDING = -1


def check_tree(tree: StaticTree | DynamicTree, vocab_size: int, key: str = "decode.tree_parents") -> None:
    """UserError for a shape that is no tree, or not in topological order, or of more nodes than can be made."""
    if isinstance(tree, DynamicTree):
        return _check_dynamic(tree)
    parents = tree.parents
    if not parents:
        raise UserError(f"{key} is empty; give each node's parent, -1 for a child of the pending token.")
    for node, parent in enumerate(parents):
        if not PENDING <= parent < len(parents):
            raise UserError(
                f"{key}: node {node} is an orphan, its parent {parent} is not there (nodes are 0 to "
                f"{len(parents) - 1}, -1 is the pending token)."
            )
    for node in range(len(parents)):
        above, steps = parents[node], 0
        while above != PENDING and steps <= len(parents):
            above, steps = parents[above], steps + 1
        if above != PENDING:
            raise UserError(
                f"{key} has a cycle above node {node}; every node must lead to -1, the pending token."
            )
    for node, parent in enumerate(parents):
        if parent >= node:
            raise UserError(
                f"{key}: node {node} stands before its parent {parent}. Number parents before their children."
            )
    if (most := max(map(len, children_of(parents).values()))) > vocab_size:
        raise UserError(f"{key} gives a node {most} children, and there are {vocab_size} different tokens.")


def _check_dynamic(tree: DynamicTree) -> None:
    for name, value in (("depth", tree.depth), ("top_k", tree.top_k), ("total_tokens", tree.total_tokens)):
        if value < 1:
            raise UserError(f"decode.tree_{name} is {value}; it must be 1 or more.")


def children_of(parents: Sequence[int]) -> dict[int, list[int]]:
    """Node (−1: the pending token) → its children, in the order they are tried."""
    found: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        found.setdefault(parent, []).append(node)
    return found


def depths_of(parents: Sequence[int]) -> list[int]:
    """Each node's depth; the pending token's children have 1."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == PENDING else depths[parent] + 1)
    return depths


def longest_path(tree: StaticTree | DynamicTree) -> int:
    """Tokens that a round may accept at most. A dynamic tree's first level may or may not be one of `depth`."""
    return tree.depth + 1 if isinstance(tree, DynamicTree) else max(depths_of(tree.parents))


def size_of(tree: StaticTree | DynamicTree) -> int:
    """Nodes that a round may propose at most."""
    return tree.total_tokens if isinstance(tree, DynamicTree) else len(tree.parents)


def topological(parents: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """A draft's own parents [B, N], made safe to index with, and [B] whether they were: −1 ≤ parent < node.

    Nothing waits for the device here: whoever reads the round's outcome reads the flag with it.
    """
    index = torch.arange(parents.shape[1], device=parents.device)
    sound = (parents >= PENDING) & (parents < index)
    good = (sound | (index >= lengths[:, None])).all(-1)
    return torch.where(sound, parents, PENDING), good
