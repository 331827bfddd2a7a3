"""Laws of chains: greedy, token rejection, block verification."""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepspec.decoding.acceptance.law import (
    Ending,
    Law,
    SampledLaw,
    lengths_of,
    on_target_vocabulary,
    point_masses,
    residual,
)
from deepspec.drafts.contract import Proposal


def _first_failure(passed: Tensor) -> Ending:
    """Everything before the first failed test is accepted."""
    length = passed.long().cumprod(1).sum(1)
    return Ending(length, length)


@dataclass
class GreedyLaw(Law):
    """best: [B, N+1], the target's argmax after the pending token and after each drafted one."""

    accept: Tensor
    best: Tensor

    def ending(self, passed: Tensor) -> Ending:
        return _first_failure(passed)

    def next_token(self, at: Tensor, uniform: Tensor) -> Tensor:
        return self.best.gather(1, at[:, None])[:, 0]


@dataclass
class TokenLaw(SampledLaw):
    """p: [B, N+1, V]; the residual after accepted length n is computed only for the n that happened."""

    accept: Tensor
    p: Tensor
    proposal: Proposal

    def ending(self, passed: Tensor) -> Ending:
        return _first_failure(passed)

    def next_distribution(self, at: Tensor) -> Tensor:
        """`norm(max(p − q, 0))` at a rejection, p after a full acceptance."""
        return _after(self.p, self.proposal, at)


@dataclass
class BlockLaw(SampledLaw):
    """kept: [B, N+1], r_0 = 1 and r_i = min(r_{i−1} p(x_i)/q(x_i), 1)."""

    accept: Tensor
    p: Tensor
    proposal: Proposal
    kept: Tensor

    def ending(self, passed: Tensor) -> Ending:
        """The *longest* beginning whose last token passes."""
        length = (passed * torch.arange(1, passed.shape[1] + 1, device=passed.device)).amax(1)
        return Ending(length, length)

    def next_distribution(self, at: Tensor) -> Tensor:
        """`norm(max(r_n p − q, 0))` after n tokens, p after all of them."""
        return _after(self.p, self.proposal, at, self.kept)


def greedy_law(proposal: Proposal, logits: Tensor) -> GreedyLaw:
    """Accept while the drafted token is the target's argmax. logits: [B, N+1, V]."""
    best = logits.argmax(-1)
    right = (proposal.tokens == best[:, : proposal.tokens.shape[1]]) & _inside(proposal)
    return GreedyLaw(right.to(torch.float32), best)


def token_law(proposal: Proposal, p: Tensor) -> TokenLaw:
    """Token rejection (Leviathan et al. 2023; Chen et al. 2023): accept x with min(1, p(x)/q(x)).

    p: [B, N+1, V] after the request's processors. A deterministic proposal (q None) is a point mass.
    """
    ratio = _ratio(proposal, p).clamp(max=1)
    return TokenLaw(torch.where(_inside(proposal), ratio, 0.0), p, proposal)


def block_law(proposal: Proposal, p: Tensor) -> TokenLaw | BlockLaw:
    """Block verification (Sun et al. 2024, arXiv 2403.10444): the whole block is looked at before its beginning
    is accepted, so that a good later token makes up for a doubtful earlier one.

    With s_i = Σ_v max(r_i p(v) − q(v), 0) after x_i, i < K: x_1..x_i passes with s_i/(s_i + 1 − r_i), the whole
    block with r_K; the longest that passes stands. K may depend on the tokens before it (a draft that stops).
    Expected length ≥ token rejection's; equal for a deterministic draft, whose tokens cannot be accepted more
    often than the target says them, so that token rejection serves.
    """
    if proposal.q is None:
        return token_law(proposal, p)
    ratio, count = _ratio(proposal, p), proposal.tokens.shape[1]
    kept = [torch.ones_like(ratio[:, 0])]
    for step in range(count):
        kept.append((kept[-1] * ratio[:, step]).clamp(max=1))
    r = torch.stack(kept, 1)
    q = on_target_vocabulary(_by_node(proposal, proposal.q), proposal.vocab, p.shape[-1])
    s = (r[:, 1:-1, None] * p[:, 1:-1] - q[:, 1:]).clamp(min=0).sum(-1)
    s = torch.cat([s, s.new_zeros(len(s), 1)], 1)
    # A block also ends before a q that is not a number: nothing was drafted from it.
    last = (torch.arange(1, count + 1, device=p.device) == lengths_of(proposal)[:, None]) | s.isnan()
    r_i = r[:, 1:]
    share = torch.where((s == 0) & (r_i >= 1), 1.0, s / (s + 1 - r_i))  # 0/0 is 1
    accept = torch.where(_inside(proposal), torch.where(last, r_i, share), 0.0)
    return BlockLaw(accept.nan_to_num(0.0), p, proposal, r)


def _inside(proposal: Proposal) -> Tensor:
    steps = torch.arange(proposal.tokens.shape[1], device=proposal.tokens.device)
    return steps < lengths_of(proposal)[:, None]


def _ratio(proposal: Proposal, p: Tensor) -> Tensor:
    """[B, N]: p(x)/q(x) of each drafted token, of the very tensor it was drawn from."""
    count, tokens = proposal.tokens.shape[1], proposal.tokens
    p_x = p[:, :count].gather(2, tokens[..., None])[..., 0]
    if proposal.q is None:
        return p_x
    if proposal.vocab is not None:
        tokens = torch.searchsorted(proposal.vocab, tokens)  # vocab is ascending: target id → draft id
    q_x = _by_node(proposal, proposal.q).gather(2, tokens[..., None])[..., 0]
    return p_x / q_x.clamp(min=torch.finfo(p.dtype).tiny)


def _by_node(proposal: Proposal, q: Tensor) -> Tensor:
    """[B, N, Vd]: the distribution that each token was drawn from."""
    if proposal.q_row is None:
        return q
    return q.gather(1, proposal.q_row[..., None].expand(-1, -1, q.shape[-1]))


def _after(p: Tensor, proposal: Proposal, at: Tensor, kept: Tensor | None = None) -> Tensor:
    """[B, V]: `norm(max(r p − q, 0))` of the first token not accepted, p where all were. kept: [B, N+1] r, or 1."""
    rows = torch.arange(len(at), device=p.device)
    p_at = p[rows, at]
    if proposal.tokens.shape[1] == 0:
        return p_at
    failed = at.clamp(max=proposal.tokens.shape[1] - 1)
    if proposal.q is None:
        q = point_masses(proposal.tokens[rows, failed], p_at)
    else:
        row = failed if proposal.q_row is None else proposal.q_row[rows, failed]
        q = on_target_vocabulary(proposal.q[rows, row], proposal.vocab, p.shape[-1])
    share = 1.0 if kept is None else kept[rows, at][:, None]
    return torch.where((at < lengths_of(proposal))[:, None], residual(p_at, q, share), p_at)
