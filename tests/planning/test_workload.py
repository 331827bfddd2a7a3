"""Data foretold from a sample, against the data; lengths that are guessed, against sums and counting."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepspec import prepare
from deepspec.config.schema import Answers
from deepspec.data import gather
from deepspec.planning import workload
from deepspec.planning.workload import drawn_length, facts_of, hazard_of, mean_length, sampled
from deepspec.target import load_target
from tests.planning.tiny import make_config, save_prompts


@pytest.mark.parametrize("hazard", [0.0, 0.004, 0.1, 0.9])
def test_a_mean_length_is_that_of_its_lengths(hazard: float) -> None:
    longest = 40
    chances = [(1 - hazard) ** (n - 1) * hazard for n in range(1, longest)]
    by_hand = sum(n * p for n, p in enumerate(chances, 1)) + longest * (1 - sum(chances))
    assert mean_length(hazard, longest) == pytest.approx(by_hand)
    assert hazard_of(mean_length(hazard, longest), longest) == pytest.approx(hazard, abs=1e-6)
    if hazard:
        uniforms = (np.arange(20_000) + 0.5) / 20_000
        lengths = np.minimum([drawn_length(u, hazard) for u in uniforms], longest)
        assert lengths.mean() == pytest.approx(by_hand, rel=0.01)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data,
        lambda data: replace(data, answers=Answers.mixed, regenerated_prompts=60),
        lambda data: replace(data, answers=Answers.regenerated),
    ],
    ids=["given", "mixed", "regenerated"],
)
@pytest.mark.parametrize("sample", [1000, 80], ids=["whole", "sample"])
def test_a_sample_foretells_the_data(
    change: Callable[[Any], Any], sample: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload, "SAMPLE", sample)
    config = make_config(
        model, save_prompts(tmp_path / "prompts.jsonl", 240), tmp_path / "run", held_out_prompts=24
    )
    config.data = change(config.data)
    facts = facts_of(load_target(config.target))
    seen = sampled(gather(config.data), config.data, facts, 280, 0.0, tmp_path / "sample")
    folder = prepare.run(config)
    counts = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["counts"]
    real = {name: counts["train"][name] for name in ("rows", "tokens", "supervised_tokens", "documents")}
    rel = 0.02 if sample == 1000 and config.data.answers is Answers.given else 0.1
    assert {name: seen.counts[name] for name in real} == pytest.approx(real, rel=rel)
    assert seen.counts["held_out_prompts"] == counts["held_out_prompts"] == 24
    written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert seen.bytes == pytest.approx(written, rel=0.1)
    asked = seen.scale * sum(len(batch.prompts) for batch in seen.batches)
    assert asked == pytest.approx(counts["train"]["origin"].get("regenerated", 0) + 24, rel=0.15)
