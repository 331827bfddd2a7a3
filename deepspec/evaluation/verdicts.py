"""An acceptance rule tried alone: verdicts on a recorded round's real (p, q), against what losslessness demands.

The round's distributions are held fixed and the drafted tokens drawn anew each time, p and q of every node taken
to hold whatever was drawn above it. That is a target and a draft like any other, so that a lossless rule has to
give each position its p exactly; no model runs, and 100,000 verdicts take seconds.

The vocabulary is the most probable tokens of any node's p or q, with all others as one more token.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepspec.decoding.acceptance import Shape, choose_sampled
from deepspec.decoding.acceptance import draw as draw_verdict
from deepspec.decoding.sampling import draw
from deepspec.drafts.contract import Proposal

LIKELY = 32  # tokens kept of each node's p and of its q
CELLS = 64  # of a test, the rest being one of them
LEAST = 5.0  # verdicts expected in a cell
POWER = 2.326  # standard deviations: a distance is "seen" that 99% of repetitions would complain of
CHUNK = 2048  # verdicts at a time


@dataclass
class Recorded:
    """One row of one round. proposal: [1, N]. p: [1, N+1, V] after the request's processors. shape: of a tree."""

    proposal: Proposal
    p: Tensor
    shape: Shape | None


@dataclass
class Test:
    """One chi-square test. verdicts: how many it counted. p_value: under losslessness. freedom: cells − 1."""

    __test__ = False  # not one of pytest's

    what: str
    verdicts: int
    p_value: float
    freedom: int

    def visible(self, significance: float) -> float:
        """The least total-variation distance, over the cells, that would have been complained of.

        A distance d in whatever direction shifts the statistic by at least 4·d²·verdicts: Σ δ²/p is least where
        d is spread over one half of the mass and taken from the other.
        """
        if self.freedom == 0:
            return 1.0  # one cell alone shows nothing
        low, high = 0.0, 1e7
        critical = critical_value(significance, self.freedom)
        while high - low > 1e-3:
            shift = (low + high) / 2
            mean, spread = self.freedom + shift, math.sqrt(2 * (self.freedom + 2 * shift))
            low, high = (low, shift) if mean - POWER * spread > critical else (shift, high)
        return min(1.0, math.sqrt(high / (4 * self.verdicts)))


def try_rule(recorded: Recorded, rule: str, draws: int, seed: int) -> list[Test]:
    """Draw verdicts and test the token after the pending one, and after every node that is often accepted.

    Block verification looks ahead, so that what follows an accepted token is not distributed as p given that it
    was accepted; there each answer is continued by draws from p, and every position tested over all answers.
    """
    small = _small(recorded)
    generator = torch.Generator().manual_seed(seed)
    size, nodes = small.p.shape[-1], small.proposal.tokens.shape[1]
    counts = torch.zeros(nodes + 1, size, dtype=torch.float64)
    whole = small.shape is None and rule not in ("token", "greedy") and small.proposal.q is not None
    for start in range(0, draws, CHUNK):
        at, token = _answers(small, rule, min(CHUNK, draws - start), generator, whole)
        counts.view(-1).index_add_(0, (at * size + token).cpu(), torch.ones(len(at), dtype=torch.float64))
    what = "position" if small.shape is None else "node"
    return [
        chi_square(f"after {what} {node}", counts[node], small.p[0, node].double().cpu())
        for node in range(nodes + 1)
        if counts[node].sum() >= 1000
    ]


def chi_square(what: str, counts: Tensor, p: Tensor) -> Test:
    """Pearson's test of counts [C] against probabilities [C], over the likeliest cells and the rest.

    A token of probability 0 that was seen even once decides it.
    """
    verdicts = float(counts.sum())
    if bool((counts[p == 0] > 0).any()):
        return Test(what, int(verdicts), 0.0, 1)
    order = p.argsort(descending=True)
    kept = int(((p[order] * verdicts >= LEAST).sum()).clamp(1, CELLS - 1))
    expected = torch.cat([p[order[:kept]], p[order[kept:]].sum()[None]]) * verdicts
    seen = torch.cat([counts[order[:kept]], counts[order[kept:]].sum()[None]])
    if expected[-1] < LEAST:  # too small for a cell of its own
        expected = torch.cat([expected[:-2], expected[-2:].sum()[None]])
        seen = torch.cat([seen[:-2], seen[-2:].sum()[None]])
    freedom = len(expected) - 1
    if freedom == 0:
        return Test(what, int(verdicts), 1.0, 0)
    expected *= verdicts / expected.sum()  # p may sum to 1 within rounding only
    return Test(
        what, int(verdicts), upper_tail(float(((seen - expected) ** 2 / expected).sum()), freedom), freedom
    )


