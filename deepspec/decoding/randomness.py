"""Random numbers as a pure function of keys: no stream, so batch mates and schedules cannot shift them."""

from collections.abc import Sequence
from enum import IntEnum

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class Purpose(IntEnum):
    """What a draw decides; equal positions with different purposes are independent."""

    draft = 1
    accept = 2
    next = 3


def uniforms(
    seeds: Sequence[int], positions: Sequence[int], purpose: Purpose, count: int = 1, index: int = 0
) -> np.ndarray:
    """[len(seeds), count] float64 in [0, 1): row b holds the draws at output positions positions[b] + 0..count−1.

    Each is `hash(seed, position, purpose, index)`; the mixer is SplitMix64's finaliser (Steele, Lea and Flood
    2014), applied once per key.
    """
    rows = np.asarray([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)[:, None]
    places = np.asarray(positions, dtype=np.uint64)[:, None] + np.arange(count, dtype=np.uint64)[None]
    with np.errstate(over="ignore"):
        state = _mix(rows + _GAMMA)
        for key in (places, np.uint64(purpose), np.uint64(index)):
            state = _mix((state ^ key) + _GAMMA)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(value: np.ndarray) -> np.ndarray:
    value = (value ^ (value >> np.uint64(30))) * _MULTIPLY[0]
    value = (value ^ (value >> np.uint64(27))) * _MULTIPLY[1]
    return value ^ (value >> np.uint64(31))
