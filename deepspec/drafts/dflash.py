"""DFlash (Chen et al. 2026, arXiv 2602.06036): a block diffusion draft that denoises its whole block in one step.

The backbone is that of `block`, with K + 1 slots: the anchor's own predicts nothing, slot k predicts t_{a+k} from what
the layers know of the context and of the other slots. No slot knows which token was drawn before it.
Loss: cross-entropy with the text, weighted by w_k = exp(−(k−1)/γ).
"""

from typing import Any

from deepspec.drafts.block import BlockConfig, BlockDraft


class DFlashConfig(BlockConfig):
    model_type = "deepspec_dflash"

    def __init__(
        self, **block: Any
    ) -> None:  # without one, transformers makes it a dataclass, without our defaults
        super().__init__(**block)


class DFlashDraft(BlockDraft):
    config_class = DFlashConfig
    first_slot = 1

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        self.post_init()

    @property
    def default_loss(self) -> dict[str, float]:
        return {"ce": 1.0, **({"confidence": 1.0} if self.confidence_head is not None else {})}
