"""What the recorded run says of settings that were not run: its acceptance, at the seconds that a round takes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from deepspec.decoding.cost import CostTable
from deepspec.decoding.request import Round
from deepspec.decoding.schedule import tempered
from deepspec.evaluation.result import EvaluationResult

THRESHOLDS = 3  # that are tried, of those predicted
DECILES = np.arange(0.1, 0.95, 0.1)


@dataclass(frozen=True)
class Costs:
    """Seconds with as many requests at once as the settings are for. verify[n−1]: the target reads n tokens a row.
    draft[k−1]: the draft proposes k a row."""

    verify: Sequence[float]
    draft: Sequence[float]

    @property
    def longest(self) -> int:
        """Drafted tokens that both tell of."""
        return min(len(self.draft), len(self.verify) - 1)

    def round(self, verified: int) -> float:
        """Of verifying so many drafted tokens; to verify none the draft must have said how sure it is of one."""
        return self.draft[max(verified, 1) - 1] + self.verify[verified]


def recorded_costs(result: EvaluationResult) -> Costs | None:
    """As the run measured them, for one request at a time."""
    steps = result.step_times
    return None if steps is None else Costs(steps.verify, steps.draft)


def table_costs(table: CostTable, rows: int, longest: int) -> Costs:
    """By a cost table, for `rows` requests at once and up to `longest` drafted tokens."""
    return Costs(
        [table.verify.at(rows, n) for n in range(1, longest + 2)],
        [table.draft.at(rows, k) for k in range(1, longest + 1)],
    )


def predicted_speedups(acceptance: Sequence[float], costs: Costs) -> list[float]:
    """Of chains of 1 … K tokens over plain decoding: (1 + Σ_{j≤k} a_j) · T(1) / (D(k) + T(k+1)).

    acceptance: [K] unconditional, of each position.
    """
    found, tau = [], 1.0
    for k, accepted in enumerate(acceptance[: costs.longest], start=1):
        tau += accepted
        found.append(tau * costs.verify[0] / costs.round(k))
    return found


def whole_rounds(result: EvaluationResult) -> Iterator[Round]:
    """Those that were not cut off and verified all that was drafted."""
    for record in result.records:
        for decoding in record.speculative:
            yield from (r for r in decoding.rounds if not r.cut and r.verified == result.conditions.k)


def confidences(result: EvaluationResult, temperatures: Sequence[float]) -> list[tuple[list[float], int]]:
    """Of each whole round: how sure the draft was of each token, calibrated as the scheduler would, and how many were
    accepted. Empty where the draft does not say."""
    rounds = list(whole_rounds(result))
    if not rounds or any(len(r.confidence) != r.drafted for r in rounds):
        return []
    padded = [*temperatures, *[1.0] * result.conditions.k]
    return [
        ([tempered(c, t) for c, t in zip(r.confidence, padded, strict=False)], r.accepted) for r in rounds
    ]


def threshold_speedup(seen: Sequence[tuple[list[float], int]], costs: Costs, threshold: float) -> float:
    """Over plain decoding, of verifying up to the first token whose confidence is below `threshold`."""
    committed = seconds = 0.0
    for sure, accepted in seen:
        verified = next((i for i, c in enumerate(sure) if c < threshold), len(sure))
        verified = min(verified, costs.longest)
        committed += 1 + min(accepted, verified)
        seconds += costs.round(verified)
    return committed * costs.verify[0] / seconds


def best_thresholds(
    seen: Sequence[tuple[list[float], int]], costs: Costs | None
) -> dict[float, float | None]:
    """Threshold → predicted speedup, of deciles of the recorded confidences those that promise most, ascending."""
    if not seen:
        return {}
    levels = np.quantile([c for sure, _ in seen for c in sure], DECILES)
    options = sorted({round(float(level), 3) for level in levels} - {0.0, 1.0})
    if costs is None:
        return dict.fromkeys(options[:: max(1, len(options) // THRESHOLDS)][:THRESHOLDS])
    speeds = {one: threshold_speedup(seen, costs, one) for one in options}
    best = sorted(speeds, key=lambda one: -speeds[one])[:THRESHOLDS]
    return {one: speeds[one] for one in sorted(best)}
