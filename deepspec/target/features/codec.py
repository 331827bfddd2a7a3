"""Number formats of stored features: exact ones, and int8, fp8 and int4 with two scales.

One value of layer l, token t, channel c is stored as x[t, l, c] ≈ q[t, l, c] · token[t, l] · channel[l, c].
The channel scales are learnt once from a few rows: a few channels are hundreds of times larger than the others, and
with a token's scale alone those others would all round to zero. The token scales carry what one token has more of.
int4 has sixteen steps only: there a token has a scale for every `GROUP` channels, and two numbers share a byte. It is for
captured layers; the last hidden state, from which the teacher's distributions come, stays int8 beside it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspec.config.schema import StoreFormat
from deepspec.errors import UserError

LOSSY = {StoreFormat.int8: torch.int8, StoreFormat.fp8: torch.float8_e4m3fn, StoreFormat.int4: torch.uint8}
EXACT = {StoreFormat.bf16: torch.bfloat16, StoreFormat.fp32: torch.float32}
LARGEST = {StoreFormat.int8: 127.0, StoreFormat.fp8: 448.0, StoreFormat.int4: 7.0}  # that the format holds
GROUP = 32  # channels of an int4 scale, less where the hidden size is no multiple
BULK = 0.9
TINY = 1e-30  # instead of a scale of zero


@dataclass(frozen=True)
class Encoded:
    """values: [N, L, H] in the stored format, int4: [N, L, H/2] uint8, the even channel low. scales: [N, L] float32,
    int4: [N, L, H/group] bfloat16; None where the format is exact."""

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
        if self.format is StoreFormat.int4:
            return _packed(scaled)
        scales = scaled.abs().amax(-1).div_(largest).clamp_(min=TINY)
        scaled /= scales[..., None]
        if self.format is StoreFormat.int8:
            scaled = scaled.round_()
        return Encoded(scaled.clamp_(-largest, largest).to(self.dtype), scales)

    def decode(self, stored: Encoded, dtype: torch.dtype) -> Tensor:
        """Stored → [N, L, H] in `dtype`, computed in float32."""
        if self.channels is None or stored.scales is None:
            return stored.values.to(dtype)
        if self.format is StoreFormat.int4:
            values = _unpacked(stored.values, stored.scales)
        else:
            values = stored.values.float()
            values *= stored.scales[..., None]
        values *= self.channels.to(values.device)
        return values.to(dtype)


def _group(hidden_size: int) -> int:
    return math.gcd(hidden_size, GROUP)


def _packed(scaled: Tensor) -> Encoded:
    """[N, L, H] in units of the channels → int4."""
    groups = scaled.unflatten(-1, (-1, _group(scaled.shape[-1])))
    scales = groups.abs().amax(-1).div_(LARGEST[StoreFormat.int4]).clamp_(min=TINY).bfloat16()
    steps = (groups / scales.float()[..., None]).round_().clamp_(-8, 7).to(torch.int8).flatten(-2)
    even, odd = steps[..., ::2] & 15, steps[..., 1::2] & 15
    return Encoded((even | odd << 4).view(torch.uint8), scales)


def _unpacked(values: Tensor, scales: Tensor) -> Tensor:
    """int4 → float32 [N, L, H] in units of the channels."""
    halves = torch.stack([values & 15, values >> 4], -1).flatten(-2).to(torch.int8)
    steps = ((halves ^ 8) - 8).float()
    return (steps.unflatten(-1, (scales.shape[-1], -1)) * scales.float()[..., None]).flatten(-2)


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
    if format is StoreFormat.int4:
        return hidden_size // 2 + 2 * (hidden_size // _group(hidden_size))
    size = (LOSSY | EXACT)[format].itemsize * hidden_size
    return size + 4 if format in LOSSY else size
