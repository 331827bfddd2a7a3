"""Seconds of stages against plain loops over what they do."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspec.config.schema import HardwareConfig, TrainConfig
from deepspec.planning.speeds import Decoding, Training
from deepspec.planning.times import batch_seconds, training
from deepspec.planning.workload import Batch, Workload
from deepspec.simulation.costs import roofline
from deepspec.training.memory import GIB
from tests.planning.tiny import make_config

COUNTS = {"rows": 10, "tokens": 0, "supervised_tokens": 0, "documents": 0, "held_out_rows": 4, "held_out_tokens": 0,
          "held_out_prompts": 4}  # fmt: skip
WORK = Workload(True, None, None, 1.0, 1.0, COUNTS, 0, [])
SPEED = Training(capture=1.0, step=lambda count: 100.0 * count, forward=10_000.0, save=1e6)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6))
def test_a_batch_lasts_as_its_rows_leave(rows: list[tuple[int, int]]) -> None:
    speed = Decoding(prefill=lambda tokens: 0.5 * tokens, step=lambda count: 3.0 + count, round=lambda k: 0.0)
    seconds = sum(0.5 * prompt for prompt, _ in rows)
    left = [answer - 1 for _, answer in rows]  # the prefill gives each its first token
    while any(one > 0 for one in left):
        seconds += 3.0 + sum(one > 0 for one in left)
        left = [one - 1 for one in left]
    seen = batch_seconds(Batch([p for p, _ in rows], [a for _, a in rows]), speed)
    assert seen == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("keep", "captured"),
    [  # 2 epochs of 10 rows, evaluated at steps 4, 8 and 10 on 2 rows; a row takes a hundredth of a GiB
        (0.0, 20 + 3 * 2),
        (1.0, 10 + 2),
        (0.0625, 10 + 10 * 0.5 + 2 + 2 * 2 * 0.375),
    ],
)
def test_training_captures_what_memory_does_not_hold(keep: float, captured: float, tmp_path: Path) -> None:
    config = make_config(tmp_path, tmp_path, tmp_path)
    config.train = TrainConfig(
        epochs=2.0, batch_size=2, eval_every=4, eval_rows=2, checkpoint_every=5, keep_features_gib=keep
    )
    row = GIB // 100
    found = training(config, WORK, SPEED, 1, online=True, row_bytes=row)
    assert found.steps == 10 and found.step == 100.0
    assert found.captured == pytest.approx(captured, rel=1e-3)
    # 10 steps, 3 evaluations of one batch, 2 checkpoints and 3 best drafts, which are a third of one
    assert found.seconds == pytest.approx(1000 + captured + 30_000 + 3e6, rel=1e-3)
    assert training(config, WORK, SPEED, 1, online=False, row_bytes=row).captured == 0


def test_two_processes_share_the_rows(tmp_path: Path) -> None:
    config = make_config(tmp_path, tmp_path, tmp_path)
    config.train = replace(config.train, epochs=1.0, batch_size=1, eval_rows=0, keep_features_gib=0.0)
    found = training(config, WORK, SPEED, 2, online=True, row_bytes=1)
    assert (found.steps, found.captured) == (5, 5.0)


def test_a_roofline_is_the_slower_of_its_two_sides() -> None:
    box = HardwareConfig("box", flops=1e12, bandwidth=1e9, efficiency=0.5, launch_seconds=0.25, devices=2)
    assert roofline(box, 4e12, 1e9) == pytest.approx(4.25)
    assert roofline(box, 1e12, 6e9) == pytest.approx(3.25)
