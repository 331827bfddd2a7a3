"""The decoding benchmark runs with a tiny target and writes whole tables; its numbers are not looked at."""

import json
from pathlib import Path

import pytest
import torch

import benchmarks.decode as benchmark
from benchmarks.decode_parts import PARTS
from deepspec.decoding import cost
from deepspec.decoding.batch import Batch
from deepspec.drafts.eagle3 import Eagle3Options
from deepspec.drafts.options import StandaloneOptions
from deepspec.drafts.registry import new_draft
from tests.talking import QUESTIONS, talking_target

OURS = (
    "plain",
    "chain",
    "static tree",
    "dynamic tree",
    "n-gram",
    "standalone chain",
    "chain, threshold",
    "chain, hardware",
    "chain, fallback",
    "plain, exact",
    "chain, exact",
)
THEIRS = ("transformers generate", "transformers prompt lookup", "transformers assisted")


def test_every_way_has_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = talking_target()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cost, "REPEATS", 1)
    monkeypatch.setattr(benchmark, "load_target", lambda config: target)
    torch.manual_seed(1)
    for name, options in (("head", Eagle3Options(vocab_size=None)), ("small", StandaloneOptions())):
        new_draft(options, target, None).save_pretrained(tmp_path / name)
    prompts = tmp_path / "asked.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in QUESTIONS), encoding="utf-8")
    before = {name: vars(Batch)[name] for name in ("_propose", "_judge", "_remember", "step", "admit")}
    call = ["--draft", tmp_path / "head", "--assistant", tmp_path / "small", "--prompts", prompts]
    call += [
        "--max-prompts",
        4,
        "--new-tokens",
        10,
        "--dtypes",
        "float64",
        "--threads",
        1,
        "--batches",
        2,
        16,
    ]
    call += [
        "--k",
        2,
        "--tree",
        2,
        2,
        4,
        "--tree-parents",
        -1,
        -1,
        0,
        "--exact",
        "--schedules",
        "--out",
        tmp_path / "out" / "decode",
    ]
    benchmark.main([str(one) for one in call])
    assert {name: vars(Batch)[name] for name in before} == before
    assert "forward" not in vars(target)
    record = json.loads((tmp_path / "out" / "decode.json").read_text(encoding="utf-8"))
    ways = {way["way"]: way for way in record["ways"]}
    assert ways.keys() >= {*OURS, *THEIRS}
    assert all(way["equal_to"]["equal"] == way["equal_to"]["of"] == 4 for way in ways.values())
    drafted = [name for name in OURS if not name.startswith("plain") and not name.endswith("exact")]
    for name in drafted:
        assert ways[name]["ideal"] > 0 and ways[name]["efficiency"] > 0
    assert ways["plain"]["speedup_same"] == 1
    assert {line["rows"] for line in record["batches"]} == {2}
    assert all(line["efficiency"] > 0 for line in record["batches"] if line["way"] != "plain")
    for line in record["parts"]:
        assert sum(line[part] for part in PARTS) == pytest.approx(1, abs=0.01)
    shown = (tmp_path / "out" / "decode.md").read_text(encoding="utf-8")
    assert shown in capsys.readouterr().out
    assert all(shown.count(f"| {name} |") >= 1 for name in (*OURS, *THEIRS))
