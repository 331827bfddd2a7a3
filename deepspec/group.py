"""This process among those that share a piece of work; what knows nothing of launchers is handed one."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """wait: until all have come here."""

    rank: int = 0
    size: int = 1
    wait: Callable[[], None] = lambda: None

    @property
    def first(self) -> bool:
        return self.rank == 0

    def mine(self, number: int) -> bool:
        """Whether piece `number` is this process's."""
        return number % self.size == self.rank


ALONE = Group()
