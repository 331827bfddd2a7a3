"""What every rule's law has, and how uniforms turn it into a verdict."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspec.decoding.sampling import draw as draw_token
from deepspec.drafts.contract import Proposal


@dataclass
class Ending:
    """Where the accepted tokens end. length: [B] int64, how many. at: [B] int64, the last of them, 0 = the
    pending token, i + 1 = drafted token i. path: [B, N] int64, the accepted ones' indices, then any valid ones;
    None for a chain, where they are the first."""

    length: Tensor
    at: Tensor
    path: Tensor | None = None


@dataclass
class Verdict:
    """length: [B] int64 accepted drafted tokens. next_token: [B] int64, the target's own. path: see `Ending`."""

    length: Tensor
    next_token: Tensor
    path: Tensor | None = None


class Law(ABC):
    """What one round may do. accept: [B, N], the probability that each drafted token passes its own test; 0
    for what is not to be verified (past a row's length, say)."""

    accept: Tensor

    @abstractmethod
    def ending(self, passed: Tensor) -> Ending:
        """[B, N] bool, which tests were passed → what is accepted."""

    @abstractmethod
    def next_token(self, at: Tensor, uniform: Tensor) -> Tensor:
        """[B] `Ending.at` and uniforms → the target's own token after it, [B]."""


class SampledLaw(Law):
    """A law whose next token is drawn."""

    @abstractmethod
    def next_distribution(self, at: Tensor) -> Tensor:
        """[B] `Ending.at` → [B, V], the distribution of the token after it. It need not sum to exactly 1."""

    def next_token(self, at: Tensor, uniform: Tensor) -> Tensor:
        return draw_token(self.next_distribution(at), uniform)


def draw(law: Law, accept_uniforms: Tensor, next_uniform: Tensor) -> Verdict:
    """A drafted token passes iff u < accept. Uniforms: float64 [B, N] and [B], independent, in [0, 1)."""
    # Compared in float64: a float32 uniform could round up to 1.
    ending = law.ending(accept_uniforms < law.accept.double())
    return Verdict(ending.length, law.next_token(ending.at, next_uniform), ending.path)


def lengths_of(proposal: Proposal) -> Tensor:
    """[B] int64, on the proposal's device."""
    return torch.tensor(proposal.length).to(proposal.tokens.device, non_blocking=True)


def point_masses(tokens: Tensor, like: Tensor) -> Tensor:
    """[B] → [B, V], 1 at each row's token."""
    return torch.zeros_like(like).scatter_(-1, tokens[..., None], 1.0)


def on_target_vocabulary(q: Tensor, vocab: Tensor | None, size: int) -> Tensor:
    """[..., Vd] → [..., V], zero outside the draft vocabulary."""
    if vocab is None:
        return q
    full = q.new_zeros(*q.shape[:-1], size)
    full[..., vocab] = q
    return full


def residual(p: Tensor, q: Tensor, share: Tensor | float = 1.0) -> Tensor:
    """norm(max(share · p − q, 0)) over the last dimension; p where that has no mass, which rounding can make
    where p = q, or is not a number."""
    rest = (share * p - q).clamp(min=0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total, p)
