"""What passes between the steps of a round: how it is to go, what the target reads, what came of it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from deepspec.decoding.acceptance import Shape
from deepspec.decoding.row import Row
from deepspec.decoding.trees import longest_path, size_of
from deepspec.drafts.contract import DynamicTree, Proposal, StaticTree
from deepspec.target import Layout


@dataclass(frozen=True)
class How:
    """How a round drafts and judges. k: drafted tokens of a chain. tree: None = a chain. exact, compile: see
    `Engine`."""

    k: int = 5
    rule: str = "auto"
    tree: StaticTree | DynamicTree | None = None
    sampled_children: bool = False
    exact: bool = False
    compile: bool = False

    @property
    def longest(self) -> int:
        """Drafted tokens that a round may accept at most."""
        return self.k if self.tree is None else longest_path(self.tree)

    @property
    def most(self) -> int:
        """Drafted tokens that the target reads in a round at most."""
        return self.k if self.tree is None else max(size_of(self.tree), self.longest)


@dataclass
class Trial:
    """A proposal as the target reads it. tokens: [B, N+1], the pending ones first. shape: of trees. sound: [B],
    the draft's parents were a tree."""

    proposal: Proposal
    tokens: Tensor
    layout: Layout
    shape: Shape | None
    sound: Tensor | None


@dataclass
class Outcome:
    """A round's result on the host, a Python value a row. tokens: the accepted ones, then the target's own.
    deepest: the longest path that was verified. path: [B, N+1] on the device, which of `Trial.tokens` stay in
    the target's state (None: the first ones, of a chain or a tree). confidence: of a chain's tokens; empty where the
    draft gave none."""

    tokens: list[list[int]]
    broken: list[bool]
    deepest: list[int]
    path: Tensor | None
    confidence: list[list[float]]

    @property
    def counts(self) -> list[int]:
        return [len(tokens) for tokens in self.tokens]


Observe = Callable[[list[Row], Trial, Tensor], None]


def narrowed(proposal: Proposal, width: int) -> Proposal:
    """Its first `width` tokens."""
    if width == proposal.tokens.shape[1]:
        return proposal
    by_node = proposal.q is not None and proposal.q_row is None
    return replace(
        proposal,
        tokens=proposal.tokens[:, :width],
        parents=proposal.parents[:, :width] if proposal.parents is not None and width else None,
        q=proposal.q[:, :width] if proposal.q is not None and by_node else proposal.q,
        q_row=None if proposal.q_row is None else proposal.q_row[:, :width],
        confidence=None if proposal.confidence is None else proposal.confidence[:, :width],
    )
