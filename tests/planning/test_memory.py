"""Memory of learning against the tensors of a real step, of a forward against what it makes; remedies help."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from deepspec.config.schema import Config, Optimiser, Parallel, Precision
from deepspec.drafts.registry import new_draft
from deepspec.planning.memory import Situation, forward_bytes, learning_bytes, remedies, stage_memory
from deepspec.planning.sizes import draft_sizes, target_sizes
from deepspec.planning.training_work import Alive
from deepspec.target import Target
from deepspec.target.outline import Outline
from deepspec.training.optimiser import new_optimiser
from tests.models import tiny_model
from tests.planning.test_training_work import SHAPE, row
from tests.planning.tiny import make_config


@pytest.fixture
def config(tmp_path: Path) -> Config:
    made = make_config(tmp_path, tmp_path / "none.jsonl", tmp_path / "run")
    return replace(made, draft=replace(made.draft, vocab_size=80))


@pytest.mark.parametrize("kind", [Optimiser.adamw, Optimiser.sgd])
def test_learning_takes_what_its_tensors_take(kind: Optimiser, config: Config) -> None:
    config.train.optimizer, config.train.parallel = kind, Parallel.single
    outline = Outline(tiny_model("llama").config, None, "tiny", torch.float32, False)
    draft = new_draft(config.draft, Target(tiny_model("llama"), None, "tiny"), torch.arange(80)).float()
    optimiser = new_optimiser(draft, config.train)
    for one in draft.parameters():
        one.grad = torch.ones_like(one)
    optimiser.step()
    seen = learning_bytes(config, draft_sizes(config.draft, outline), Precision.no, 1)
    weights = sum(one.nbytes for one in draft.parameters())
    states = [
        t for state in optimiser.state.values() for t in state.values() if torch.is_tensor(t) and t.dim()
    ]
    assert seen == {"draft": weights, "gradients": weights, "optimiser": sum(one.nbytes for one in states)}


@pytest.mark.parametrize(
    ("kind", "low", "bytes_each"),
    [  # of one parameter on one of 8 processes: (weights, gradients, moments), counted by hand
        (Parallel.single, False, (4, 4, 8)),
        (Parallel.ddp, False, (4, 8, 8)),
        (Parallel.ddp, True, (6, 8, 8)),
        (Parallel.deepspeed_zero1, True, (2.5, 2, 1)),
        (Parallel.deepspeed_zero2, True, (2.5, 0.25, 1)),
        (Parallel.deepspeed_zero3, True, (0.75, 0.25, 1)),
        (Parallel.fsdp2, True, (2.5, 0.5, 1)),
    ],
)
def test_every_kind_of_parallelism_holds_its_share(
    kind: Parallel, low: bool, bytes_each: tuple[float, ...], config: Config
) -> None:
    config.train.parallel = kind
    sizes = draft_sizes(config.draft, Outline(SHAPE, None, "x", torch.float32, False))
    precision = Precision.bf16 if low else Precision.no
    seen = learning_bytes(config, sizes, precision, 1 if kind is Parallel.single else 8)
    expected = [each * sizes.parameters for each in bytes_each]
    assert [seen["draft"], seen["gradients"], seen["optimiser"]] == pytest.approx(expected, abs=2)


def test_a_forward_takes_about_what_it_makes() -> None:
    target = Target(transformers.LlamaForCausalLM(SHAPE), None, "x")
    columns = {name: column.repeat(2, 1) for name, column in row(256).items()}
    layers = [1, 2]
    with Alive() as alive:
        target.capture(columns["tokens"], columns["positions"], columns["documents"], layers)
    sizes = target_sizes(Outline(SHAPE, None, "x", torch.float32, False))
    assert forward_bytes(sizes, 2, 256, len(layers) + 1) == pytest.approx(alive.most, rel=0.4)


def situation(config: Config) -> Situation:
    outline = Outline(SHAPE, None, "x", getattr(torch, config.target.dtype.value), False)
    return Situation(
        target=target_sizes(outline), draft=draft_sizes(config.draft, outline), step_bytes=1e8, longest=100,
        store=False, precision=Precision.no, rows=100, devices=2, on_cpu=False,
    )  # fmt: skip


@pytest.mark.parametrize("stage", ["prepare", "train"])
def test_every_remedy_takes_less(stage: str, config: Config) -> None:
    config.data.answers, config.data.max_length = config.data.answers.regenerated, 2048
    config.train.batch_size, config.train.parallel = 4, Parallel.ddp
    before = sum(stage_memory(config, situation(config))[stage].values())
    tried = list(remedies(stage, config, 2))
    assert len(tried) > 3
    for words, changed in tried:
        at = replace(situation(changed), store=changed.features.source.value == "store")
        if "checkpointing" in words:  # how much less is measured, see test_training_work.py
            at = replace(at, step_bytes=at.step_bytes / 2)
        assert sum(stage_memory(changed, at)[stage].values()) < before, words


def test_a_smaller_batch_keeps_the_rows_a_step(config: Config) -> None:
    config.train.batch_size, config.train.accumulation = 4, 3
    words, changed = next(remedies("train", config, 1))
    assert words == "train.batch_size=2 train.accumulation=6"
    assert changed.train.batch_size * changed.train.accumulation == 12
