"""Which draft is exported and when training ends, spikes, the running mean, and the trace."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from deepspec.config.schema import KeepBest, StopWhen, TrainConfig
from deepspec.training import history
from deepspec.training.averaging import Average
from deepspec.training.checkpoint import Counters
from deepspec.training.health import SPIKE_WARMUP, explained, spike
from deepspec.training.loop import Run, train
from deepspec.training.selection import take_in
from tests.training.fakes import FakeConfig, FakeDraft, FakeTarget, rows
from tests.training.worker import SETTINGS, accelerator_for_tests, main


def evaluated(taus: list[float | None], losses: list[float], **settings: Any) -> Counters:
    counters = Counters()
    for step, (tau, loss) in enumerate(zip(taus, losses, strict=True), 1):
        counters.step = step
        take_in({"tau": tau, "held_out_loss": loss}, counters, TrainConfig(**settings))
        if counters.stopped:
            break
    return counters


def test_the_best_is_by_tau_else_by_loss() -> None:
    taus, losses = [1.5, 2.5, 2.0], [3.0, 2.0, 1.0]
    assert (evaluated(taus, losses).best or {})["step"] == 2
    assert (evaluated(taus, losses, keep_best=KeepBest.loss).best or {})["step"] == 3
    assert (evaluated([None] * 3, [3.0, 1.0, 2.0]).best or {})["step"] == 2
    assert evaluated(taus, losses, keep_best=KeepBest.none).best is None


def test_training_ends_at_the_tau_or_when_patience_does() -> None:
    reached = evaluated([1.5, 2.0, 2.5], [1.0] * 3, stop_when=StopWhen(tau=2.0))
    assert reached.step == 2
    assert "offline τ reached 2.000" in (reached.stopped or "")
    tired = evaluated([1.0, 2.0, 1.9, 2.0, 1.8], [1.0] * 5, patience=2)
    assert tired.step == 4
    assert "better than step 2" in (tired.stopped or "")
    assert evaluated([1.0, 2.0, 1.9, 2.1, 2.0], [1.0] * 5, patience=2).stopped is None


def test_with_decoding_only_a_decoded_tau_counts() -> None:
    config, counters = TrainConfig(decode_every=2, stop_when=StopWhen(tau=2.0)), Counters(step=1)
    assert not take_in({"tau": 9.0, "held_out_loss": 1.0}, counters, config)
    assert (counters.best, counters.stopped) == (None, None)
    counters.step = 2
    assert take_in({"tau": 9.0, "held_out_loss": 1.0, "decoded_tau": 2.5}, counters, config)
    assert "decoded τ reached 2.500" in (counters.stopped or "")


def test_a_run_stops_exports_its_best_and_is_not_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Decoding is a stand-in whose τ rises, falls and then reaches what was asked for."""
    answers = iter([1.5, 1.2, 1.4, 3.0])
    seen: list[dict[str, Tensor]] = []

    def decode(draft: Any) -> dict[str, Any]:
        seen.append({name: one.clone() for name, one in draft.state_dict().items()})
        torch.rand(7)  # must not disturb the training's own draws
        return {"decoded_tau": next(answers)}

    def run(out: Path, **settings: Any) -> Any:
        torch.manual_seed(1)
        config = TrainConfig(**{**SETTINGS, "decode_every": 3, "keep_best": KeepBest.tau, **settings})
        draft = FakeDraft(FakeConfig(dropout=0.2))
        one = Run(FakeTarget(), config, accelerator_for_tests(), out, decode=decode)
        return train(draft, rows(11), rows(5, seed=9), one)

    first = run(tmp_path / "a", max_steps=8)  # evaluated at 3, 6 and 8
    assert first.counters.best["step"] == 3
    assert all(torch.equal(first.weights[name], one) for name, one in seen[0].items())
    kept = sorted(path.name for path in (tmp_path / "a" / "checkpoints").iterdir())
    assert kept == ["best-3", "step-6", "step-8"]
    reached = run(tmp_path / "b", stop_when=StopWhen(tau=2.0))
    assert reached.counters.step == 3
    assert "decoded τ reached 3.000" in capsys.readouterr().out
    again = run(tmp_path / "b", stop_when=StopWhen(tau=2.0))
    assert again.counters == reached.counters


