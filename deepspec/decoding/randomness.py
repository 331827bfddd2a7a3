"""Random numbers as a pure function of keys: no stream, so batch mates and schedules cannot shift them."""

from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from deepspec.randomness import splitmix64


class Purpose(IntEnum):
    """What a draw decides; equal positions with different purposes are independent."""

    draft = 1
    accept = 2
    next = 3


def uniforms(
    seeds: Sequence[int], positions: Sequence[int], purpose: Purpose, count: int = 1, index: int = 0
) -> np.ndarray:
    """[len(seeds), count] float64 in [0, 1): row b holds the draws `index` + 0..count−1 at positions[b].

    Each is `hash(seed, position, purpose, index)`; the mixer is SplitMix64, applied once per key. The position
    is the *round's* first output position and the index counts the drafted tokens: keyed by each token's own
    position, a round would meet again the draws that an earlier one has rejected, and block verification, which
    looks at the whole block before it accepts its beginning, has been told something about those.
    """
    rows = np.asarray([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)[:, None]
    places = np.asarray(positions, dtype=np.uint64)[:, None]
    indices = np.arange(index, index + count, dtype=np.uint64)[None]
    state = splitmix64(rows)
    for key in (places, np.uint64(purpose), indices):
        state = splitmix64(state ^ key)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
