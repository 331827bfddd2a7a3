"""DDP, ZeRO-1, 2, 3 and FSDP2 in two processes (gloo) against one process on the same batches.

11 rows × 4 epochs in steps of 4 rows: the epochs' ends fall inside steps. With the fake draft and 13 rows the
last step has one row, for one process; the other has none.

DeepSpeed compiles a small operator at first use (30 to 45 s) and keeps it. All kinds and both optimisers:
`pytest -m slow tests/training/test_parallel.py`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deepspec.training import history
from tests.training.test_processes import torchrun
from tests.training.worker import main

SPLIT = {"batch_size": 1, "accumulation": 2}
SGD: dict[str, Any] = {"dtype": "float32", "epochs": 4.0, "optimizer": "sgd"}
ADAMW: dict[str, Any] = {**SGD, "optimizer": "adamw", "eps": 1e-4}  # a smaller one turns rounding into ±lr
KINDS = ("ddp", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3", "fsdp2")


def same(one: Path, many: Path, loss: float = 1e-5, weights: float = 1e-4) -> None:
    """Losses by step and the trained draft; weights: largest relative difference of a tensor, by its norm."""
    left, right = (history.read(folder / "history.jsonl") for folder in (one, many))
    assert [record["step"] for record in left] == [record["step"] for record in right]
    assert len(left) > 10
    for a, b in zip(left, right, strict=True):
        for key in ("loss", "held_out_loss", "tau", "gradient_norm"):
            assert b.get(key) == pytest.approx(a.get(key), abs=loss)
        assert b.get("supervised") == a.get("supervised")
    expected, found = (load_file(folder / "trained.safetensors") for folder in (one, many))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.norm(found[name].double() - tensor.double()) <= weights * torch.norm(tensor.double()), (
            name
        )


def ran(done: Any) -> None:
    assert done.returncode == 0, done.stderr[-3000:]


def test_ddp_fsdp2_and_zero3_learn_what_one_process_learns(tmp_path: Path) -> None:
    eagle = {**SGD, "draft": "eagle3", "epochs": 4.0}
    exact = {"dtype": "float64", "rows": 13, "epochs": 1.0, "log_every": 1, "eval_every": 1}
    main(tmp_path / "eagle", {**eagle, "batch_size": 4})
    main(tmp_path / "adamw", {**ADAMW, "batch_size": 4})
    main(tmp_path / "exact", {**exact, "batch_size": 4})
    done = torchrun(
        *(tmp_path / "ddp", {**exact, **SPLIT, "parallel": "ddp"}),
        *(tmp_path / "fsdp2", {**eagle, **SPLIT, "parallel": "fsdp2"}),
        *(tmp_path / "zero3", {**ADAMW, **SPLIT, "parallel": "deepspeed_zero3"}),
    )
    ran(done)
    assert "FSDP2 (fully_shard); gradients are averaged over 2" in done.stdout
    assert "ZeRO-3; gradients are averaged over 2" in done.stdout
    # with one row a process and step in all, the last step leaves a process without any
    records = [one for one in history.read(tmp_path / "exact" / "history.jsonl") if "loss" in one]
    assert [one["rows"] for one in records] == [4, 8, 12, 13]
    same_exactly(tmp_path / "exact", tmp_path / "ddp")
    same(tmp_path / "eagle", tmp_path / "fsdp2")
    same(tmp_path / "adamw", tmp_path / "zero3")


def same_exactly(one: Path, many: Path) -> None:
    expected, found = (load_file(folder / "trained.safetensors") for folder in (one, many))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_every_kind_with_both_optimisers(tmp_path: Path) -> None:
    given: list[Any] = []
    for name, options in (("sgd", SGD), ("adamw", ADAMW), ("eagle", {**SGD, "draft": "eagle3"})):
        main(tmp_path / name, {**options, "batch_size": 4})
        for kind in KINDS:
            given += [tmp_path / f"{name}-{kind}", {**options, **SPLIT, "parallel": kind}]
    ran(torchrun(*given))
    for name in ("sgd", "adamw", "eagle"):
        for kind in KINDS:
            same(tmp_path / name, tmp_path / f"{name}-{kind}")


@pytest.mark.slow
def test_a_checkpoint_of_any_kind_goes_on_as_any_other(tmp_path: Path) -> None:
    """Stopped in two processes of one kind, resumed in another kind or in one process: never stopped."""
    options = {**ADAMW, "checkpoint_every": 3, "ema": 0.5}
    main(tmp_path / "whole", {**options, "batch_size": 4})
    stop = {"signal_at": {"step": 5, "signal": 15}}
    for first, second in (("deepspeed_zero2", "fsdp2"), ("fsdp2", "deepspeed_zero1"), ("ddp", None)):
        out = tmp_path / f"{first}-{second}"
        cut = torchrun(out, {**options, **SPLIT, "parallel": first, **stop})
        assert "saved at step 6" in cut.stdout, cut.stderr[-3000:]
        if second is None:
            main(out, {**options, "batch_size": 4})
        else:
            ran(torchrun(out, {**options, **SPLIT, "parallel": second}))
        same(tmp_path / "whole", out)


@pytest.mark.slow
def test_ddp_stopped_and_resumed_is_never_stopped_bit_for_bit(tmp_path: Path) -> None:
    options = {**ADAMW, **SPLIT, "parallel": "ddp", "dropout": 0.3, "ema": 0.5, "checkpoint_every": 100}
    ran(torchrun(tmp_path / "whole", options))
    cut = torchrun(tmp_path / "cut", {**options, "signal_at": {"step": 5, "signal": 15}})
    assert "saved at step 6" in cut.stdout, cut.stderr[-3000:]
    ran(torchrun(tmp_path / "cut", options))
    whole, found = (load_file(tmp_path / name / "trained.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(found[name], one) for name, one in whole.items())
