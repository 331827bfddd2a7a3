"""Growing a tree of drafted tokens level by level, for any draft that can run several nodes at once.

`grow` asks the draft only for the logits behind the pending token and for those behind given nodes; the shape is the
engine's choice. Shapes: B rows, W nodes of one level, N nodes proposed, S nodes run so far (their *slot* is the order
in which they were run; slot −1 is the pending token).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspec.drafts.contract import Control, DynamicTree, Proposal, StaticTree
from deepspec.target.layout import Layout


@dataclass
class Seen:
    """What the draft says behind some nodes. logits: [B, W, Vd], raw. confidence: [B, W] that the next token is
    accepted given its parent was, or None."""

    logits: Tensor
    confidence: Tensor | None = None


# (tokens [B, W] target ids, slots of their parents [B, W], layout) → what the draft says behind each of them.
# The draft writes its keys and values where the layout says and keeps whatever it needs by slot.
RunNodes = Callable[[Tensor, Tensor, Layout], Seen]


def grow(
    control: Control,
    root: Seen,
    run: RunNodes,
    lengths: list[int],
    vocab: Tensor | None,
    deepest: int | None = None,
) -> Proposal:
    """The tree that `control.tree` asks for. root: behind the pending token (W = 1). lengths: rows in the draft's
    state, a Python int a row. vocab: [Vd] target id of each draft id, None = the target's own. deepest: a dynamic
    tree grows no deeper, None = as deep as it likes."""
    if isinstance(control.tree, DynamicTree):
        limit = control.max_tokens if deepest is None else min(deepest, control.max_tokens)
        return _grow_dynamic(control.tree, limit, root, run, lengths, vocab)
    if isinstance(control.tree, StaticTree):
        return _grow_static(control.tree, control, root, run, lengths, vocab)
    raise TypeError(f"control.tree is {control.tree!r}: a StaticTree or a DynamicTree can be grown.")


class Slots:
    """The nodes run so far: at which position each stands and whom it sees."""

    def __init__(self, lengths: list[int], device: torch.device) -> None:
        self.lengths = lengths
        self.starts = torch.tensor(lengths, device=device)[:, None]
        self.depth = torch.empty(len(lengths), 0, dtype=torch.long, device=device)
        self.sees = torch.empty(len(lengths), 0, 0, dtype=torch.bool, device=device)

    def below(self, parents: Tensor) -> Layout:
        """Take in nodes whose parents are these slots [B, W], and say how to run them."""
        (rows, new), old = parents.shape, self.depth.shape[1]
        at = parents.clamp(min=0)
        inner = parents >= 0
        mine = torch.eye(new, dtype=torch.bool, device=parents.device).expand(rows, new, new)
        if old:
            above = self.sees.gather(1, at[..., None].expand(rows, new, old)) & inner[..., None]
            depth = torch.where(inner, self.depth.gather(1, at) + 1, 0)
        else:
            above, depth = mine[..., :0], torch.zeros_like(parents)
        visible = torch.cat([above, mine], 2)
        self.sees = torch.cat([torch.nn.functional.pad(self.sees, (0, new)), visible], 1)
        self.depth = torch.cat([self.depth, depth], 1)
        columns = self.starts + self.depth
        return Layout(self.lengths, columns[:, old:], visible, columns)


def _grow_dynamic(
    tree: DynamicTree, max_tokens: int, root: Seen, run: RunNodes, lengths: list[int], vocab: Tensor | None
) -> Proposal:
    """EAGLE-2 (Li et al. 2024b). Candidates are numbered in the order they are made, by depth and within a level by
    their parent's rank; where two are equally good the earlier one wins, so that no node goes before its parent."""
    slots = Slots(lengths, root.logits.device)
    width = min(tree.top_k, root.logits.shape[-1])
    made = _children(root, torch.zeros_like(root.logits[:, :, 0]), None, None, width, vocab)
    kept = torch.arange(width, device=root.logits.device).expand(len(lengths), width)
    for _ in range(min(tree.depth, max_tokens - 1)):
        first_slot = slots.depth.shape[1]
        parents = made.slot.gather(1, kept)
        seen = run(made.tokens.gather(1, kept), parents, slots.below(parents))
        new = _children(seen, made.score.gather(1, kept), kept, first_slot, width, vocab)
        best = _best(new.score, width)
        kept = best + made.tokens.shape[1]
        made = made.followed_by(new)
    chosen = _best(made.score, tree.total_tokens).sort(1).values
    above = made.parent.gather(1, chosen)
    # A chosen node's parent is chosen too: its score is no less, and on a tie it was made earlier.
    parents = torch.where(above < 0, -1, torch.searchsorted(chosen, above.clamp(min=0)))
    return Proposal(
        made.tokens.gather(1, chosen),
        [chosen.shape[1]] * len(lengths),
        parents=parents,
        vocab=vocab,
        confidence=None if made.confidence is None else made.confidence.gather(1, chosen),
    )


