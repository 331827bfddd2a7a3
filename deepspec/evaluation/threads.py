"""With how many threads torch decodes fastest here: tried, as small models on busy or virtual machines often do
better with fewer than there are cores."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from deepspec.decoding.request import Request, Result
from deepspec.evaluation.result import ThreadSpeed

ROUNDS = 3  # of the settings in turn; the median counts


def candidates(most: int) -> list[int]:
    """All of torch's `most` threads, half and a quarter of them."""
    return [most // part for part in (1, 2, 4) if most // part]


def try_threads(
    decode: Callable[[Request], Result], request: Request, numbers: list[int]
) -> list[ThreadSpeed]:
    """Tokens a second of `decode` at each number of threads, in turns; the fastest is marked and left set.

    A single number is no choice: nothing is timed and the list is empty.
    """
    if len(numbers) < 2:
        return []
    seconds: dict[int, list[float]] = {number: [] for number in numbers}
    for turn in range(1 + ROUNDS):  # the first one warms up
        for number in numbers[turn % len(numbers) :] + numbers[: turn % len(numbers)]:
            torch.set_num_threads(number)
            result = decode(request)
            if turn:
                seconds[number].append(result.decode_seconds / max(1, len(result.tokens) - 1))
    medians = {number: sorted(times)[len(times) // 2] for number, times in seconds.items()}
    fastest = min(medians, key=lambda number: medians[number])
    torch.set_num_threads(fastest)
    return [
        ThreadSpeed(number, 1 / median if median else None, chosen=number == fastest)
        for number, median in medians.items()
    ]


@contextmanager
def threads_as_they_were() -> Iterator[None]:
    """What follows in this process finds torch's number of threads unchanged."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
