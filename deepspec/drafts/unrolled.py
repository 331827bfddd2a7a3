"""Training-time test: packed rows whose every position drafts K steps at once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspec.drafts.layers import repeat_heads


def shift(x: Tensor, steps: int) -> Tensor:
    """x[:, i] ← x[:, i + steps], zeros past the end. [B, T, ...] → the same shape."""
    if steps == 0:
        return x
    moved = torch.zeros_like(x)
    moved[:, : x.shape[1] - steps] = x[:, steps:]
    return moved


def supervised(loss_mask: Tensor, documents: Tensor, steps: int) -> Tensor:
    """[B, T, K] bool: row i = a − 1 of an EAGLE-like draft is supervised at step k (index k−1).

    The start a = i + 1 is valid iff t_a and t_{a+1} are the assistant's and of row i's document; step k then
    needs t_{a+1} … t_{a+k} all the assistant's (a running product).
    """
    mask = loss_mask & (documents >= 0)
    alive = shift(mask, 1) & (shift(documents, 1) == documents)
    valid = []
    for k in range(1, steps + 1):
        alive = alive & shift(mask, k + 1) & (shift(documents, k + 1) == documents)
        alive[:, alive.shape[1] - k - 1 :] = False  # zeros shifted in from past the end are no tokens
        valid.append(alive)
    return torch.stack(valid, -1)


def unrolled_attention(
    query: Tensor, base: tuple[Tensor, Tensor], own: Sequence[tuple[Tensor, Tensor]], mask: Tensor
) -> Tensor:
    """Attention of one unrolled step: step 0's keys by `mask`, later steps' on the query's own diagonal only.

    query: [B, heads, T, d]. base: step 0's keys and values, [B, kv_heads, T, d]. own: those of steps 1..s,
    the current one last. mask: [B, 1, T, T] additive. Returns [B, heads, T, d].
    """
    heads, scale = query.shape[1], query.shape[-1] ** -0.5
    keys, values = (repeat_heads(x, heads) for x in base)
    if not own:
        return torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask.to(query.dtype)
        )
    extra = [(repeat_heads(k, heads), repeat_heads(v, heads)) for k, v in own]
    scores = torch.matmul(query, keys.transpose(-1, -2)) * scale + mask.to(query.dtype)
    diagonal = [(query * k).sum(-1, keepdim=True) * scale for k, _ in extra]
    weights = torch.cat([scores, *diagonal], -1).softmax(-1, dtype=torch.float32).to(query.dtype)
    count = keys.shape[2]
    mixed = torch.matmul(weights[..., :count], values)
    for index, (_, v) in enumerate(extra):
        mixed = mixed + weights[..., count + index, None] * v
    return mixed
