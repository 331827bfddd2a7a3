"""The augmentation benchmark compares the same prompts, variant by variant, and asks each stage for what it says."""

import json
from pathlib import Path

import pytest

from benchmarks import augmentation
from deepspec.evaluation.compare import compare
from deepspec.evaluation.result import save_result
from tests.reporting.synthetic import make_records, make_result


def test_variants_are_set_beside_the_plain_one_prompt_by_prompt() -> None:
    none, better = make_result(make_records(24)), make_result(make_records(24, skill=1.3))
    rows = augmentation.beside({"none": none, "typos": better})
    expected = compare(none, better)[0].ratio
    assert rows[1]["ratio"]["value"] == pytest.approx(expected.value)
    assert expected.value is not None and expected.value > 1
    shown = augmentation.markdown(rows)
    assert f"{expected.value:.3f}" in shown and "it helps" in shown
    assert "no difference can be told" in augmentation.markdown(
        augmentation.beside({"none": none, "all": none})
    )


def test_results_of_other_prompts_are_refused() -> None:
    none, other = make_result(make_records(24)), make_result(make_records(20))
    with pytest.raises(SystemExit, match="typos cannot be compared: other prompts"):
        augmentation.beside({"none": none, "typos": other})


def test_each_stage_is_asked_once_with_its_augmentation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[tuple[str, str, str]] = []

    def run(stage: str, recipe: str, out: Path, settings: list[str]) -> dict[str, float]:
        augment = next(one for one in settings if one.startswith("data.augment="))
        called.append((stage, out.name, augment))
        if stage == "evaluate":
            (out / "evaluation").mkdir(parents=True)
            save_result(make_result(make_records(9)), out / "evaluation" / "result.json")
        return {}

    monkeypatch.setattr(augmentation, "run_stage", run)
    given = ["--prompts", "p.jsonl", "--kinds", "typos", "system", "--out", str(tmp_path)]
    augmentation.main(given)
    assert [one[:2] for one in called] == [
        (stage, variant)
        for variant in ("none", "typos", "system", "all")
        for stage in ("prepare", "train", "evaluate")
    ]
    assert {augment.count("name:") for _, variant, augment in called if variant == "all"} == {2}
    called.clear()
    augmentation.main(given)
    assert called == []  # what is measured is not measured again
    found = json.loads((tmp_path / "augmentation.json").read_text(encoding="utf-8"))["variants"]
    assert [row["variant"] for row in found] == ["none", "typos", "system", "all"]
