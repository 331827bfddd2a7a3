"""The benchmark's straightforward EAGLE-3 learns from the same loss as the one it is compared with."""

import pytest

from benchmarks.train import TINY, measure


def test_both_implementations_have_the_same_loss() -> None:
    ours, plain = (measure("eagle3", how, {**TINY, "length": 48}, 2) for how in ("ours", "plain"))
    assert plain["last_loss"] == pytest.approx(ours["last_loss"], rel=1e-4)
    assert ours["last_loss"] != pytest.approx(6.24, rel=0.001)  # log(512), of a draft that knows nothing
