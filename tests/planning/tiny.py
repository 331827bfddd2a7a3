"""A run with a tiny target on disk and a prompts file, and the same target as a plan sees it."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import torch

from deepspec.config.schema import (
    Answers,
    Config,
    DataConfig,
    DecodeConfig,
    Dtype,
    EvaluateConfig,
    TargetConfig,
    TrainConfig,
)
from deepspec.drafts.options import Eagle3Options
from tests.data.toy_tokenizers import chatml
from tests.models import tiny_model

WORDS = [
    "hello",
    "there",
    "how",
    "are",
    "you",
    "two",
    "plus",
    "is",
    "four",
    "and",
    "so",
    "on",
    "def",
    "return",
]


def save_model(folder: Path) -> Path:
    """A tiny Llama with a tokenizer that has a chat template."""
    tokenizer, tiny = chatml(), copy.deepcopy(tiny_model("llama")).float()
    torch.manual_seed(0)
    tiny.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    tiny.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_prompts(path: Path, count: int, answered: bool = True) -> Path:
    """Conversations of 1 to 20 words a side."""
    draw = random.Random(1)

    def text() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, 20)))

    rows = []
    for number in range(count):
        messages = [{"role": "user", "content": f"{number} {text()}"}]
        messages += [{"role": "assistant", "content": text()}] if answered else []
        rows.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def make_config(model: Path, prompts: Path, out: Path, **data: Any) -> Config:
    chosen = {
        "answers": Answers.given,
        "held_out_prompts": 8,
        "max_length": 128,
        "max_new_tokens": 16,
        **data,
    }
    return Config(
        name="tiny",
        out=str(out),
        target=TargetConfig(name="tiny", path=str(model), dtype=Dtype.float32, device="cpu"),
        draft=Eagle3Options(vocab_size=280, ttt_steps=2),
        data=DataConfig(prompts=str(prompts), batch_size=4, **chosen),
        train=TrainConfig(
            epochs=2.0, batch_size=2, eval_every=4, eval_rows=2, eval_steps=2, checkpoint_every=4
        ),
        decode=DecodeConfig(max_new_tokens=8),
        evaluate=EvaluateConfig(
            max_prompts=2, sweep=[1], sweep_prompts=1, baselines=False, threads=1, bootstrap=100
        ),
    )
