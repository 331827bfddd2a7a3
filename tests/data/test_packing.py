"""Packing loses nothing, doubles nothing and wastes little."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspec.data.conversation import Row
from deepspec.data.packing import assign_rows, pack

DOCUMENTS = st.lists(st.lists(st.integers(1, 10**6), min_size=1, max_size=16), max_size=40)


@given(DOCUMENTS)
def test_every_token_appears_exactly_once_with_its_mask_and_position(documents: list[list[int]]) -> None:
    masks = [[token % 2 for token in document] for document in documents]
    rows = [Row(*pair) for pair in zip(documents, masks, strict=True)]
    found = []
    lengths = [len(document) for document in documents]
    parts = list(pack(lengths, rows.__getitem__, 16, pad=0, batch=3))
    for packed, row in [(part, row) for part in parts for row in range(len(part.tokens))]:
        numbers = packed.documents[row]
        inside = numbers >= 0
        assert not packed.tokens[row][~inside].any() and not packed.loss_mask[row][~inside].any()
        assert not packed.positions[row][~inside].any()
        for number in range(numbers.max() + 1):
            own = numbers == number
            start = int(own.argmax())
            assert own[start : start + own.sum()].all()
            assert packed.positions[row][own].tolist() == list(range(own.sum()))
            found.append((packed.tokens[row][own].tolist(), packed.loss_mask[row][own].tolist()))
    assert sorted(found) == sorted(zip(documents, masks, strict=True))


@given(st.lists(st.integers(1, 100), min_size=1, max_size=80))
def test_no_two_rows_would_fit_into_one(lengths: list[int]) -> None:
    rows = assign_rows(lengths, 100)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    fill = sorted(sum(lengths[index] for index in row) for row in rows)
    assert fill[-1] <= 100
    assert len(fill) == 1 or fill[0] + fill[1] > 100


def test_known_best_fit_decreasing() -> None:
    assert assign_rows([4, 7, 3, 6, 2, 1], 10) == [[1, 2], [3, 0], [4, 5]]
    assert assign_rows([], 10) == []
    with pytest.raises(ValueError, match="document 1 has 11 tokens"):
        assign_rows([1, 11], 10)
