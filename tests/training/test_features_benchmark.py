"""The benchmark of feature stores runs, and its sizes are those that are claimed."""

from pathlib import Path

import pytest

from benchmarks.features import _documents, _tiny, sizes


def test_sizes_are_within_the_claims(tmp_path: Path) -> None:
    like_for_like, three, four_bits, needed = (one["of_reference"] for one in sizes(tmp_path, 6).values())
    assert 0.5 < like_for_like <= 0.52
    assert 0.33 < three <= 0.35
    assert 0.2 < four_bits <= 0.25
    assert needed < three


def test_documents_are_taken_apart() -> None:
    _, _, held_out, _ = _tiny()
    found = _documents(held_out)
    assert sum(len(one["tokens"]) for one in found) == sum(len(row["tokens"]) for row in held_out)
    assert all(one["positions"].tolist() == list(range(len(one["tokens"]))) for one in found)
    assert pytest.approx(2 * len(held_out)) == len(found)
