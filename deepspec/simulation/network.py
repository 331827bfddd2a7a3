"""Behind an API or on a node of one's own: which is sooner, and when the network is the larger part."""

from dataclasses import dataclass

ANSWERS = (16, 64, 256, 1024)  # tokens


@dataclass(frozen=True)
class Way:
    """Seconds of an answer: start (time to the first token, network apart) + (tokens − 1) · each + round trip."""

    name: str
    start: float
    each: float
    round_trip: float = 0.0

    def seconds(self, tokens: int) -> float:
        return self.round_trip + self.start + (tokens - 1) * self.each

    def network_share(self, tokens: int) -> float:
        return self.round_trip / self.seconds(tokens)


def network_is_larger_up_to(way: Way) -> int:
    """The longest answer of which the network takes half of the time or more; 0: none."""
    left = way.round_trip - way.start
    if left < 0 or way.round_trip == 0:
        return 0
    return int(left / way.each) + 1 if way.each > 0 else max(ANSWERS)


def sooner_from(one: Way, other: Way) -> int | None:
    """The shortest answer that `one` finishes before `other`; None: never."""
    gain = other.each - one.each
    late = (one.round_trip + one.start) - (other.round_trip + other.start)
    if late < 0:
        return 1
    return int(late / gain) + 2 if gain > 0 else None
