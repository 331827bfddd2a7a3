"""vLLM itself, on the CPU and in an environment of its own, serves what was exported (`scripts/make_reader.sh vllm`)."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from deepspec.artifacts import MANIFEST, cache_dir
from deepspec.config.schema import Dtype, TargetConfig
from deepspec.decoding import Engine, Request
from deepspec.drafts.options import DFlashOptions, Eagle3Options, PEagleOptions
from deepspec.drafts.registry import new_draft
from deepspec.evaluation.prompts import read_held_out
from deepspec.interop.bundle import export
from deepspec.interop.card import METHODS, Subject
from deepspec.target import Target, load_target
from deepspec.training.saved_draft import load_draft
from tests.config.processes import ROOT, environment
from tests.data.toy_tokenizers import chatml
from tests.drafts.packed import fit
from tests.interop.test_real_readers import made_reader

pytestmark = pytest.mark.slow
K = 4


@pytest.fixture(scope="module")
def vllm() -> str:
    return made_reader("vllm")


def served(python: str, tmp_path: Path, name: str, asked: dict[str, Any]) -> dict[str, Any]:
    """What vLLM answers, and its counters."""
    question, answer = tmp_path / f"{name}.json", tmp_path / f"{name}.answer.json"
    question.write_text(json.dumps(asked))
    alone = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python, str(Path(__file__).with_name("run_vllm.py")), str(question), str(answer)],
        env={**environment(), **alone},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    return json.loads(answer.read_text())


def plain_answers(
    python: str, target: Target, prompts: list[list[int]], tokens: int, tmp_path: Path
) -> list[list[int]]:
    asked = {"target": target.model.name_or_path, "prompts": prompts, "max_new_tokens": tokens}
    return served(python, tmp_path, "plain", {**asked, "draft": None, "settings": {}})["answers"]


def check_served(
    python: str,
    draft: Any,
    target: Target,
    prompts: list[list[int]],
    plain: list[list[int]],
    tokens: int,
    k: int,
    tmp_path: Path,
) -> None:
    """vLLM's greedy text is its own without a draft, and it accepts as much as our engine does."""
    kind = str(draft.config.model_type).removeprefix("deepspec_")
    folder, where = tmp_path / "out", target.model.name_or_path
    subject = Subject("mine", "vllm", kind, str(folder), where, "mit", k, {"fingerprint": "f"}, [], None)
    export(draft, target, subject, folder)
    settings = {**METHODS.get(kind, {"method": kind}), "num_speculative_tokens": k}
    asked = {"target": where, "prompts": prompts, "max_new_tokens": tokens}
    drafted = served(python, tmp_path, "drafted", {**asked, "draft": str(folder), "settings": settings})
    assert drafted["answers"] == plain
    requests = [Request(prompt, tokens, eos=target.eos) for prompt in prompts]
    rounds = [one for result in Engine(target, draft, k=k).generate(requests) for one in result.rounds]
    ours = 1 + sum(one.accepted for one in rounds) / len(rounds)
    theirs = 1 + drafted["accepted"] / drafted["drafts"]
    assert ours > 1.2, "a draft that is never right would prove nothing"
    assert theirs == pytest.approx(ours, rel=0.05)


def trained_run() -> Path | None:
    """The run of recipes/smollm2_eagle3.yaml, here or among the cached ones."""
    places = (ROOT / "runs", cache_dir() / "runs")
    return next((place / "smollm2_eagle3" for place in places if _whole(place / "smollm2_eagle3")), None)


def _whole(run: Path) -> bool:
    return all((run / part / MANIFEST).is_file() for part in ("draft", "data"))


def test_smollm2_with_its_trained_eagle3(vllm: str, tmp_path: Path) -> None:
    run = trained_run()
    if run is None:
        pytest.skip("there is no trained draft: python -m deepspec.pipeline +recipe=smollm2_eagle3")
    config = TargetConfig(name="SmolLM2", path="builtin:smollm2_135m", dtype=Dtype.float32, device="cpu")
    target = load_target(config)
    held_out = [list(one.tokens) for one in read_held_out(run / "data", "") if len(one.tokens) < 300]
    prompts, draft = held_out[:12], load_draft(run / "draft").float()
    check_served(
        vllm, draft, target, prompts, plain_answers(vllm, target, prompts, 48, tmp_path), 48, 2, tmp_path
    )


def small_target(folder: Path) -> Target:
    """A random Qwen3 whose attention heads are as wide as kernels for CPUs want them."""
    tokenizer = chatml()
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=5,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.25)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return load_target(TargetConfig(name="small", path=str(folder), dtype=Dtype.float32, device="cpu"))


@dataclass
class Small:
    """A target, prompts, and what vLLM answers to them without a draft."""

    target: Target
    prompts: list[list[int]]
    plain: list[list[int]]


@pytest.fixture(scope="module")
def small(vllm: str, tmp_path_factory: pytest.TempPathFactory) -> Small:
    folder = tmp_path_factory.mktemp("small")
    target = small_target(folder / "target")
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, target.vocab_size, (6,), generator=draw).tolist() for _ in range(12)]
    return Small(target, prompts, plain_answers(vllm, target, prompts, 32, folder))


LAYERS = {"capture_layers": [0, 1, 3], "vocab_size": None}
# DSpark is not among them: vLLM 0.32 runs it by its second model runner only, which needs Triton.
KINDS = {
    "eagle3": lambda mask: Eagle3Options(**LAYERS, ttt_steps=K),
    "dflash": lambda mask: DFlashOptions(**LAYERS, layers=2, block_tokens=K, mask_token=mask),
    "peagle": lambda mask: PEagleOptions(**LAYERS, ttt_steps=K, mask_token=mask),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_target_with_a_draft_that_knows_half_of_it(
    kind: str, vllm: str, small: Small, tmp_path: Path
) -> None:
    """Fitted to some answers and asked for others too, so that rounds end everywhere."""
    known = small.prompts[:6]
    answers = Engine(small.target).generate([Request(prompt, 24) for prompt in known])
    torch.manual_seed(1)
    draft: Any = new_draft(KINDS[kind](small.target.vocab_size - 1), small.target, None)
    fit(draft, small.target, known, [answer.tokens for answer in answers])
    check_served(vllm, draft.eval(), small.target, small.prompts, small.plain, 32, K, tmp_path)