def test_a_loss_far_above_the_others_is_unusual_once() -> None:
    counters, draw = Counters(), torch.Generator().manual_seed(0)
    noise = torch.randn(200, generator=draw) * 0.1 + 3
    assert [spike(counters, float(one)) for one in noise] == [None] * 200
    assert spike(counters, 3.8) == pytest.approx(3.0, abs=0.1)
    assert spike(counters, 3.05) is None
    assert spike(Counters(), 9.0) is None
    level = [spike(counters, 6.0 + 0.1 * (step % 2)) for step in range(60)]
    assert level[0] is not None
    assert level[-1] is None  # a new level is not unusual for ever


def test_a_spike_names_the_rows_of_its_step(tmp_path: Path) -> None:
    class Jumps(FakeDraft):
        calls = 0

        def forward(self, batch: Any) -> Any:
            loss = super().forward(batch)
            self.calls += self.training
            if self.training and self.calls == SPIKE_WARMUP + 10:
                loss.sums["ce"] = loss.sums["ce"] * 1000
            return loss

    torch.manual_seed(1)
    config = TrainConfig(**{**SETTINGS, "epochs": 10.0, "eval_rows": 0})
    train(
        Jumps(FakeConfig()),
        rows(11),
        rows(5, seed=9),
        Run(FakeTarget(), config, accelerator_for_tests(), tmp_path),
    )
    (found,) = [one for one in history.read(tmp_path / "history.jsonl") if "spike" in one]
    assert found["step"] == SPIKE_WARMUP + 10
    assert len(found["spike"]["rows"]) == 1
    assert found["spike"]["loss"] > 100 * found["spike"]["expected"]


def test_the_mean_follows_its_formula_and_is_what_is_exported(tmp_path: Path) -> None:
    draft, accelerator = FakeDraft(FakeConfig()), accelerator_for_tests()
    average, expected = Average(draft, 0.5, accelerator), draft.fc.weight.detach().double()
    for step in range(6):
        with torch.no_grad():
            draft.fc.weight.add_(0.1 * (step + 1))
        average.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * draft.fc.weight.detach().double()
    torch.testing.assert_close(average.mean["fc.weight"].double(), expected)
    before = draft.fc.weight.detach().clone()
    with average.in_place():
        torch.testing.assert_close(draft.fc.weight.detach().double(), expected)
    assert torch.equal(draft.fc.weight, before)
    plain = main(tmp_path / "plain", {"epochs": 1.0})
    mean = main(tmp_path / "mean", {"epochs": 1.0, "ema": 0.9})
    assert any(not torch.equal(mean.weights[name], one) for name, one in plain.weights.items())
    last = load_file(tmp_path / "mean" / "checkpoints" / "step-11" / "draft" / "model.safetensors")
    assert all(torch.equal(last[name], one) for name, one in plain.weights.items())


def test_a_trace_of_some_steps_is_written(tmp_path: Path) -> None:
    main(tmp_path, {"epochs": 1.0, "profile": True, "eval_rows": 0})
    trace = json.loads((tmp_path / "profile" / "process-0.json").read_text(encoding="utf-8"))
    assert any("AdamW" in str(event.get("name")) for event in trace["traceEvents"])


def test_where_the_time_goes_is_logged(tmp_path: Path) -> None:
    main(tmp_path, {"epochs": 1.0})
    logs = [one for one in history.read(tmp_path / "history.jsonl") if "loss" in one]
    for one in logs:
        assert 0 < one["time"]["capture"] < 1
        assert 0 < one["time"]["data_wait"] < 1
        assert one["memory_gib"] > 0
        assert 0 <= one["supervised_per_second"] <= one["tokens_per_second"]


def test_an_error_in_a_step_names_its_rows() -> None:
    with pytest.raises(ZeroDivisionError) as failed, explained([7, 8], 4, TrainConfig()):
        raise ZeroDivisionError
    assert "step 5, over the rows [7, 8]" in failed.value.__notes__[0]
