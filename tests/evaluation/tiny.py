"""A tiny target, an untrained draft for it and a run's folder: what whole evaluations are tried on."""

import copy
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from deepspec.config.schema import Config, DataConfig, DecodeConfig, EvaluateConfig, TargetConfig
from deepspec.drafts.eagle3 import Eagle3Options
from deepspec.drafts.registry import new_draft
from deepspec.target import Target
from tests.models import VOCAB, prompts, tiny_model

IDENTITY = {
    "name": "tiny llama",
    "weights": "w",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_layers": 4,
    "tokenizer": "none",
    "dtype": "float64",
}


class Template:
    """A template that wraps the text in brackets, and a token for each character."""

    def __init__(self, tokenizer: Any, eos: Any, **more: Any) -> None:
        pass

    def prompt(self, messages: list[dict[str, str]], tools: Any = None) -> list[int]:
        return [3 + ord(char) % 90 for message in messages for char in f"[{message['content']}]"]


def make_config(out: Path) -> Config:
    return Config(
        name="tiny",
        target=TargetConfig(name="tiny llama", path="tiny"),
        draft=Eagle3Options(vocab_size=None),
        data=DataConfig(),
        decode=DecodeConfig(k=2, max_new_tokens=12),
        evaluate=EvaluateConfig(max_prompts=4, sweep=[1, 3], sweep_prompts=2, bootstrap=100),
        out=str(out),
    )


def make_target() -> Target:
    """Of weights of its own."""
    return Target(copy.deepcopy(tiny_model("llama")), None, "tiny llama", IDENTITY)


def load_as(target: Target, config: TargetConfig, layers: Any = ()) -> Target:
    """In place of `load_target`."""
    if config.dtype.value in ("auto", "float64"):
        return target
    model = copy.deepcopy(tiny_model("llama")).to(getattr(torch, config.dtype.value))
    return Target(model, None, "tiny llama")


def make_run(config: Config, target: Target) -> Path:
    """A run's folder with a draft and held-out prompts."""
    out = Path(config.out)
    torch.manual_seed(0)
    new_draft(config.draft, target, None).save_pretrained(out / "draft")
    manifest = {
        "fingerprint": "f",
        "target": target.identity(),
        "data": "d",
        "recipe": {
            "draft": asdict(config.draft),
            "train": {"learning_rate": 1e-3, "betas": [0.9, 0.95], "seed": 0},
        },
    }
    (out / "draft" / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    (out / "data").mkdir()
    (out / "data" / "manifest.json").write_text('{"fingerprint": "d"}', encoding="utf-8")
    rows = [
        {
            "id": f"p{i}",
            "category": "xy"[i % 2],
            "messages": [{"role": "user", "content": f"<b>{i}</b>"}],
            "tokens": tokens,
        }
        for i, tokens in enumerate(prompts(5))
    ]
    file = out / "data" / "held_out_prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    history = [{"step": 10, "loss": 3.0}, {"step": 20, "loss": 2.0}, {"step": 20, "tau": 1.4, "k": 2}]
    (out / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in history), encoding="utf-8")
    return out
