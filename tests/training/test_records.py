"""History, meters, trackers."""

import json
import sys
from pathlib import Path

import pytest
import torch

from deepspec.config.schema import Tracker
from deepspec.drafts.contract import DraftLoss
from deepspec.errors import UserError
from deepspec.training.history import History, read
from deepspec.training.meters import Meter
from deepspec.training.progress import Progress
from deepspec.training.trackers import new_tracker, scalars
from tests.training.worker import accelerator_for_tests


def test_history_is_on_disk_at_once_and_cut_to_the_resumed_step(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "history.jsonl"
    with History(path, 0) as first:
        for step in range(1, 6):
            first.add({"step": step, "loss": None})
            assert [record["step"] for record in read(path)] == list(range(1, step + 1))
    with path.open("a", encoding="utf-8") as file:
        file.write('{"step": 6, "lo')  # a kill in the middle of a write
    with History(path, 3) as second:
        second.add({"step": 4, "loss": 0.5})
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    with History(path, 0):
        assert path.read_text(encoding="utf-8") == ""


def test_meter_gives_means_over_all_that_was_seen() -> None:
    accelerator, meter = accelerator_for_tests(), Meter()
    valid = torch.tensor([[[True, True], [True, False], [False, False]]])
    for weight, right in ((1.0, True), (9.0, False)):
        meter.add(
            DraftLoss(
                sums={"a": torch.tensor(2.0 * weight), "b": torch.tensor(0.0)},
                weights={"a": torch.tensor(weight), "b": torch.tensor(0.0)},
                valid=valid,
                match=torch.full_like(valid, right),
                overlap=torch.full(valid.shape, 0.25 if right else float("nan")).where(valid & right, 0.75),
            ),
            tokens=3,
        )
    record = meter.over_all(accelerator).record({"a": 0.5, "b": 7.0})
    assert record["loss"] == pytest.approx(1.0)
    assert record["parts"] == {"a": 2.0, "b": None}
    assert record["accuracy"] == [0.5, 0.5]
    assert record["alpha"] == [0.5, 0.5]
    assert record["supervised"] == [4, 2]
    assert meter.tokens == 6
    empty = meter.cleared().record({"a": 0.5, "b": 7.0})
    assert (empty["loss"], empty["accuracy"]) == (None, [None, None])


def test_a_micro_batch_that_does_not_count_only_lays_out() -> None:
    meter = Meter()
    ones = torch.ones(1, 2, 3)
    part = {"a": torch.tensor(1.0)}
    loss = DraftLoss(sums=part, weights=part, valid=ones.bool(), match=ones.bool(), overlap=ones)
    meter.add(loss, tokens=5, counted=False)
    assert meter == Meter({"a": 0.0}, {"a": 0.0}, [0.0] * 3, [0.0] * 3, [0.0] * 3, 0.0)


def test_records_become_flat_numbers() -> None:
    record = {"step": 3, "loss": 1.5, "parts": {"ce": 1.0}, "accuracy": [0.5, None], "tau": None}
    assert scalars(record, "train") == {"train/loss": 1.5, "train/parts/ce": 1.0, "train/accuracy_1": 0.5}


def test_tensorboard_has_what_was_logged(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = new_tracker(Tracker.tensorboard, "x", {}, tmp_path)
    tracker.log(1, {"train/loss": 2.0})
    tracker.log(2, {"train/loss": 1.0})
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 2.0), (2, 1.0)]


def test_wandb_without_a_server_records_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    tracker = new_tracker(Tracker.wandb, "x", {"a": 1}, tmp_path, said.append)
    tracker.log(1, {"train/loss": 2.0})
    tracker.close()
    assert "did not answer" in said[0]
    assert "wandb sync" in said[1]
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


def test_trackio_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(UserError, match=r"pip install trackio"):
        new_tracker(Tracker.trackio, "x", {}, tmp_path)


def test_no_tracker_makes_no_file(tmp_path: Path) -> None:
    tracker = new_tracker(Tracker.none, "x", {}, tmp_path)
    tracker.log(1, {"a": 1.0})
    tracker.close()
    assert not list(tmp_path.iterdir())


def test_progress_shows_tau_only_where_it_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(2, 0, shown=True)
    progress.show({"step": 1, "tau": None, "tau_reason": "drawn at temperature 0.6"})
    progress.close()
    assert "τ" not in capsys.readouterr().err
    progress = Progress(2, 0, shown=True)
    progress.show({"step": 1, "tau": 2.5})
    progress.close()
    assert "τ=2.50" in capsys.readouterr().err
