"""Do speculative and plain *sampled* answers come from one distribution? A permutation test, with its power.

An answer becomes a vector: how often each token and each pair of neighbours occurs in it (hashed into `BUCKETS`,
as shares of its length), and its length. The statistic is the squared distance of the two ways' mean vectors; its
distribution under "no difference" comes from exchanging, prompt by prompt, which answers count as which way's.
Exchanging within prompts makes the test exact whatever the prompts are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BUCKETS = 256
LENGTH_WEIGHT = 0.25  # of the length (as a share of the longest answer), beside shares of tokens
CORRUPTIONS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
Answers = Sequence[Sequence[int]]
Matrix = NDArray[np.float64]


@dataclass
class TwoSample:
    """p_value: of "one distribution". power: for each share of tokens replaced by tokens of other answers, how
    often this test, with these many answers, would have said so at 5%. detectable: the smallest of these
    shares that would be found in 4 of 5 cases; null if none."""

    prompts: int
    answers: int
    p_value: float
    power: dict[str, float]
    detectable: float | None
    permutations: int


def two_sample(
    plain: Sequence[Answers],
    speculative: Sequence[Answers],
    permutations: int = 999,
    simulations: int = 100,
    seed: int = 0,
) -> TwoSample:
    """plain, speculative: prompt → repeat → tokens, as many repeats of each prompt on both sides."""
    generator = np.random.default_rng(seed)
    longest = max((len(a) for many in [*plain, *speculative] for a in many), default=1) or 1
    pairs = [
        (_vectors(one, longest), _vectors(other, longest))
        for one, other in zip(plain, speculative, strict=True)
    ]
    p_value = _p_value(pairs, permutations, generator)
    pool = np.array([token for many in [*plain, *speculative] for answer in many for token in answer])
    power: dict[str, float] = {}
    if len(pool) and simulations:
        for share in CORRUPTIONS:
            found = [
                _simulated(plain, speculative, share, pool, longest, generator) for _ in range(simulations)
            ]
            power[f"{share:g}"] = float(np.mean([p <= 0.05 for p in found]))
    detectable = next((share for share in CORRUPTIONS if power.get(f"{share:g}", 0.0) >= 0.8), None)
    return TwoSample(
        len(pairs), sum(len(a) + len(b) for a, b in pairs), p_value, power, detectable, permutations
    )


def _simulated(
    plain: Sequence[Answers],
    speculative: Sequence[Answers],
    share: float,
    pool: NDArray[np.int64],
    longest: int,
    generator: np.random.Generator,
) -> float:
    """The p-value where labels are exchanged at random (no difference) and one side then damaged."""
    pairs = []
    for one, other in zip(plain, speculative, strict=True):
        both = [*one, *other]
        order = generator.permutation(len(both))
        kept = [both[i] for i in order[: len(one)]]
        damaged = [_damage(both[i], share, pool, generator) for i in order[len(one) :]]
        pairs.append((_vectors(kept, longest), _vectors(damaged, longest)))
    return _p_value(pairs, 199, generator)


def _damage(
    answer: Sequence[int], share: float, pool: NDArray[np.int64], generator: np.random.Generator
) -> list[int]:
    tokens = np.array(answer, dtype=np.int64)
    hit = generator.random(len(tokens)) < share
    return np.where(hit, generator.choice(pool, len(tokens)), tokens).tolist()


def _p_value(pairs: list[tuple[Matrix, Matrix]], permutations: int, generator: np.random.Generator) -> float:
    """(1 + permutations at least as far apart) / (1 + permutations)."""
    stacked = np.concatenate([np.concatenate(pair) for pair in pairs])
    signs = np.stack([_signs(len(one), len(other)) for one, other in pairs]) / len(pairs)
    exchanged = generator.permuted(np.broadcast_to(signs, (permutations, *signs.shape)), axis=2)
    found = ((exchanged.reshape(permutations, -1) @ stacked) ** 2).sum(1)
    observed = float(((signs.reshape(-1) @ stacked) ** 2).sum())
    # Equal distances must count as equal however their sums were rounded.
    as_far = (found >= observed * (1 - 1e-9) - 1e-20).sum()
    return float((1 + as_far) / (1 + permutations))


def _signs(plain: int, speculative: int) -> Matrix:
    return np.concatenate([np.full(plain, -1.0 / plain), np.full(speculative, 1.0 / speculative)])


def _vectors(answers: Answers, longest: int) -> Matrix:
    """[answers, 2·BUCKETS + 1]."""
    found = np.zeros((len(answers), 2 * BUCKETS + 1))
    for row, answer in enumerate(answers):
        tokens = np.asarray(answer, dtype=np.int64)
        if len(tokens):
            found[row, :BUCKETS] = _shares(tokens * 2654435761)
        if len(tokens) > 1:
            found[row, BUCKETS:-1] = _shares(tokens[:-1] * 2654435761 + tokens[1:] * 40503)
        found[row, -1] = LENGTH_WEIGHT * len(tokens) / longest
    return found


def _shares(keys: NDArray[np.int64]) -> Matrix:
    """Counts of hashed keys by bucket, as shares."""
    mixed = (keys ^ (keys >> 15)) % BUCKETS
    return np.bincount(mixed, minlength=BUCKETS) / len(keys)
