"""Torch's number of threads is the one with which decoding was fastest, and nobody else's afterwards."""

from collections.abc import Iterator

import pytest
import torch

from deepspec.decoding.request import Request, Result
from deepspec.evaluation.threads import candidates, threads_as_they_were, try_threads


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    with threads_as_they_were():
        yield


def result(seconds: float) -> Result:
    return Result("x", [5, 6, 7], "length", 0.0, seconds)


@pytest.mark.parametrize("best", [1, 2, 4])
def test_the_fastest_is_set_although_one_decoding_was_disturbed(best: int) -> None:
    seen: list[int] = []

    def decode(request: Request) -> Result:
        seen.append(torch.get_num_threads())
        disturbed = seen.count(best) == 3 and seen[-1] == best
        return result(9.0 if disturbed else 1.0 if seen[-1] == best else 2.0)

    tried = try_threads(decode, Request([1], 3), [4, 2, 1])
    assert torch.get_num_threads() == best
    assert {one.threads: one.tokens_per_second for one in tried} == {
        number: 2.0 if number == best else 1.0 for number in (4, 2, 1)
    }
    assert [one.threads for one in tried if one.chosen] == [best]
    assert {seen.count(number) for number in (4, 2, 1)} == {len(seen) // 3}
    assert (
        len({tuple(seen[i : i + 3]) for i in range(0, len(seen), 3)}) == 3
    )  # they take turns at going first


def test_one_number_is_no_choice() -> None:
    def decode(request: Request) -> Result:
        raise AssertionError("nothing is to be timed")

    before = torch.get_num_threads()
    assert try_threads(decode, Request([1], 3), candidates(1)) == []
    assert torch.get_num_threads() == before


def test_others_find_the_number_unchanged() -> None:
    before = torch.get_num_threads()
    with pytest.raises(KeyError), threads_as_they_were():
        torch.set_num_threads(before + 1)
        raise KeyError
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("most", "numbers"), [(1, [1]), (2, [2, 1]), (3, [3, 1]), (4, [4, 2, 1]), (16, [16, 8, 4])]
)
def test_all_half_and_a_quarter_are_tried(most: int, numbers: list[int]) -> None:
    assert candidates(most) == numbers
