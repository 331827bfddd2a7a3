"""Several requests at once: the same answers, and rates that are what a clock and a counter say."""

from pathlib import Path

import pytest

from deepspec import evaluate as stage
from deepspec.config.schema import Config
from deepspec.decoding.request import Result
from deepspec.errors import UserError
from deepspec.evaluation.batches import batched
from deepspec.evaluation.result import load_result


def result(tokens: int, seconds: float, first: int = 0) -> Result:
    return Result("", list(range(first, first + tokens)), "length", 0.5, seconds)


def test_rates_of_a_batch() -> None:
    plain = [(4.0, [result(11, 2.0), result(21, 2.0), result(1, 0.0)])]
    fast = [(2.0, [result(11, 1.0), result(21, 1.0, first=3), result(1, 0.0)])]
    found = batched(3, plain, fast)
    assert (found.plain.total, found.speculative.total, found.speedup) == (33 / 4, 33 / 2, 2.0)
    assert (found.plain.stream, found.speculative.stream) == (7.5, 15.0)  # medians of 5 and 10, of 10 and 20
    assert (found.equal, found.answers) == (2, 3)
    assert batched(1, [(1.0, [result(1, 0.0)])], [(1.0, [result(1, 0.0)])]).plain.stream is None


def test_batches_are_measured_where_asked_for(config: Config, trained: Path) -> None:
    config.evaluate.baselines, config.evaluate.sweep = False, []
    config.evaluate.batch_sizes, config.evaluate.repeats = [1, 3], 2
    report = stage.run(config)
    found = load_result(trained / "evaluation" / "result.json")
    assert [(row.size, row.answers, row.equal) for row in found.batches] == [(1, 8, 8), (3, 8, 8)]
    assert all(row.plain.total > 0 and row.speculative.total > 0 for row in found.batches)
    assert "Several requests at once" in report.read_text(encoding="utf-8")
    assert "Several requests at once" in report.with_suffix(".md").read_text(encoding="utf-8")
    config.evaluate.batch_sizes = [0]
    with pytest.raises(UserError, match=r"evaluate\.batch_sizes"):
        stage.run(config)
