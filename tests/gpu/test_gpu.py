"""On a GPU: bf16, compile, and ZeRO-3 and FSDP2 over NCCL. Skipped where there is none."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deepspec.training import history

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
ROOT = Path(__file__).parents[2]
COMMON: dict[str, Any] = {"draft": "eagle3", "device": "cuda", "dtype": "float32", "epochs": 4.0, "eps": 1e-4}
COMMON |= {"learning_rate": 0.002}


def trained(out: Path, processes: int = 1, **options: Any) -> list[dict[str, Any]]:
    """Train in `processes` processes, each on a GPU of its own; the history."""
    call = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    call += ["--nproc-per-node", str(processes), "-m", "tests.training.worker"]
    done = subprocess.run(
        [*call, str(out), json.dumps({**COMMON, **options})],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [one for one in history.read(out / "history.jsonl") if "loss" in one]


def check_same(one: Path, other: Path, tolerance: float) -> None:
    expected, found = (load_file(folder / "trained.safetensors") for folder in (one, other))
    for name, tensor in expected.items():
        assert torch.norm(found[name] - tensor) <= tolerance * torch.norm(tensor), name


def test_bf16_learns_as_float32_does_and_keeps_float32_weights(tmp_path: Path) -> None:
    full = trained(tmp_path / "full", batch_size=4)
    low = trained(tmp_path / "low", batch_size=4, run_precision="bf16")
    assert low[-1]["loss"] == pytest.approx(full[-1]["loss"], rel=0.05)
    assert {one.dtype for one in load_file(tmp_path / "low" / "trained.safetensors").values()} <= {
        torch.float32,
        torch.int64,
    }


def test_a_compiled_draft_learns_the_same(tmp_path: Path) -> None:
    trained(tmp_path / "plain", batch_size=4)
    trained(tmp_path / "compiled", batch_size=4, compile=True)
    check_same(tmp_path / "plain", tmp_path / "compiled", 1e-3)


@pytest.mark.parametrize("kind", ["ddp", "deepspeed_zero2", "deepspeed_zero3", "fsdp2"])
@pytest.mark.parametrize("processes", [1, 2])
def test_every_kind_over_nccl_learns_the_same(tmp_path: Path, kind: str, processes: int) -> None:
    if processes > torch.cuda.device_count():
        pytest.skip(f"needs {processes} GPUs")
    trained(tmp_path / "plain", batch_size=4)
    trained(tmp_path / kind, processes, batch_size=4 // processes, parallel=kind)
    check_same(tmp_path / "plain", tmp_path / kind, 1e-3)


@pytest.mark.parametrize("kind", ["deepspeed_zero3", "fsdp2"])
def test_bf16_under_sharding_exports_float32_masters(tmp_path: Path, kind: str) -> None:
    records = trained(tmp_path, batch_size=4, parallel=kind, run_precision="bf16")
    assert records[-1]["loss"] < records[0]["loss"]
    assert all(one.dtype != torch.bfloat16 for one in load_file(tmp_path / "trained.safetensors").values())
