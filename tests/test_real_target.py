"""The real target: the quickstart's own weights through prefill, capture, draft and decoding."""

from pathlib import Path

import pytest
import torch

from deepspec.artifacts import cache_dir
from deepspec.config.schema import Dtype, TargetConfig
from deepspec.decoding import Engine, Request
from deepspec.drafts.eagle3 import Eagle3Options
from deepspec.drafts.registry import new_draft
from deepspec.errors import UserError
from deepspec.evaluation.bare import logits_two_ways
from deepspec.evaluation.ties import prove_tie
from deepspec.target import Target, load_target

CONVERSATION = [
    {"role": "user", "content": "Name three primary colours and say where each is found in nature."}
]
NEW = 48


@pytest.fixture(scope="module")
def smollm2() -> Target:
    config = TargetConfig(name="SmolLM2-135M-Instruct", path="builtin:smollm2_135m", dtype=Dtype.float32)
    try:
        return load_target(config)
    except UserError as error:
        pytest.skip(f"the built-in target cannot be had here: {error}")


@pytest.fixture(scope="module")
def prompt(smollm2: Target) -> list[int]:
    text = smollm2.tokenizer.apply_chat_template(CONVERSATION, add_generation_prompt=True, tokenize=False)
    return smollm2.tokenizer(text, add_special_tokens=False)["input_ids"]


def test_its_state_can_do_everything(smollm2: Target) -> None:
    smollm2.require("chain", "tree", "ragged", "features")
    assert (smollm2.num_layers, smollm2.hidden_size, smollm2.vocab_size, smollm2.eos) == (
        30,
        576,
        49152,
        (2,),
    )


def test_it_is_a_plain_model_folder(smollm2: Target) -> None:
    (folder,) = (cache_dir() / "targets").glob("smollm2_135m-*")
    assert {"config.json", "model.safetensors", "tokenizer.json", "manifest.json"} <= {
        path.name for path in Path(folder).iterdir()
    }


def test_greedy_text_is_generates_text_but_for_proven_ties(smollm2: Target, prompt: list[int]) -> None:
    ids = torch.tensor([prompt])
    reference = smollm2.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=2,
        pad_token_id=2,
    )[0, len(prompt) :].tolist()
    torch.manual_seed(0)
    draft = new_draft(Eagle3Options(vocab_size=None, start="target"), smollm2, None).eval()
    request = Request(prompt, NEW, eos=smollm2.eos)
    for engine in (Engine(smollm2), Engine(smollm2, draft, k=3)):
        (result,) = engine.generate([request])
        tie = prove_tie(logits_two_ways(smollm2, 3), prompt, reference, result.tokens)
        assert tie is None or tie.proven, tie
