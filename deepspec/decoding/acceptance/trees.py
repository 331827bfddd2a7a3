"""Laws of trees: a node's children are tried in order against what the rejected ones have left of p.

Children of a node are tried against a running residual p' (at first p). A child drawn without replacement from
q' is accepted with min(1, p'(x)/q'(x)); on its rejection p' becomes norm(max(p' − q', 0)) and x leaves q'. A
deterministic child is the same with a point mass for q': accepted with p'(x), on rejection p'(x) becomes 0. All
fail: the next token is drawn from p'. (SpecInfer, Miao et al. 2023; without replacement: Jeon et al. 2024.)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepspec.decoding.acceptance.law import (
    Ending,
    Law,
    SampledLaw,
    on_target_vocabulary,
    point_masses,
    residual,
)
from deepspec.drafts.contract import Proposal


@dataclass
class Shape:
    """Who stands where in the trees of one round.

    parents: [B, N] int64, −1 = child of the pending token. ancestors: [B, N, N] bool, node j is i itself or
    above it. elder: [B, N, N] bool, j is tried before i among the same parent's children. inside: [B, N] bool,
    the node is to be verified; a parent of one that is, is.
    """

    parents: Tensor
    ancestors: Tensor
    elder: Tensor
    inside: Tensor

    @classmethod
    def of(cls, parents: Tensor, visible: Tensor, lengths: Tensor, deepest: Tensor) -> "Shape":
        """visible: [B, N+1, N+1] of `deepspec.target.layout.tree`. lengths, deepest: [B], nodes that count and
        the depth below which they do not (1 = the pending token's children)."""
        index = torch.arange(parents.shape[1], device=parents.device)
        ancestors = visible[:, 1:, 1:]
        inside = (index < lengths[:, None]) & (ancestors.sum(-1) <= deepest[:, None])
        siblings = parents[:, :, None] == parents[:, None, :]
        elder = siblings & (index[:, None] > index) & inside[:, None, :]
        return cls(parents, ancestors, elder, inside)

    @property
    def depth(self) -> Tensor:
        """[B]: the longest path that is verified."""
        return (self.ancestors.sum(-1) * self.inside).amax(-1)


def _walk(shape: Shape, passed: Tensor) -> Ending:
    """From the pending token down: at each node the first child that passes is taken."""
    taken = passed & ~(shape.elder & passed[:, None, :]).any(-1)
    on_path = (taken[:, None, :] | ~shape.ancestors).all(-1)
    count = passed.shape[1]
    index = torch.arange(count, device=passed.device)
    path = torch.where(on_path, index, count).sort(-1).values.clamp(max=count - 1)
    return Ending(on_path.sum(-1), torch.where(on_path, index + 1, 0).amax(-1), path)


@dataclass
class GreedyTreeLaw(Law):
    """best: [B, N+1], the target's argmax after each token."""

    accept: Tensor
    shape: Shape
    best: Tensor

    def ending(self, passed: Tensor) -> Ending:
        return _walk(self.shape, passed)

    def next_token(self, at: Tensor, uniform: Tensor) -> Tensor:
        return self.best.gather(1, at[:, None])[:, 0]


@dataclass
class FixedChildrenLaw(SampledLaw):
    """Deterministic children; p' is computed only for the node where the path has ended."""

    accept: Tensor
    shape: Shape
    p: Tensor
    tokens: Tensor

    def ending(self, passed: Tensor) -> Ending:
        return _walk(self.shape, passed)

    def next_distribution(self, at: Tensor) -> Tensor:
        """p without the children that were tried in vain."""
        p = self.p[torch.arange(len(at), device=at.device), at]
        tried = (self.shape.parents + 1 == at[:, None]) & self.shape.inside
        q = torch.zeros_like(p).scatter_add_(1, self.tokens, tried.to(p.dtype))
        return residual(p, q)


@dataclass
class DrawnChildrenLaw(SampledLaw):
    """left: [B, N+1, V], p' of each node after all of its children."""

    accept: Tensor
    shape: Shape
    left: Tensor

    def ending(self, passed: Tensor) -> Ending:
        return _walk(self.shape, passed)

    def next_distribution(self, at: Tensor) -> Tensor:
        return self.left[torch.arange(len(at), device=at.device), at]


def greedy_tree_law(proposal: Proposal, logits: Tensor, shape: Shape) -> GreedyTreeLaw:
    """Follow the target's argmax as far as the tree has it. logits: [B, N+1, V]."""
    best = logits.argmax(-1)
    right = (proposal.tokens == best.gather(1, shape.parents + 1)) & shape.inside
    return GreedyTreeLaw(right.to(torch.float32), shape, best)


def tree_law(proposal: Proposal, p: Tensor, shape: Shape) -> FixedChildrenLaw | DrawnChildrenLaw:
    """See the module's docstring. p: [B, N+1, V] after the request's processors."""
    if proposal.q is None:
        return _fixed_children(proposal.tokens, p, shape)
    return _drawn_children(proposal, proposal.q, p, shape)


def _fixed_children(tokens: Tensor, p: Tensor, shape: Shape) -> FixedChildrenLaw:
    rows = torch.arange(len(tokens), device=p.device)[:, None]
    p_x = p[rows, shape.parents + 1, tokens].double()
    # A token that an elder sibling has already tried in vain has nothing left.
    again = (shape.elder & (tokens[:, :, None] == tokens[:, None, :])).any(-1)
    p_x = torch.where(again, 0.0, p_x)
    left = 1 - (shape.elder * p_x[:, None, :]).sum(-1)
    accept = torch.where(left > 0, p_x / left, 0.0).clamp(max=1)
    return FixedChildrenLaw(torch.where(shape.inside, accept, 0.0), shape, p, tokens)


def _drawn_children(proposal: Proposal, q: Tensor, p: Tensor, shape: Shape) -> DrawnChildrenLaw:
    """Node by node, as each changes what its younger siblings are tried against.

    A child that q' gives nothing, because the ones before it were all that q had, cannot have been drawn from
    it: it is a function of those, and tried as a deterministic one.
    """
    rows = torch.arange(len(p), device=p.device)
    left_p, left_q = p.clone(), q.clone()
    accept = []
    for node in range(proposal.tokens.shape[1]):
        inside, token = shape.inside[:, node], proposal.tokens[:, node]
        parent = shape.parents[:, node] + 1
        row = rows.new_full(rows.shape, node) if proposal.q_row is None else proposal.q_row[:, node]
        p_now = left_p[rows, parent]
        drawn_from = on_target_vocabulary(left_q[rows, row], proposal.vocab, p.shape[-1])
        q_x = drawn_from.gather(1, token[:, None])
        q_now = torch.where(q_x > 0, drawn_from, point_masses(token, p_now))
        p_x = p_now.gather(1, token[:, None])[:, 0]
        passes = (p_x / q_now.gather(1, token[:, None])[:, 0]).clamp(max=1)
        accept.append(torch.where(inside, passes, 0.0))
        left_p[rows, parent] = torch.where(inside[:, None], residual(p_now, q_now), p_now)
        left_q[rows, row] = _without(left_q[rows, row], token, proposal.vocab, inside)
    return DrawnChildrenLaw(torch.stack(accept, 1), shape, left_p)


def _without(q: Tensor, token: Tensor, vocab: Tensor | None, where: Tensor) -> Tensor:
    """[B, Vd]: q with the token's share given to the others, in proportion; all zero if it had everything."""
    index = (token if vocab is None else torch.searchsorted(vocab, token.contiguous()))[:, None]
    rest = q.scatter(1, index, torch.where(where[:, None], 0.0, q.gather(1, index)))
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total, rest)
