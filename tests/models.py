"""Tiny random targets of several families, in float64: small enough to enumerate, real code of each family."""

import functools
from pathlib import Path

import tokenizers
import torch
import transformers

from deepspec.target import Target

VOCAB = 97
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
}

# name → (config class, settings beyond COMMON). A sliding window of 8 is far shorter than the tests' texts.
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "mistral_sliding": ("MistralConfig", {"sliding_window": 8}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 8, "sliding_window": 8, "sliding_window_pattern": 2}),
    "phi3": ("Phi3Config", {}),
    "olmo3": ("Olmo3Config", {"sliding_window": 8}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {**LATENT, **EXPERTS, "first_k_dense_replace": 1, "num_key_value_heads": 4, "n_shared_experts": 1},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {"head_dim": 8, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}


def tiny_model(family: str, seed: int = 0) -> transformers.PreTrainedModel:
    """A random model whose greedy text does not fall into a loop at once."""
    return _tiny_model(family, seed)


@functools.cache
def _tiny_model(family: str, seed: int) -> transformers.PreTrainedModel:
    name, extra = FAMILIES[family]
    config = getattr(transformers, name)(**{**COMMON, **extra})
    if family == "gemma3":  # two local layers, then a global one, whatever the default pattern
        config.layer_types = ["sliding_attention", "full_attention"] * 2
    torch.manual_seed(seed)
    config._experts_implementation = "eager"  # the grouped kernel has no float64
    attention = "eager" if family in ("gemma2", "gpt_oss") else "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, dtype=torch.float64
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model.eval()


def tiny_target(family: str, seed: int = 0) -> Target:
    return Target(tiny_model(family, seed), None, f"tiny {family}")


def prompts(count: int, seed: int = 0, longest: int = 24) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def save_tiny(folder: Path, family: str) -> Path:
    """The tiny model as a local folder, with a tokenizer of whole words (w0, w1, ...)."""
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model = tiny_model(family)
    if family == "llama":
        model.set_attn_implementation("sdpa")
    model.save_pretrained(folder)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", unk_token="w0")
    fast.save_pretrained(folder)
    return folder
