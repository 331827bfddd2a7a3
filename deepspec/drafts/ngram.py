"""Prompt lookup: propose what followed the last time the text ended like this (Saxena 2023; Yang et al. 2023).

No parameters, no training, no features: the longest suffix of `min_n` to `max_n` tokens that occurred before in
the request's own text, at its latest occurrence. A row without one proposes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from deepspec.drafts.contract import Beginning, Committed, Control, Proposal
from deepspec.drafts.options import NgramOptions


@dataclass
class Lookup:
    """One text, and where each of its n-grams was last followed by something.

    after: n-gram → index of the token behind its latest occurrence. A token costs max_n entries when it comes,
    and a round max_n look-ups, however long the text.
    """

    min_n: int
    max_n: int
    tokens: list[int] = field(default_factory=list)
    after: dict[tuple[int, ...], int] = field(default_factory=dict)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            end = len(self.tokens)
            for n in range(self.min_n, min(self.max_n, end) + 1):
                self.after[tuple(self.tokens[end - n :])] = end
            self.tokens.append(token)

    def ahead(self, count: int) -> list[int]:
        """Up to `count` tokens; where the occurrence reaches the text's end, it goes on with what it proposes."""
        end = len(self.tokens)
        for n in range(min(self.max_n, end), self.min_n - 1, -1):
            start = self.after.get(tuple(self.tokens[end - n :]))
            if start is not None:
                found = self.tokens[start : start + count]
                period = end - start
                while len(found) < count:
                    found.append(found[len(found) - period])
                return found
        return []


class NgramDraft:
    """A `Drafter` with nothing to train; deterministic, so that every acceptance rule takes its tokens."""

    needs_features = False
    capture_layers: Sequence[int] = ()

    def __init__(self, options: NgramOptions) -> None:
        options.check()
        self.options = options

    def begin(self, beginning: Beginning) -> "Texts":
        lookup = Lookup(self.options.min_n, self.options.max_n)
        lookup.extend(beginning.tokens[0].tolist())
        return Texts([lookup], beginning.tokens.device)

    def join(self, state: "Texts | None", new: "Texts") -> "Texts":
        if state is None:
            return new
        state.lookups += new.lookups
        return state

    def propose(self, state: "Texts", control: Control) -> Proposal:
        """A chain of what followed; rows of different lengths, none where nothing was found."""
        found = [lookup.ahead(control.max_tokens) for lookup in state.lookups]
        longest = max(map(len, found))
        padded = torch.tensor([row + [0] * (longest - len(row)) for row in found], dtype=torch.long)
        return Proposal(padded.to(state.device, non_blocking=True), [len(row) for row in found])

    def update(self, state: "Texts", committed: Committed) -> None:
        for lookup, tokens in zip(state.lookups, committed.values, strict=True):
            lookup.extend(tokens)

    def select(self, state: "Texts", rows: Sequence[int]) -> None:
        state.lookups = [state.lookups[row] for row in rows]


@dataclass
class Texts:
    """The rows' texts, and where their proposals are wanted."""

    lookups: list[Lookup]
    device: torch.device
