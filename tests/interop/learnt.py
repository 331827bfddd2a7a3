"""A small target on disk and drafts that have learnt a little of it, for readers that count what is accepted."""

from pathlib import Path
from typing import Any

import torch
import transformers

from deepspec.config.schema import Dtype, TargetConfig
from deepspec.decoding import Engine, Request
from deepspec.drafts.registry import new_draft
from deepspec.target import Target, load_target
from tests.data.toy_tokenizers import chatml
from tests.drafts.packed import batch_of


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
        max_position_embeddings=512,
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


def some_prompts(target: Target, count: int, seed: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(3, target.vocab_size, (6,), generator=draw).tolist() for _ in range(count)]


def learnt(options: Any, target: Target, prompts: list[list[int]], tokens: int, steps: int = 150) -> Any:
    """A draft fitted to the target's own greedy answers to these very prompts."""
    answers = Engine(target).generate([Request(prompt, tokens) for prompt in prompts])
    texts = [prompt + answer.tokens for prompt, answer in zip(prompts, answers, strict=True)]
    torch.manual_seed(1)
    draft = new_draft(options, target, None).train()
    optimiser = torch.optim.AdamW(draft.parameters(), lr=3e-3)
    batch = batch_of(target, draft, texts, [len(prompt) for prompt in prompts])
    for _ in range(steps):
        loss = draft(batch)
        total = sum(
            weight * loss.sums[name] / loss.weights[name].clamp(min=1e-9) for name, weight in draft.default_loss.items()
        )
        optimiser.zero_grad()
        total.backward()
        optimiser.step()
    return draft.eval()
