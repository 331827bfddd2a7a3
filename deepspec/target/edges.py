"""The target's edges: its embedding, final norm and head, without the layers between them.

What a draft needs of the target while it learns from stored features. The model is the family's own, loaded by the
library with fewer layers, so that scales, soft-caps, tied weights and quantised heads are what they are in the whole.
"""

import copy
from typing import Any, NoReturn

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from deepspec.errors import UserError
from deepspec.target.model import Target


class Edges(Target):
    """Embeds, normalises and gives logits like the target it is part of; runs no text."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        name: str,
        identity: dict[str, Any],
        full: Any,
    ) -> None:
        """model: with some of the layers. full: the whole model's (text) configuration."""
        super().__init__(model, tokenizer, name, identity)
        self.config, self.num_layers = full, full.num_hidden_layers

    @classmethod
    def of(cls, target: Target) -> "Edges":
        """Of a target that is whole. It loses its layers with `release_layers`, and is not to be used after that."""
        return cls(target.model, target.tokenizer, target.name, target.identity(), target.config)

    def release_layers(self) -> None:
        """Let go of the decoder layers that are still there."""
        del self.layers[:]

    def require(self, *abilities: str) -> None:
        """Features come from a store or a server, whose target was tried there; nothing else can be had."""
        if wanted := [ability for ability in abilities if ability != "features"]:
            raise UserError(
                f"Only the embedding, norm and head of {self.name} are loaded (features.source=store or server), and "
                f"{wanted[0]} needs the whole target. Use features.source=online."
            )

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError("The target's layers are not loaded: it has edges only.")

    def capture(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError("The target's layers are not loaded: it has edges only.")


def shallow(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """A model's configuration with its first `layers` decoder layers."""
    made = copy.deepcopy(config)
    text = made.get_text_config(decoder=True)
    before = text.num_hidden_layers
    text.num_hidden_layers = min(layers, before)
    for name, value in vars(text).items():  # what there is one of a layer (layer_types and the like)
        if _by_layer(value, before) and name != "architectures":
            setattr(text, name, value[: text.num_hidden_layers])
    return made


def _by_layer(value: Any, layers: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == layers