@dataclass
class _Candidates:
    """[B, n] each. score: log of the product of draft probabilities down to the node. parent: its candidate number,
    slot: its slot (−1: the pending token)."""

    tokens: Tensor
    score: Tensor
    parent: Tensor
    slot: Tensor
    confidence: Tensor | None

    def followed_by(self, other: "_Candidates") -> "_Candidates":
        confidence = (
            None
            if self.confidence is None or other.confidence is None
            else torch.cat([self.confidence, other.confidence], 1)
        )
        return _Candidates(
            tokens=torch.cat([self.tokens, other.tokens], 1),
            score=torch.cat([self.score, other.score], 1),
            parent=torch.cat([self.parent, other.parent], 1),
            slot=torch.cat([self.slot, other.slot], 1),
            confidence=confidence,
        )


def _children(
    seen: Seen,
    score: Tensor,
    number: Tensor | None,
    first_slot: int | None,
    count: int,
    vocab: Tensor | None,
) -> _Candidates:
    """The `count` most probable children of W nodes. score, number: [B, W] of those nodes (None: the pending token);
    their slots follow each other from `first_slot`."""
    logits = seen.logits if seen.logits.dtype == torch.float64 else seen.logits.float()
    best = logits.log_softmax(-1).topk(count, dim=-1)
    rows, nodes, _ = best.indices.shape
    none = torch.full((rows, nodes), -1, device=logits.device)
    numbers = none if number is None else number
    slots = none if first_slot is None else none + 1 + first_slot + torch.arange(nodes, device=logits.device)

    def each(of_node: Tensor) -> Tensor:
        return of_node.repeat_interleave(count, dim=1)

    return _Candidates(
        tokens=(best.indices if vocab is None else vocab[best.indices]).flatten(1),
        score=(score[..., None] + best.values).flatten(1),
        parent=each(numbers),
        slot=each(slots),
        confidence=None if seen.confidence is None else each(seen.confidence),
    )


def _best(score: Tensor, count: int) -> Tensor:
    """[B, n] → [B, min(count, n)] indices of the highest, best first; of equals the first."""
    return score.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _grow_static(
    tree: StaticTree, control: Control, root: Seen, run: RunNodes, lengths: list[int], vocab: Tensor | None
) -> Proposal:
    """The tree as it is: its shape was fixed before any draw, and its numbers are those the control knows."""
    above = list(tree.parents)
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(above):
        children.setdefault(parent, []).append(node)
    rows, count, device = len(lengths), len(above), root.logits.device
    tokens = torch.zeros(rows, count, dtype=torch.long, device=device)
    confidence = None if root.confidence is None else root.confidence.new_zeros(rows, count)
    drawn: list[Tensor] = []
    row_of = [0] * count
    slots, slot_of = Slots(lengths, device), {-1: -1}
    seen, level = root, [-1]
    while level:
        for place, node in enumerate(level):
            below = children[node]
            picked, q = control.draw_children(seen.logits[:, place], node, len(below), vocab)
            tokens[:, below] = picked
            if confidence is not None and seen.confidence is not None:
                confidence[:, below] = seen.confidence[:, place, None]
            for child in below:
                row_of[child] = len(drawn)
            if q is not None:
                drawn.append(q)
        level = [child for node in level for child in children[node] if child in children]
        if level:
            parents = torch.tensor([slot_of[above[node]] for node in level], device=device).expand(rows, -1)
            slot_of |= {node: slots.depth.shape[1] + place for place, node in enumerate(level)}
            seen = run(tokens[:, level], parents, slots.below(parents))
    return Proposal(
        tokens,
        [count] * rows,
        parents=torch.tensor(above, device=device).expand(rows, -1),
        q=torch.stack(drawn, 1) if drawn else None,
        q_row=torch.tensor(row_of, device=device).expand(rows, -1) if drawn else None,
        vocab=vocab,
        confidence=confidence,
    )
