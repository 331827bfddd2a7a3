"""Acceptance rules: which drafted tokens stand, and what comes after them, so that the output is the target's.

A rule has two steps. `law` is deterministic and can be enumerated: the probability that each drafted token is
accepted given that those before it were, and the distribution of the next token for every accepted length.
`draw` turns uniforms into a verdict. Shapes: B rows, N drafted tokens, V target vocabulary.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspec.decoding.sampling import draw as draw_token
from deepspec.drafts.contract import Proposal


@dataclass
class Verdict:
    """length: [B] int64 accepted drafted tokens. next_token: [B] int64, the target's own."""

    length: Tensor
    next_token: Tensor


class Law(ABC):
    """What one round may do. accept: [B, N], row b's positions past its proposal's length are 0."""

    accept: Tensor

    @abstractmethod
    def next_token(self, length: Tensor, uniform: Tensor) -> Tensor:
        """[B] accepted lengths and uniforms → the token after them, [B]."""


@dataclass
class GreedyLaw(Law):
    """best: [B, N+1], the target's argmax after the pending token and after each drafted one."""

    accept: Tensor
    best: Tensor

    def next_token(self, length: Tensor, uniform: Tensor) -> Tensor:
        return self.best.gather(1, length[:, None])[:, 0]


@dataclass
class TokenLaw(Law):
    """p: [B, N+1, V]; the residual after accepted length n is computed only for the n that happened."""

    accept: Tensor
    p: Tensor
    proposal: Proposal

    def next_distribution(self, length: Tensor) -> Tensor:
        """[B] accepted lengths → [B, V]: `norm(max(p − q, 0))` at a rejection, p after a full acceptance.

        A residual without mass, which rounding can make where p = q, becomes p.
        """
        rows = torch.arange(len(length), device=self.p.device)
        p = self.p[rows, length]
        rejected = length < torch.tensor(self.proposal.length, device=self.p.device)
        if self.proposal.tokens.shape[1] == 0:
            return p
        index = length.clamp(max=self.proposal.tokens.shape[1] - 1)
        residual = (p - _q_rows(self.proposal, rows, index, p)).clamp(min=0)
        total = residual.sum(-1, keepdim=True)
        residual = torch.where(total > 0, residual / total, p)
        return torch.where(rejected[:, None], residual, p)

    def next_token(self, length: Tensor, uniform: Tensor) -> Tensor:
        return draw_token(self.next_distribution(length), uniform)


def greedy_law(proposal: Proposal, logits: Tensor) -> GreedyLaw:
    """Accept while the drafted token is the target's argmax. logits: [B, N+1, V], raw."""
    best = logits.argmax(-1)
    count = proposal.tokens.shape[1]
    return GreedyLaw(((proposal.tokens == best[:, :count]) & _inside(proposal)).to(torch.float32), best)


def token_law(proposal: Proposal, p: Tensor) -> TokenLaw:
    """Token rejection (Leviathan et al. 2023; Chen et al. 2023): accept x with min(1, p(x)/q(x)).

    p: [B, N+1, V] after the request's processors. A deterministic proposal (q None) is a point mass.
    """
    count = proposal.tokens.shape[1]
    p_x = p[:, :count].gather(2, proposal.tokens[..., None])[..., 0]
    ratio = (
        p_x
        if proposal.q is None
        else p_x / _q_of_tokens(proposal, proposal.q).clamp(min=torch.finfo(p.dtype).tiny)
    )
    return TokenLaw(torch.where(_inside(proposal), ratio.clamp(max=1), 0.0), p, proposal)


def draw(law: Law, accept_uniforms: Tensor, next_uniforms: Tensor) -> Verdict:
    """Keep the drafted tokens before the first one with u ≥ accept.

    Uniforms: float64 [B, N] and [B, N+1], the latter one for each length the round may come to.
    """
    # Compared in float64: a float32 uniform could round up to 1.
    passed = accept_uniforms.to(law.accept.device) < law.accept.double()
    length = passed.long().cumprod(1).sum(1)
    uniform = next_uniforms.to(law.accept.device).gather(1, length[:, None])[:, 0]
    return Verdict(length, law.next_token(length, uniform))


def _inside(proposal: Proposal) -> Tensor:
    device = proposal.tokens.device
    steps = torch.arange(proposal.tokens.shape[1], device=device)
    return steps < torch.tensor(proposal.length, device=device)[:, None]


def _q_of_tokens(proposal: Proposal, q: Tensor) -> Tensor:
    """[B, N]: q(x) of each drafted token under the distribution it was drawn from."""
    tokens = proposal.tokens
    if proposal.vocab is not None:
        tokens = torch.searchsorted(proposal.vocab, tokens)  # vocab is ascending: target id → draft id
    return q.gather(2, tokens[..., None])[..., 0]


def _q_rows(proposal: Proposal, rows: Tensor, index: Tensor, like: Tensor) -> Tensor:
    """[B, V]: the distribution drafted token `index[b]` of row b came from, zero outside the draft vocabulary."""
    full = torch.zeros_like(like)
    if proposal.q is None:
        return full.scatter_(1, proposal.tokens[rows, index][:, None], 1.0)
    q = proposal.q[rows, index]
    if proposal.vocab is None:
        return q
    full[:, proposal.vocab] = q
    return full
