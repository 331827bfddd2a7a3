"""How much a text repeats itself nearby: a decoder that loops looks fast and says nothing."""

from collections.abc import Sequence

N, WINDOW = 4, 128


def repetition_rate(tokens: Sequence[int], n: int = N, window: int = WINDOW) -> float | None:
    """The share of the text's n-grams that ended at one of the `window` tokens before, 0 to 1.

    None for a text shorter than n tokens.
    """
    last: dict[tuple[int, ...], int] = {}
    repeated = 0
    for end in range(n, len(tokens) + 1):
        gram = tuple(tokens[end - n : end])
        before = last.get(gram)
        repeated += before is not None and end - before <= window
        last[gram] = end
    grams = len(tokens) - n + 1
    return repeated / grams if grams > 0 else None
