"""Muon beside AdamW in one optimiser, against the two of torch run apart."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig

from deepspec.config.schema import Optimiser, Parallel, TrainConfig
from deepspec.errors import UserError
from deepspec.training.optimiser import new_optimiser
from deepspec.training.parallel import plugins
from tests.training.test_loop import equal, main, weights

MUON = TrainConfig(optimizer=Optimiser.muon, learning_rate=0.02, weight_decay=0.1, eps=1e-6)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = PreTrainedConfig(vocab_size=11)
        self.table, self.inner = nn.Embedding(11, 6), nn.Linear(6, 8)
        self.out = nn.Linear(8, 11, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.inner(self.table(tokens)))).logsumexp(-1).square().mean()


def small() -> Small:
    torch.manual_seed(3)
    return Small()


def steps(model: Small, optimisers: list[torch.optim.Optimizer], count: int) -> None:
    for step in range(count):
        for one in optimisers:
            one.zero_grad()
        model(torch.tensor([[step % 11, 4, 7]])).backward()
        for one in optimisers:
            one.step()


def apart(model: Small) -> list[torch.optim.Optimizer]:
    shared = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-6}
    tables = [model.table.weight, model.out.weight]
    return [
        torch.optim.Muon([model.inner.weight], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(tables, weight_decay=0.1, **shared),
        torch.optim.AdamW([model.inner.bias], weight_decay=0.0, **shared),
    ]


def test_one_optimiser_does_what_torchs_two_do_apart() -> None:
    model, other = small(), small()
    steps(model, [new_optimiser(model, MUON)], 5)
    steps(other, apart(other), 5)
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0, msg=name)


def test_a_saved_state_goes_on_as_if_never_saved() -> None:
    model = small()
    optimiser = new_optimiser(model, MUON)
    steps(model, [optimiser], 3)
    other = copy.deepcopy(model)
    loaded = new_optimiser(other, MUON)
    loaded.load_state_dict(copy.deepcopy(optimiser.state_dict()))
    steps(model, [optimiser], 3)
    steps(other, [loaded], 3)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_the_rate_of_every_group_counts() -> None:
    model = small()
    before = copy.deepcopy(model.state_dict())
    optimiser = new_optimiser(model, MUON)
    for group in optimiser.param_groups:
        group["lr"] = 0.0
    steps(model, [optimiser], 2)
    assert all(torch.equal(before[name], one) for name, one in model.state_dict().items())


def test_stopped_and_resumed_is_never_stopped(tmp_path: Path) -> None:
    options = {
        "epochs": 1.0,
        "batch_size": 2,
        "dtype": "float32",
        "optimizer": "muon",
        "checkpoint_every": 100,
    }
    main(tmp_path / "whole", options)
    with pytest.raises(SystemExit):
        main(tmp_path / "cut", {**options, "signal_at": {"step": 3, "signal": 15}})
    main(tmp_path / "cut", options)
    assert equal(weights(tmp_path / "whole"), weights(tmp_path / "cut"))


@pytest.mark.parametrize("kind", [Parallel.deepspeed_zero1, Parallel.fsdp2])
def test_sharded_matrices_are_refused(kind: Parallel) -> None:
    with pytest.raises(UserError, match=rf"train\.optimizer=muon .*{kind.value}.*train\.parallel=ddp"):
        plugins(kind, MUON)


def test_a_draft_without_matrices_is_refused() -> None:
    model = nn.Module()
    model.scale = nn.Parameter(torch.ones(3))
    with pytest.raises(UserError, match=r"no matrix.*adamw"):
        new_optimiser(model, MUON)
