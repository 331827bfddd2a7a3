"""From logits to the distribution a request is sampled from, and a token from a uniform.

The same function serves target and draft, in float32: the tensor a token is drawn from is the tensor that
stands in the acceptance ratio.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspec.decoding.request import Sampling
from deepspec.errors import UserError


def check_sampling(sampling: Sampling) -> None:
    """UserError for settings no distribution follows from."""
    if not 0 <= sampling.temperature < float("inf"):
        raise UserError(f"temperature is {sampling.temperature}; it must be 0 (greedy) or more, and finite.")
    if not 0 < sampling.repetition_penalty < float("inf"):
        raise UserError(
            f"repetition_penalty is {sampling.repetition_penalty}; it must be more than 0 (1 = off)."
        )
    if sampling.top_k < 0 or not 0 < sampling.top_p <= 1 or not 0 <= sampling.min_p <= 1:
        raise UserError(
            f"top_k={sampling.top_k}, top_p={sampling.top_p}, min_p={sampling.min_p}: top_k must be 0 (off) or more, "
            "top_p above 0 and at most 1, min_p between 0 and 1."
        )


def distributions(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """[B, ..., V] raw logits → probabilities of the same shape, row b by samplings[b].

    float32, or float64 when the logits are. Temperature, then top-k, top-p and min-p, each on what the one
    before left, as in transformers' processors; a repetition penalty comes before them (`penalise`). A greedy
    row becomes a point mass on its argmax.
    """
    logits = _wide(logits)
    if len(set(samplings)) == 1:
        return _distribution(logits, samplings[0])
    return torch.stack(
        [_distribution(row, sampling) for row, sampling in zip(logits, samplings, strict=True)]
    )


def penalise(logits: Tensor, seen: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """[B, ..., V] raw logits → the same with each row's repetition penalty on the tokens in `seen`, float32.

    seen: bool, broadcast against the logits. transformers' formula (Keskar et al. 2019): a seen token's logit is
    divided by the penalty where positive, multiplied where negative.
    """
    logits = _wide(logits)
    penalties = [sampling.repetition_penalty for sampling in samplings]
    penalty = torch.tensor(penalties, dtype=logits.dtype).to(logits.device, non_blocking=True)
    penalty = penalty.view(-1, *[1] * (logits.dim() - 1))
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def penalise_paths(
    logits: Tensor, tokens: Tensor, visible: Tensor, seen: Tensor, samplings: Sequence[Sampling]
) -> Tensor:
    """The same for every token of a verification, on its own path: [B, T, V] → [B, T, V].

    tokens: [B, T], the pending token first. visible: [T, T] or [B, T, T], whose logits come after which tokens.
    seen: [B, V], the text so far, pending token included.
    """
    count = tokens.shape[1]
    on_path = visible.expand(len(tokens), count, count)
    # A token that is not on the path writes the pending one's value, which is on every path, in its own place.
    index = torch.where(on_path, tokens[:, None, :], tokens[:, :1, None])
    everything = torch.ones((), dtype=torch.bool, device=logits.device)
    penalised = penalise(logits.gather(2, index), everything, samplings)
    return penalise(logits, seen[:, None], samplings).scatter(2, index, penalised)


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    if sampling.temperature == 0:
        best = logits.argmax(-1, keepdim=True)
        return torch.zeros_like(logits).scatter_(-1, best, 1.0)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.top_p < 1:
        ordered, index = logits.sort(dim=-1, descending=True)
        shares = ordered.softmax(-1)
        before = shares.cumsum(-1) - shares
        drop = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, index, before >= sampling.top_p)
        logits = logits.masked_fill(drop, -torch.inf)
    if sampling.min_p > 0:
        probabilities = logits.softmax(-1)
        logits = logits.masked_fill(
            probabilities < sampling.min_p * probabilities.amax(-1, keepdim=True), -torch.inf
        )
    return logits.softmax(-1)


def draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """[B, V] (need not sum to exactly 1) and float64 [B] in [0, 1) → int64 [B], by inverse CDF in float64.

    A float32 running sum over 150,000 entries would lose the tail.
    """
    cumulative = probabilities.double().cumsum(-1)
    point = uniform.to(cumulative.device)[:, None] * cumulative[:, -1:]
    # right=True: the first entry whose running sum *exceeds* the point, so a zero entry is never drawn.
    return torch.searchsorted(cumulative, point, right=True)[:, 0].clamp(max=probabilities.shape[-1] - 1)
