"""Training-time test: packed rows whose every position drafts K steps at once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspec.drafts.layers import repeat_heads

KeysValues = tuple[Tensor, Tensor]


def shift(x: Tensor, steps: int) -> Tensor:
    """x[:, i] ← x[:, i + steps], zeros past the end. [B, T, ...] → the same shape."""
    if steps == 0:
        return x
    moved = torch.zeros_like(x)
    if steps < x.shape[1]:
        moved[:, : x.shape[1] - steps] = x[:, steps:]
    return moved


def supervised(loss_mask: Tensor, documents: Tensor, steps: int) -> Tensor:
    """[B, T, K] bool: which anchors a are supervised at step k (index k−1).

    The pending token t_a must be the assistant's, and t_{a+1} … t_{a+k} too, all in one document (a running
    product). An anchor at the start of its document has no features before it and is none.
    """
    mask = loss_mask & (documents >= 0)
    alive = mask.clone()
    alive[:, 1:] &= documents[:, 1:] == documents[:, :-1]
    alive[:, 0] = False
    valid = []
    for k in range(1, steps + 1):
        alive = alive & shift(mask, k) & (shift(documents, k) == documents)
        alive[:, max(alive.shape[1] - k, 0) :] = False  # zeros shifted in from past the end are no tokens
        valid.append(alive)
    return torch.stack(valid, -1)


class SupervisedRows:
    """The rows that some step supervises, gathered to the left: the others need no output, only keys and values.

    chosen: [B, T] bool. real: [B, n] bool, False where a row of the batch has fewer than n.
    """

    def __init__(self, chosen: Tensor) -> None:
        counts = chosen.sum(1)
        width = max(int(counts.max()), 1)
        # A stable sort of "not chosen" puts the chosen ones first, in order.
        self.index = (~chosen).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]
        self.real = torch.arange(width, device=chosen.device) < counts[:, None]

    def pick(self, x: Tensor, dim: int = 1) -> Tensor:
        """[B, T, ...] → [B, n, ...]; with dim=2, [B, h, T, ...] → [B, h, n, ...]."""
        index = self.index if dim == 1 else self.index[:, None]
        index = index.view(*index.shape, *[1] * (x.dim() - index.dim()))
        shape = list(x.shape)
        shape[dim] = index.shape[dim]
        return x.gather(dim, index.expand(shape))


def unrolled_attention(query: Tensor, base: KeysValues, own: Sequence[KeysValues], mask: Tensor) -> Tensor:
    """Attention of one unrolled step: step 0's keys by `mask`, later steps' on the query's own diagonal only.

    query: [B, heads, n, d]. base: step 0's keys and values, [B, kv_heads, T, d]. own: the queries' own of steps
    1..s, [B, kv_heads, n, d], the current one last. mask: [B, 1, n, T] additive. Returns [B, heads, n, d].
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
