"""Number formats of stored features: exact ones, and int8 and fp8 with two scales.

One value of layer l, token t, channel c is stored as x[t, l, c] ≈ q[t, l, c] · token[t, l] · channel[l, c].
The channel scales are learnt once from a few rows: a few channels are hundreds of times larger than the others, and
with a token's scale alone those others would all round to zero. The token scales carry what one token has more of.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepspec.config.schema import StoreFormat
from deepspec.errors import UserError

LOSSY = {StoreFormat.int8: torch.int8, StoreFormat.fp8: torch.float8_e4m3fn}
EXACT = {StoreFormat.bf16: torch.bfloat16, StoreFormat.fp32: torch.float32}
LARGEST = {StoreFormat.int8: 127.0, StoreFormat.fp8: 448.0}  # that the format holds
BULK = 0.9
TINY = 1e-30  # instead of a scale of zero


@dataclass(frozen=True)
class Encoded:
    """values: [N, L, H] in the stored format. scales: [N, L] float32, None where the format is exact."""

    values: Tensor
    scales: Tensor | None


@dataclass(frozen=True)
class Codec:
    """One format. channels: [L, H] float32 scales of the layers' channels, None where the format is exact."""

    format: StoreFormat
    channels: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return (LOSSY | EXACT)[self.format]

    def encode(self, hidden: Tensor) -> Encoded:
        """[N, L, H] → stored, on the same device."""
        if self.channels is None:
            return Encoded(hidden.to(self.dtype), None)
        largest = LARGEST[self.format]
        scaled = hidden.float() / self.channels.to(hidden.device)
        scales = scaled.abs().amax(-1).div_(largest).clamp_(min=TINY)
        scaled /= scales[..., None]
        if self.format is StoreFormat.int8:
            scaled = scaled.round_()
        return Encoded(scaled.clamp_(-largest, largest).to(self.dtype), scales)

    def decode(self, stored: Encoded, dtype: torch.dtype) -> Tensor:
        """Stored → [N, L, H] in `dtype`, computed in float32."""
        if self.channels is None or stored.scales is None:
            return stored.values.to(dtype)
        values = stored.values.float()
        values *= stored.scales[..., None]
        values *= self.channels.to(values.device)
        return values.to(dtype)


def channel_scales(hidden: Tensor) -> Tensor:
    """[N, L, H] of a few rows → float32 [L, H] on the CPU: the size that `BULK` of a channel's values
    stay below, each token counting alike.

    Not the largest value: the few tokens with a massive value in a channel (a text's first one often has it) would
    else cost all others that channel.
    """
    sizes = hidden.float().abs()
    if not bool(torch.isfinite(sizes).all()):
        raise UserError(
            "The target's hidden states are not finite numbers: its weights are damaged, or target.dtype is too "
            "narrow for it. Nothing was stored."
        )
    sizes = sizes / sizes.mean(-1, keepdim=True).clamp(min=TINY)
    channels = sizes.kthvalue(max(1, round(BULK * len(sizes))), dim=0).values
    return channels.clamp(min=1e-6 * float(channels.mean().clamp(min=TINY))).cpu()


def bytes_of(format: StoreFormat, hidden_size: int) -> int:
    """Of one token's hidden state in one layer."""
    size = (LOSSY | EXACT)[format].itemsize * hidden_size
    return size + 4 if format in LOSSY else size
