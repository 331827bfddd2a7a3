"""Does a draft's confidence mean what it says? Reliability by position, and sequential temperature scaling.

The confidence at position k is the probability that the k-th drafted token is accepted given that those before it
were. A scheduler works with their product, the survival a_k = Π_{i≤k} c_i, so this is what is calibrated (Cheng et
al. 2026, arXiv 2607.05147, §3.2): left to right, each position gets the temperature that brings the survival
closest to the share of rounds that accepted at least k tokens, those before it held fixed.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deepspec.artifacts import MANIFEST, SUMS, file_sha256, write_json
from deepspec.decoding.request import Round
from deepspec.evaluation.findings import Calibration, Reliability
from deepspec.evaluation.result import PromptRecord

Array = NDArray[np.float64]
GRID = np.exp(np.linspace(np.log(0.2), np.log(5.0), 81))  # temperatures tried; 1 is the middle one
BINS = 10
EPSILON = 1e-6


@dataclass(frozen=True)
class Rounds:
    """n rounds of K positions. confidence: [n, K], NaN where none was given. accepted: [n], drafted tokens."""

    confidence: Array
    accepted: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.accepted)


def rounds_with_confidence(rounds: Sequence[Round]) -> Rounds:
    """The rounds that carry confidences for what they verified; those cut by an end token are left out, as what
    would have followed is unknown."""
    kept = [r for r in rounds if r.confidence and not r.cut]
    width = max((min(len(r.confidence), r.verified) for r in kept), default=0)
    confidence = np.full((len(kept), width), np.nan)
    for row, r in enumerate(kept):
        known = r.confidence[: r.verified]
        confidence[row, : len(known)] = known
    return Rounds(confidence, np.array([r.accepted for r in kept], dtype=np.int64))


def survival(confidence: Array, temperatures: Sequence[float]) -> Array:
    """[n, K] the product up to each position, each confidence's logit divided by its position's temperature."""
    scaled = [scale(confidence[:, k], t) for k, t in enumerate(temperatures)]
    return np.cumprod(np.stack(scaled, 1), 1, dtype=np.float64) if scaled else confidence[:, :0]


def scale(confidence: Array, temperature: float) -> Array:
    """σ(logit(c) / T)."""
    clipped = np.clip(confidence, EPSILON, 1 - EPSILON)
    return 1 / (1 + np.exp(-np.log(clipped / (1 - clipped)) / temperature))


def fit_temperatures(rounds: Rounds) -> list[float]:
    """One temperature a position, [K]; a position no round verified keeps 1."""
    found: list[float] = []
    before = np.ones(len(rounds))
    for k in range(rounds.confidence.shape[1]):
        known = ~np.isnan(rounds.confidence[:, k])
        label = (rounds.accepted > k).astype(np.float64)
        errors = [
            calibration_error(before[known] * scale(rounds.confidence[known, k], t), label[known])
            for t in GRID
        ]
        # Of equally good ones the nearest to 1: with few rounds whole stretches of the grid are equal.
        best = min(range(len(GRID)), key=lambda i: (round(errors[i], 9), abs(np.log(GRID[i]))))
        found.append(float(GRID[best]) if known.any() else 1.0)
        before = before * scale(rounds.confidence[:, k], found[-1])
    return found


def calibration_error(predicted: Array, label: Array, bins: int = BINS) -> float:
    """Expected calibration error over bins of equal width; 0 without samples."""
    return sum(abs(mean - share) * n for mean, share, n in _bins(predicted, label, bins)) / max(len(label), 1)


def reliability(predicted: Array, label: Array, position: int) -> Reliability:
    """All numbers of one position. predicted: [n] survival, label: [n] 0 or 1."""
    return Reliability(
        position=position,
        rounds=len(label),
        accepted=float(label.mean()),
        ece=calibration_error(predicted, label),
        brier=float(((predicted - label) ** 2).mean()),
        auroc=auroc(predicted, label),
        bins=[[mean, share, float(n)] for mean, share, n in _bins(predicted, label, BINS)],
    )


def auroc(predicted: Array, label: Array) -> float | None:
    """P(a confidence of an accepted one is above that of a rejected one), ties one half (Mann–Whitney)."""
    positive = label > 0.5
    n, m = int(positive.sum()), int((~positive).sum())
    if not n or not m:
        return None
    _, index, counts = np.unique(predicted, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2  # mean rank of each value, 1-based
    return float((ranks[index][positive].sum() - n * (n + 1) / 2) / (n * m))


def calibrate(records: Sequence[PromptRecord], key: str) -> Calibration | None:
    """Fit on the rounds of one half of the prompts, report on those of the other; None without confidences."""
    halves: tuple[list[Round], list[Round]] = ([], [])
    for number, record in enumerate(sorted(records, key=lambda r: _order(r.id))):
        halves[number % 2].extend(r for d in record.speculative for r in d.rounds)
    fitted, reported = (rounds_with_confidence(half) for half in halves)
    if not len(fitted) or not len(reported):
        return None
    temperatures = fit_temperatures(fitted)
    return Calibration(
        key=key,
        temperatures=temperatures,
        fitted_rounds=len(fitted),
        reported_rounds=len(reported),
        before=_table(reported, [1.0] * len(temperatures)),
        after=_table(reported, temperatures),
    )


def store(folder: Path, calibration: Calibration) -> None:
    """Put the temperatures into the configuration of the draft in `folder`, under their key, where schedules look.

    The artifact's manifest is brought up to date with it. Killed in between, or on a full disk, the file is without
    a sum for a while, never with a wrong one: the draft would count as damaged.
    """
    path = folder / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    known = content.get("confidence_temperatures") or {}
    temperatures = [round(t, 4) for t in calibration.temperatures]
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    others = {name: one for name, one in manifest.get(SUMS, {}).items() if name != path.name}
    if SUMS in manifest:
        write_json(folder / MANIFEST, manifest | {SUMS: others})
    write_json(path, content | {"confidence_temperatures": known | {calibration.key: temperatures}})
    if SUMS in manifest:
        sum_of_file = file_sha256(path)
        write_json(
            folder / MANIFEST, manifest | {SUMS: dict(sorted({**others, path.name: sum_of_file}.items()))}
        )


def _table(rounds: Rounds, temperatures: Sequence[float]) -> list[Reliability]:
    width = min(len(temperatures), rounds.confidence.shape[1])
    predicted = survival(rounds.confidence, temperatures[:width])
    found = []
    for k in range(width):
        known = ~np.isnan(predicted[:, k])
        if known.any():
            label = (rounds.accepted[known] > k).astype(np.float64)
            found.append(reliability(predicted[known, k], label, k + 1))
    return found


def _bins(predicted: Array, label: Array, bins: int) -> list[tuple[float, float, int]]:
    """(mean prediction, share of 1, number) of every bin that has samples."""
    place = np.minimum((predicted * bins).astype(np.int64), bins - 1)
    counts = np.bincount(place, minlength=bins)
    sums, hits = np.bincount(place, predicted, bins), np.bincount(place, label, bins)
    return [(float(sums[b] / n), float(hits[b] / n), int(n)) for b, n in enumerate(counts) if n]


def _order(name: str) -> int:
    """A shuffle of the prompts that depends on their ids alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
