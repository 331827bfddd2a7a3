"""The mixer, against published numbers and a scalar reference."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deepspec.decoding.randomness import Purpose, uniforms
from deepspec.randomness import splitmix64

WORD = (1 << 64) - 1


def reference(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


def test_known_numbers() -> None:
    """The generator's well-known first output from the seed 1234567."""
    assert splitmix64(np.array([1234567], dtype=np.uint64)).tolist() == [6457827717110365317]


@given(st.lists(st.integers(0, WORD), min_size=1, max_size=5))
def test_every_word_is_mixed_like_the_scalar_one(words: list[int]) -> None:
    assert splitmix64(np.array(words, dtype=np.uint64)).tolist() == [reference(word) for word in words]


@given(st.integers(0, WORD), st.integers(0, 1 << 20), st.sampled_from(list(Purpose)), st.integers(0, 9))
def test_draws_of_decoding_are_the_mixer_once_a_key(
    seed: int, position: int, purpose: Purpose, index: int
) -> None:
    state = reference(seed)
    for key in (position, int(purpose), index + 1):
        state = reference(state ^ key)
    drawn = uniforms([seed], [position], purpose, count=2, index=index)
    assert drawn[0, 1] == (state >> 11) * 2.0**-53
