"""Other projects' own code reads our exports: each in its environment and process (`scripts/make_reader.sh`)."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepspec.config.schema import Dtype, TargetConfig
from deepspec.drafts.options import DFlashOptions, DSparkOptions, Eagle3Options, MtpOptions, PEagleOptions
from deepspec.interop.bundle import export
from deepspec.interop.card import Subject
from deepspec.target import Target, load_target
from tests.config.processes import ROOT, environment
from tests.data.toy_tokenizers import chatml
from tests.drafts.conformance import decoding_logits, features_of
from tests.interop.test_export import trained
from tests.models import tiny_model

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
TEXT = [5, 17, 40, 3, 66, 21, 9, 80, 12, 33, 58, 7]
STEPS = 4
ANCHOR = len(TEXT) - STEPS - 1  # the pending token


def made_reader(name: str) -> str:
    """The Python of a reader's environment; skips where it cannot be made."""
    made = subprocess.run(
        ["bash", str(ROOT / "scripts" / "make_reader.sh"), name],
        env={**environment(), "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"the reader's environment cannot be made: {made.stderr.strip().splitlines()[-1]}")
    return made.stdout.strip()


@pytest.fixture(scope="module")
def speculators() -> str:
    return made_reader("speculators")


def saved_target(family: str, folder: Path) -> tuple[Target, str]:
    """A tiny target on disk, as an engine would find it."""
    import copy

    model = copy.deepcopy(tiny_model(family)).float()
    tokenizer = chatml()
    torch.manual_seed(0)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = TargetConfig(name="tiny", path=str(folder), dtype=Dtype.float32, device="cpu")
    return load_target(config), str(folder)


def read_by(python: str, draft: Any, target: Target, where: str, form: str, tmp_path: Path) -> torch.Tensor:
    kind = str(draft.config.model_type).removeprefix("deepspec_")
    subject = Subject("mine", form, kind, "out", where, "mit", STEPS, {"fingerprint": "f"}, [], None)
    export(draft, target, subject, tmp_path / "out")
    features = features_of(draft, target, TEXT[:ANCHOR])[0]
    asked, answer = tmp_path / "asked.safetensors", tmp_path / "answer.safetensors"
    tokens = torch.tensor(TEXT)
    save_file({"features": features.contiguous(), "tokens": tokens}, asked)
    done = subprocess.run(
        [python, str(HERE / "read_speculators.py"), str(tmp_path / "out"), str(asked), str(answer)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(answer)["logits"]


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("change", ["plain", "3.1", "norms", "layers"])
def test_speculators_reads_our_eagle3(speculators: str, change: str, reduced: bool, tmp_path: Path) -> None:
    target, where = saved_target("llama", tmp_path / "target")
    new = change == "3.1"
    options = Eagle3Options(
        capture_layers=[0, 1, 2],
        layers=2 if change == "layers" else 1,
        norm_layers=new,
        normalised_feedback=new,
    )
    config = {"norm_residual": True, "norm_features": True} if change == "norms" else {}
    ids = torch.arange(0, target.vocab_size, 2) if reduced else None
    draft = trained(options, target, ids, **config).float()
    found = read_by(speculators, draft, target, where, "speculators", tmp_path)
    ours = decoding_logits(draft, target, TEXT, ANCHOR, STEPS)
    torch.testing.assert_close(found, ours, rtol=1e-3, atol=1e-3)


def test_speculators_reads_our_mtp(speculators: str, tmp_path: Path) -> None:
    target, where = saved_target("qwen3", tmp_path / "target")
    draft = trained(MtpOptions(), target).float()
    found = read_by(speculators, draft, target, where, "speculators", tmp_path)
    ours = decoding_logits(draft, target, TEXT, ANCHOR, 1)
    torch.testing.assert_close(found, ours, rtol=1e-3, atol=1e-3)


BLOCK: dict[str, Any] = {"layers": 2, "block_tokens": STEPS, "capture_layers": [0, 1, 2], "vocab_size": None}


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        DFlashOptions(**BLOCK),
        DSparkOptions(**BLOCK, rank=8),
        DSparkOptions(**BLOCK, rank=8, sequential="rnn"),
    ],
    ids=["dflash", "dspark", "dspark with memory"],
)
def test_speculators_reads_our_block_drafts(
    speculators: str, options: Any, reduced: bool, tmp_path: Path
) -> None:
    target, where = saved_target("qwen3", tmp_path / "target")
    options.mask_token = target.vocab_size - 1
    ids = torch.arange(0, target.vocab_size, 2) if reduced else None
    draft = trained(options, target, ids).float()
    found = read_by(speculators, draft, target, where, "speculators", tmp_path)
    ours = decoding_logits(draft, target, TEXT, ANCHOR, STEPS)
    torch.testing.assert_close(found, ours, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_speculators_reads_our_peagle(speculators: str, layers: int, reduced: bool, tmp_path: Path) -> None:
    target, where = saved_target("llama", tmp_path / "target")
    options = PEagleOptions(capture_layers=[0, 1, 2], layers=layers, mask_token=target.vocab_size - 1)
    ids = torch.arange(0, target.vocab_size, 2) if reduced else None
    draft = trained(options, target, ids).float()
    found = read_by(speculators, draft, target, where, "speculators", tmp_path)
    ours = decoding_logits(draft, target, TEXT, ANCHOR, STEPS)
    torch.testing.assert_close(found, ours, rtol=1e-3, atol=1e-3)
