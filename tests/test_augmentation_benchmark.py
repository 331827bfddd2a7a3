"""The augmentation benchmark compares prompt by prompt, says what does not help, and goes on where it was stopped."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import augmentation
from benchmarks.augmentation_tables import compared, markdown
from deepspec.evaluation.result import save_result
from tests.reporting.synthetic import make_records, make_result

BASE = {f"p{n}": [20 + 7 * n % 31, 12 + n % 5] for n in range(20)}


def head(name: str, prompts: dict[str, list[int]]) -> dict[str, Any]:
    common = {
        "target": "tiny",
        "recipe": "r",
        "steps": 3,
        "seeds": 1,
        "k": 5,
        "max_new_tokens": 16,
        "added": 4,
    }
    return {"name": name, "entry": None, "prompts": prompts, **common}


def shifted(by: int) -> dict[str, list[int]]:
    """So many tokens more in every round of every prompt: τ differs by just that, whatever is drawn."""
    return {name: [tokens + by * rounds, rounds] for name, (tokens, rounds) in BASE.items()}


def test_differences_are_paired_and_judged() -> None:
    heads = [head("none", BASE), head("same", BASE), head("more", shifted(1)), head("less", shifted(-1))]
    none, *others = compared(heads)
    tau = sum(t for t, _ in BASE.values()) / sum(n for _, n in BASE.values())
    assert none["tau"]["value"] == pytest.approx(tau) and "difference" not in none
    assert none["tau"]["high"] - none["tau"]["low"] > 0.1  # an unpaired difference would be as wide
    for one, expected in zip(others, (0.0, 1.0, -1.0), strict=True):
        assert [one["difference"][key] for key in ("value", "low", "high")] == pytest.approx([expected] * 3)
    lines = markdown([none, *others]).splitlines()
    assert [line.split("|")[-2].strip() for line in lines if line.startswith("|")][3:] == [
        "not seen to help",
        "helps",
        "harms",
    ]
    assert f"| none | 4 | {tau:.2f} (" in "\n".join(lines)


def test_few_prompts_give_no_verdict_and_other_prompts_no_difference() -> None:
    few = dict(list(BASE.items())[:4])
    assert "no verdict" in markdown(compared([head("none", few), head("same", few)]))
    with pytest.raises(SystemExit, match="typos was measured on other prompts than none"):
        compared([head("none", BASE), head("typos", few)])


@pytest.mark.parametrize("wrong", ["nonsense", "{name: typos, probability: 2}", "[typos]"])
def test_an_augmentation_that_does_not_exist_is_refused_before_anything_runs(
    tmp_path: Path, wrong: str
) -> None:
    with pytest.raises(SystemExit, match="--with"):
        augmentation.main(["--with", wrong, "--out", str(tmp_path)])


def stages(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, list[str]]]:
    """Stages that only write what the benchmark reads; returns what was called."""
    called: list[tuple[str, str, list[str]]] = []

    def run(stage: str, recipe: str, out: Path, settings: list[str]) -> dict[str, float]:
        called.append((stage, out.name, list(settings)))
        if stage == "prepare":
            (out / "data").mkdir(parents=True, exist_ok=True)
            noted = {"prompts added by typos": 7, "secrets redacted": 5} if out.name != "none" else {}
            (out / "data" / "manifest.json").write_text(json.dumps({"counts": {"noted": noted}}))
        if stage == "evaluate":
            (out / "evaluation").mkdir()
            save_result(make_result(make_records(9)), out / "evaluation" / "result.json")
        return {}

    monkeypatch.setattr(augmentation, "run_stage", run)
    return called


def test_every_head_has_its_stages_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = stages(monkeypatch)
    words = ["--with", "{name: typos, probability: 0.5}", "--seeds", "2", "--out", str(tmp_path)]
    augmentation.main(words)
    assert [(stage, name) for stage, name, _ in called] == [
        (stage, name)
        for name in ("none", "none-seed1", "typos_probability0.5", "typos_probability0.5-seed1")
        for stage in ("prepare", "train", "evaluate")
    ]
    assert "data.augment=[]" in called[0][2] and "train.seed=1" in called[3][2]
    assert 'data.augment=[{name: "typos",probability: 0.5}]' in called[6][2]
    rows = json.loads((tmp_path / "augmentation.json").read_text())["augmentations"]
    assert [row["added"] for row in rows] == [0, 7]
    tau = make_result(make_records(9)).summary.tau.value
    assert rows[1]["tau"]["value"] == pytest.approx(tau) and rows[1]["difference"]["value"] == 0
    augmentation.main(words)
    assert len(called) == 12  # what is measured is not measured again
    with pytest.raises(SystemExit, match="steps was 300, is 5"):
        augmentation.main([*words, "--steps", "5"])