def upper_tail(statistic: float, freedom: int) -> float:
    """P(χ² ≥ statistic)."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def critical_value(significance: float, freedom: int) -> float:
    """The statistic whose upper tail is `significance`."""
    low, high = 0.0, 1e6
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if upper_tail(middle, freedom) > significance else (low, middle)
    return high


def _small(recorded: Recorded) -> Recorded:
    """The round on the vocabulary of its likely tokens and one for all others, in which every drafted token is."""
    proposal, p = recorded.proposal, recorded.p
    q = proposal.q
    if q is not None and proposal.vocab is not None:
        full = q.new_zeros(*q.shape[:-1], p.shape[-1])
        full[..., proposal.vocab] = q
        q = full
    count = min(LIKELY, p.shape[-1])
    kept = [p[0].topk(count).indices.flatten(), proposal.tokens[0]]
    if q is not None:
        kept.append(q[0].topk(count).indices.flatten())
    likely = torch.cat(kept).unique()

    def lumped(x: Tensor) -> Tensor:
        rest = (x.sum(-1, keepdim=True) - x[..., likely].sum(-1, keepdim=True)).clamp(min=0)
        return torch.cat([x[..., likely], rest], -1)

    return Recorded(
        replace(
            proposal,
            tokens=torch.searchsorted(likely, proposal.tokens),
            q=None if q is None else lumped(q),
            vocab=None,
        ),
        lumped(p),
        recorded.shape,
    )


def _answers(
    small: Recorded, rule: str, rows: int, generator: torch.Generator, whole: bool
) -> tuple[Tensor, Tensor]:
    """Verdicts of `rows` rounds as pairs: the node (0: the pending token) and the token that came after it."""
    proposal, p = _copies(small, rows, generator), small.p.expand(rows, -1, -1)
    nodes, device = proposal.tokens.shape[1], p.device
    law = choose_sampled(rule, proposal, p, _shapes(small.shape, rows))
    verdict = draw_verdict(
        law, _uniforms((rows, nodes), generator, device), _uniforms((rows,), generator, device)
    )
    steps = torch.arange(nodes, device=device).expand(rows, -1)
    path = steps if verdict.path is None else verdict.path
    accepted = steps < verdict.length[:, None]
    # The token after the i-th accepted one is the next accepted one, and the target's own after the last.
    before = torch.cat([torch.zeros_like(path[:, :1]), path + 1], 1)
    after = torch.cat([proposal.tokens.gather(1, path), path[:, :1]], 1)
    after.scatter_(1, verdict.length[:, None], verdict.next_token[:, None])
    known = torch.cat([torch.ones_like(accepted[:, :1]), accepted], 1)
    if whole:
        for node in range(1, nodes + 1):
            drawn = draw(p[:, node], _uniforms((rows,), generator, device))
            after[:, node] = torch.where(known[:, node], after[:, node], drawn)
        known = torch.ones_like(known)
    return before[known], after[known]


def _copies(small: Recorded, rows: int, generator: torch.Generator) -> Proposal:
    """The proposal `rows` times, its tokens drawn anew from q; siblings without replacement, in their order."""
    proposal = small.proposal
    tokens = proposal.tokens.repeat(rows, 1)
    q = None if proposal.q is None else proposal.q.expand(rows, -1, -1)
    if q is not None:
        left: dict[int, Tensor] = {}
        rows_of_q = None if proposal.q_row is None else proposal.q_row[0].tolist()
        for node in range(tokens.shape[1]):
            row = node if rows_of_q is None else rows_of_q[node]
            remaining = left.setdefault(row, q[:, row].clone())
            drawn = draw(remaining, _uniforms((rows,), generator, q.device))
            # Where q has fewer tokens than the node has children, the recorded child stays.
            tokens[:, node] = torch.where(remaining.sum(-1) > 0, drawn, tokens[:, node])
            remaining.scatter_(1, tokens[:, node, None], 0.0)
    repeated = {
        name: None if value is None else value.expand(rows, *value.shape[1:])
        for name, value in (("parents", proposal.parents), ("q_row", proposal.q_row))
    }
    return replace(
        proposal, tokens=tokens, q=q, length=list(proposal.length) * rows, confidence=None, **repeated
    )


def _shapes(shape: Shape | None, rows: int) -> Shape | None:
    if shape is None:
        return None
    parts = (shape.parents, shape.ancestors, shape.elder, shape.inside)
    return Shape(*(part.expand(rows, *part.shape[1:]) for part in parts))


def _uniforms(size: tuple[int, ...], generator: torch.Generator, device: torch.device) -> Tensor:
    return torch.rand(size, generator=generator, dtype=torch.float64).to(device)
