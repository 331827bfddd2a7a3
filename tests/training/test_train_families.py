"""Every family of drafts through `deepspec.train.run` on a small real target, and back from its folder."""

import json
from pathlib import Path

import pytest

from deepspec import train as stage
from deepspec.config.schema import Config
from deepspec.decoding import Engine, Request
from deepspec.drafts.options import (
    DFlashOptions,
    DSparkOptions,
    Eagle3Options,
    EagleOptions,
    MedusaOptions,
    MtpOptions,
    PEagleOptions,
    StandaloneOptions,
)
from deepspec.target import load_target
from deepspec.training import history
from deepspec.training.saved_draft import load_draft
from tests.training.test_train_stage import VOCAB_SIZE, change, config, model

__all__ = ["config", "model"]  # fixtures
OPTIONS = {
    "eagle": EagleOptions(ttt_steps=2, confidence=True),
    "eagle3": Eagle3Options(ttt_steps=3, head="frozen", step_weights="dpace", confidence=True),
    "mtp": MtpOptions(ttt_steps=2, step_weights="survival"),
    "standalone": StandaloneOptions(layers=2, confidence=True),
    "dflash": DFlashOptions(layers=1, block_tokens=3, anchors=6, step_weights="survival"),
    "dspark": DSparkOptions(layers=1, block_tokens=3, anchors=6, rank=8, sequential="rnn"),
    "medusa": MedusaOptions(heads=3, confidence=True),
    "peagle": PEagleOptions(ttt_steps=3, confidence=True),
}


@pytest.mark.parametrize("family", sorted(OPTIONS))
def test_a_family_trains_and_decodes(family: str, config: Config) -> None:
    options = OPTIONS[family]
    options.vocab_size = VOCAB_SIZE
    config.draft = options
    folder = stage.run(change(config, train={"epochs": 8.0, "learning_rate": 3e-3, "loss": {"ce": 0.1}}))
    losses = [one["loss"] for one in history.read(Path(config.out) / "history.jsonl") if "loss" in one]
    assert losses[-1] < losses[0]
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["training"]["evaluation"]["tau"] >= 1
    assert manifest["training"]["skipped"] == 0
    draft, target = load_draft(folder), load_target(config.target)
    requests = [Request([5, 9, 30], 12), Request([7, 8, 9, 10, 11], 9)]
    plain = Engine(target, max_batch_size=2).generate(requests)
    drafted = Engine(target, draft, k=3, max_batch_size=2).generate(requests)
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]


def test_draft_steps_grow_over_the_ramp(config: Config) -> None:
    config.draft = Eagle3Options(ttt_steps=3, ttt_ramp=0.5, vocab_size=VOCAB_SIZE)
    stage.run(change(config, train={"max_steps": 12, "epochs": 99.0, "log_every": 1, "eval_every": 2}))
    records = history.read(Path(config.out) / "history.jsonl")
    steps = [len(one["accuracy"]) for one in records if "loss" in one]
    assert steps == [1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3, 3]
    evaluations = [one for one in records if "tau" in one]
    assert [len(one["held_out_accuracy"]) for one in evaluations] == [3] * 6  # an evaluation is no part of it
