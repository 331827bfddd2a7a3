"""What past rounds say about the next one: acceptance by position, tokens a round, seconds a round."""

from collections.abc import Sequence

DECAY = 0.95  # of a past round's weight with every further one: a memory of some twenty rounds
PRIOR_ACCEPTANCE = 0.9  # before anything was seen: hopeful, or a threshold above it would never try;
PRIOR_WEIGHT = 2.0  # counts as much as this many observations


class DecayedMean:
    """A mean in which each observation weighs `decay` times the next one; None before the first."""

    def __init__(self, decay: float = DECAY) -> None:
        self.decay, self.total, self.weight = decay, 0.0, 0.0

    def add(self, value: float) -> None:
        self.total = self.total * self.decay + value
        self.weight = self.weight * self.decay + 1

    @property
    def value(self) -> float | None:
        return self.total / self.weight if self.weight else None

    def towards(self, prior: float, weight: float = PRIOR_WEIGHT) -> float:
        """The mean with `prior` counted in as `weight` observations."""
        return (self.total + prior * weight) / (self.weight + weight)


class Acceptance:
    """Acceptance at each position given that those before it were accepted, over past rounds.

    A position is judged only by rounds that verified it and accepted all before it. Every round ages every
    position, so that one no longer verified drifts back to the mean over positions and is tried again.
    """

    def __init__(self, k: int, decay: float = DECAY) -> None:
        self.decay = decay
        self.accepted = [0.0] * k
        self.tried = [0.0] * k

    def add(self, verified: int, accepted: int) -> None:
        """One round that verified so many drafted tokens (a path) and accepted so many of them."""
        for k in range(len(self.tried)):
            tried = k < verified and k <= accepted
            self.tried[k] = self.tried[k] * self.decay + tried
            self.accepted[k] = self.accepted[k] * self.decay + (tried and k < accepted)

    def at_positions(self, prior: Sequence[float] | None = None) -> list[float]:
        """[K] estimates. prior: by position (a request leans on its engine's); None = this one's own mean."""
        mean = (sum(self.accepted) + PRIOR_WEIGHT * PRIOR_ACCEPTANCE) / (sum(self.tried) + PRIOR_WEIGHT)
        means = [mean] * len(self.tried) if prior is None else prior
        return [
            (accepted + PRIOR_WEIGHT * expected) / (tried + PRIOR_WEIGHT)
            for accepted, tried, expected in zip(self.accepted, self.tried, means, strict=True)
        ]
