"""The decoding benchmark runs on a tiny run's folder and prints whole tables; its numbers are not looked at."""

import importlib.util
from pathlib import Path

import pytest

from deepspec.decoding import cost
from deepspec.decoding.batch import Batch
from tests.config.processes import ROOT
from tests.talking import talking_run, talking_target


def test_every_way_has_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("decode_benchmark", ROOT / "benchmarks" / "decode.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cost, "REPEATS", 1)
    config = talking_run(tmp_path, monkeypatch, k=2, max_new_tokens=12)
    config.evaluate.max_prompts = 4
    before = {name: vars(Batch)[name] for name in ("_propose", "_judge", "_remember", "step", "admit")}
    benchmark.run(config)
    assert {name: vars(Batch)[name] for name in before} == before
    assert "forward" not in vars(talking_target())
    shown = capsys.readouterr().out
    rows = [line.split(" | ") for line in shown.splitlines() if line.startswith("| ")]
    ways = [
        "plain decoding",
        "n-gram",
        "fixed K",
        "confidence threshold",
        "hardware-aware",
        "fallback",
        "dynamic tree",
    ]
    named = [row[0].removeprefix("| ") for row in rows]
    assert all(named.count(way) == 2 for way in ways)  # speeds, and where the time goes
    assert named.count("transformers generate") == named.count("transformers prompt lookup") == 1
    assert "left out: transformers assisted" in shown
    assert [row[0] for row in rows if row[0] in ("| 1", "| 4")] == ["| 1", "| 4"]
    (fixed,) = [row for row in rows if row[0] == "| fixed K" and len(row) == 10]
    assert float(fixed[8]) > 0 and float(fixed[9].rstrip(" |")) > 0  # ideal and efficiency
    shares = [
        float(part.rstrip("% |"))
        for row in rows
        if row[0] == "| fixed K" and len(row) == 7
        for part in row[2:]
    ]
    assert sum(shares) == pytest.approx(100, abs=0.5)
