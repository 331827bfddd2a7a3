"""Stored number formats against a float64 loop, and what the two kinds of scales are for."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspec.config.schema import StoreFormat
from deepspec.errors import UserError
from deepspec.target.features.codec import LOSSY, Codec, Encoded, bytes_of, channel_scales
from deepspec.target.features.documents import needed, spans, teachers

LOSSES = list(LOSSY)


def states(seed: int, tokens: int = 64, hidden: int = 32) -> torch.Tensor:
    """[N, 1, H] with channels of very different sizes, and a first token that is massive in one."""
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-1, 2, hidden, dtype=torch.float64)
    made = torch.randn(tokens, 1, hidden, generator=draw, dtype=torch.float64) * sizes
    made[0, 0, 3] = 5e3
    return made


@pytest.mark.parametrize("format", LOSSES)
@given(seed=st.integers(0, 1000))
@settings(max_examples=10, deadline=None)
def test_each_number_is_within_the_formats_rounding(format: StoreFormat, seed: int) -> None:
    hidden = states(seed)
    channels = channel_scales(hidden)
    codec = Codec(format, channels)
    back = codec.decode(codec.encode(hidden), torch.float64)
    for token in range(len(hidden)):
        largest = max(
            abs(float(hidden[token, 0, c])) / float(channels[0, c]) for c in range(hidden.shape[-1])
        )
        for c in range(hidden.shape[-1]):
            real, channel = float(hidden[token, 0, c]), float(channels[0, c])
            if format is StoreFormat.int8:  # half a step of the token's scale
                bound = 0.5 * largest / 127 * channel
            elif format is StoreFormat.int4:  # half a step of the group's, which is all of these 32 channels
                bound = 0.5 * largest / 7 * channel * (1 + 2**-7)  # its scale is rounded to bfloat16
            else:  # e4m3: half a unit in the last of 3 bits, 2^-10 below the normal numbers
                bound = max(abs(real) * 2**-4, largest / 448 * channel * 2**-10)
            assert abs(float(back[token, 0, c]) - real) <= bound * 1.001 + 1e-9


@pytest.mark.parametrize("format", LOSSES)
def test_small_channels_survive_beside_large_ones(format: StoreFormat) -> None:
    """Per-token scales alone would round most channels away."""
    hidden = states(1)[1:]
    alone, both = Codec(format, torch.ones(1, 32)), Codec(format, channel_scales(hidden))

    def median_error(codec: Codec) -> float:
        off = codec.decode(codec.encode(hidden), torch.float64) - hidden
        return float((off.norm(dim=0) / hidden.norm(dim=0)).median())

    assert median_error(both) < (0.2 if format is StoreFormat.int4 else 0.04)
    if format is StoreFormat.int8:
        assert median_error(alone) > 3 * median_error(both)


def test_a_massive_first_token_leaves_the_channel_to_the_others() -> None:
    hidden = states(2)
    codec = Codec(StoreFormat.int8, channel_scales(hidden))
    back = codec.decode(codec.encode(hidden), torch.float64)
    others = (back[1:] - hidden[1:]).norm(dim=0) / hidden[1:].norm(dim=0)
    assert float(others.max()) < 0.05


def test_exact_formats_keep_the_bits() -> None:
    hidden = states(3).float()
    assert torch.equal(Codec(StoreFormat.fp32).decode(Encoded(hidden, None), torch.float32), hidden)
    small = hidden.bfloat16()
    codec = Codec(StoreFormat.bf16)
    assert torch.equal(codec.decode(codec.encode(small), torch.bfloat16), small)


def test_zero_rows_stay_zero_and_bad_numbers_are_refused() -> None:
    hidden = states(4)
    codec = Codec(StoreFormat.int8, channel_scales(hidden))
    nothing = torch.zeros(2, 1, 32)
    assert torch.equal(codec.decode(codec.encode(nothing), torch.float32), nothing)
    hidden[5] = math.nan
    with pytest.raises(UserError, match="not finite"):
        channel_scales(hidden)


@given(hidden=st.sampled_from([2, 6, 32, 64, 96]), seed=st.integers(0, 99))
def test_int4_is_two_numbers_a_byte_in_order(hidden: int, seed: int) -> None:
    """Numbers that are whole steps of a scale of 1 come back as they are, whatever the width."""
    steps = torch.randint(-7, 8, (3, 2, hidden), generator=torch.Generator().manual_seed(seed)).float()
    steps[..., 0::2] = 7.0  # of every group, so that its scale is 1
    codec = Codec(StoreFormat.int4, torch.ones(2, hidden))
    stored = codec.encode(steps)
    assert stored.values.shape == (3, 2, hidden // 2) and stored.values.dtype == torch.uint8
    assert torch.equal(codec.decode(stored, torch.float32), steps)
    size = stored.values.nbytes + (0 if stored.scales is None else stored.scales.nbytes)
    assert size == 6 * bytes_of(StoreFormat.int4, hidden)


def test_three_layers_in_four_bits_are_a_quarter_of_the_reference() -> None:
    size = 3 * bytes_of(StoreFormat.int4, 2560) + bytes_of(StoreFormat.int8, 2560)
    assert size / 30_720 <= 0.25


@pytest.mark.parametrize(("layers", "most"), [(5, 0.52), (3, 0.35)])
def test_bytes_a_token_against_six_bf16_vectors(layers: int, most: float) -> None:
    assert (layers + 1) * bytes_of(StoreFormat.int8, 2560) / 30_720 <= most


@given(mask=st.lists(st.booleans(), min_size=1, max_size=12), reach=st.none() | st.integers(1, 5))
def test_needed_positions_by_a_plain_loop(mask: list[bool], reach: int | None) -> None:
    expected = [
        any(mask[i] for i in range(j + 1, len(mask)) if reach is None or i - j <= reach)
        for j in range(len(mask))
    ]
    assert needed(np.array(mask), reach).tolist() == expected
    assert teachers(np.array(mask)).tolist() == [*mask[1:], False]


def test_spans_are_the_documents_without_padding() -> None:
    found = list(spans(3, [7, 8, 9, 1, 2, 0, 0], [0, 1, 1, 0, 1, 0, 0], [0, 0, 0, 1, 1, -1, -1]))
    assert [(one.row, one.start, one.end, one.tokens.tolist()) for one in found] == [
        (3, 0, 3, [7, 8, 9]),
        (3, 3, 5, [1, 2]),
    ]
    again = next(spans(0, torch.tensor([7, 8, 9]), torch.tensor([0, 1, 1]), torch.tensor([4, 4, 4])))
    assert again.key == found[0].key
    other = next(spans(0, [7, 8, 9], [0, 1, 0], [0, 0, 0]))
    assert other.key != again.key
