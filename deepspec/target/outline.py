"""A target's shapes without its weights: what can be said of it from its configuration alone, however large it is."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspec.target.model import Target, attention_windows, decoder_layers
from deepspec.target.placement import empty_model

EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")  # what families call their number


def cached_bytes(config: Any, itemsize: int) -> int:
    """Of the keys and values that the target keeps of one token, in all layers. config: the text configuration."""
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    if getattr(config, "kv_lora_rank", None):  # latent attention: what keys and values are expanded from
        each = config.kv_lora_rank + config.qk_rope_head_dim
    else:
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        each = 2 * (getattr(config, "num_key_value_heads", None) or heads) * width
    return layers * each * itemsize


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters. active: of those a token meets, in a mixture of experts. edges: embedding and head (tied
    ones once), all that training from a store loads. head: rows of the output embedding times their width."""

    total: int
    active: int
    edges: int
    head: int


class Outline(Target):
    """Stands for the target where a draft is to be made for its sizes; runs no text and holds no weights."""

    def __init__(
        self, model_config: Any, tokenizer: Any, name: str, dtype: torch.dtype, remote_code: bool
    ) -> None:
        # nothing of `Target.__init__`, which watches a forward: there are no numbers to watch
        self.model = empty_model(model_config, remote_code)
        self.tokenizer, self.name, self.dtype = tokenizer, name, dtype
        self.config = model_config.get_text_config(decoder=True)
        self.hidden_size = self.config.hidden_size
        self.vocab_size = self.model.get_output_embeddings().weight.shape[0]
        self.max_positions = getattr(self.config, "max_position_embeddings", None) or 1 << 20
        self.decoder = self.model.get_decoder()
        self.layers = decoder_layers(self.decoder, self.config.num_hidden_layers)
        self.num_layers = len(self.layers)
        self.device = torch.device("meta")
        self._windows = attention_windows(self.config)
        self._identity = {"name": name, "hidden_size": self.hidden_size, "num_layers": self.num_layers}

    def require(self, *abilities: str) -> None:
        """What the target's cache can do is tried when it is loaded."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Numbers for a draft that measures how long an embedding row is."""
        return torch.zeros(2, self.hidden_size, device="cpu")

    def parameters(self) -> Parameters:
        """Counted, not loaded."""
        named = dict(self.model.named_parameters())
        total = sum(one.numel() for one in named.values())
        routed = sum(one.numel() for name, one in named.items() if ".experts." in name)
        experts = next((n for key in EXPERTS if (n := getattr(self.config, key, None))), None)
        each = getattr(self.config, "num_experts_per_tok", None)
        idle = round(routed * (1 - each / experts)) if routed and experts and each else 0
        embedding = self.model.get_input_embeddings().weight
        head = self.model.get_output_embeddings().weight
        edges = {id(weight): weight.numel() for weight in (embedding, head)}
        return Parameters(total, total - idle, sum(edges.values()), head.numel())
