"""A run's folder with a tiny target that has a tokenizer, an untrained draft and held-out prompts, in float64."""

import functools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from deepspec import pair
from deepspec.config.schema import Config, DecodeConfig, TargetConfig
from deepspec.drafts.eagle3 import Eagle3Options
from deepspec.drafts.registry import new_draft
from deepspec.target import Target
from tests.data.toy_tokenizers import chatml
from tests.models import COMMON

QUESTIONS = ["Hello there?", "What is two plus two?", "How are you today?", "print(add(1, 2))", "And so on?"]


@functools.cache
def talking_target() -> Target:
    tokenizer = chatml()
    settings = {**COMMON, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**settings), dtype=torch.float64
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    identity = {
        "name": "tiny",
        "weights": "w",
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "num_layers": 4,
        "tokenizer": "toy",
        "dtype": "float64",
    }
    return Target(model, tokenizer, "tiny", identity)


def talking_run(folder: Path, monkeypatch: pytest.MonkeyPatch, **decode: Any) -> Config:
    """The configuration of a run in `folder`, whose draft and prompts are there; its target need not be loaded."""
    target = talking_target()
    monkeypatch.setattr(pair, "load_target", lambda config, layers=(): target)
    out = folder / "run"
    config = Config(
        name="tiny",
        target=TargetConfig(name="tiny", path="tiny"),
        draft=Eagle3Options(vocab_size=None),
        decode=DecodeConfig(**{"k": 3, "max_new_tokens": 24, **decode}),
        out=str(out),
    )
    torch.manual_seed(1)
    new_draft(config.draft, target, None).save_pretrained(out / "draft")
    recipe = {"draft": asdict(config.draft), "train": {}}
    manifest = {"fingerprint": "f", "target": target.identity(), "data": "d", "recipe": recipe}
    (out / "draft" / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    (out / "data").mkdir()
    (out / "data" / "manifest.json").write_text('{"fingerprint": "d"}', encoding="utf-8")
    with (out / "data" / "held_out_prompts.jsonl").open("w", encoding="utf-8") as file:
        for index, text in enumerate(QUESTIONS):
            messages = [{"role": "user", "content": text}]
            rendered = target.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
            tokens = target.tokenizer(rendered, add_special_tokens=False)["input_ids"]
            row = {"id": f"p{index}", "category": "toy", "messages": messages, "tokens": tokens}
            file.write(json.dumps(row) + "\n")
    return config
