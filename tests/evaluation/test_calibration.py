"""Calibration: numbers against loops over pairs and bins, temperatures against the ones that spoilt the data."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspec.decoding.request import Round
from deepspec.evaluation.calibration import (
    Rounds,
    auroc,
    calibrate,
    calibration_error,
    fit_temperatures,
    reliability,
    rounds_with_confidence,
    scale,
    survival,
)
from tests.reporting.synthetic import make_records

PAIRS = st.lists(st.tuples(st.sampled_from([0.05, 0.2, 0.35, 0.5, 0.8, 1.0]), st.booleans()), min_size=1)


@given(PAIRS)
def test_auroc_is_the_share_of_pairs(pairs: list[tuple[float, bool]]) -> None:
    good, bad = [p for p, hit in pairs if hit], [p for p, hit in pairs if not hit]
    wins = [1.0 if p > q else 0.5 if p == q else 0.0 for p in good for q in bad]
    found = auroc(np.array([p for p, _ in pairs]), np.array([float(hit) for _, hit in pairs]))
    assert found == (pytest.approx(sum(wins) / len(wins)) if wins else None)


@given(PAIRS)
def test_ece_and_brier_are_loops(pairs: list[tuple[float, bool]]) -> None:
    total = 0.0
    for b in range(10):
        inside = [(p, hit) for p, hit in pairs if b / 10 <= p < (b + 1) / 10 or (b == 9 and p == 1.0)]
        if inside:
            n = len(inside)
            total += n / len(pairs) * abs(sum(p for p, _ in inside) / n - sum(hit for _, hit in inside) / n)
    predicted, label = np.array([p for p, _ in pairs]), np.array([float(hit) for _, hit in pairs])
    assert calibration_error(predicted, label) == pytest.approx(total)
    found = reliability(predicted, label, 1)
    assert found.brier == pytest.approx(sum((p - hit) ** 2 for p, hit in pairs) / len(pairs))
    assert sum(n for _, _, n in found.bins) == len(pairs)


def simulated(generator: np.random.Generator, n: int, spoil: list[float]) -> Rounds:
    """Rounds whose true conditional chances are known, told with logits multiplied by `spoil`."""
    true = generator.uniform(0.3, 0.95, (n, len(spoil)))
    passed = np.cumprod(generator.random((n, len(spoil))) < true, 1)
    told = np.stack([scale(true[:, k], 1 / factor) for k, factor in enumerate(spoil)], 1)
    return Rounds(told, passed.sum(1))


def test_temperatures_undo_what_spoilt_the_confidences() -> None:
    spoil = [2.0, 1.0, 3.0]
    rounds = simulated(np.random.default_rng(0), 40000, spoil)
    assert fit_temperatures(rounds) == pytest.approx(spoil, rel=0.2)
    held_out = simulated(np.random.default_rng(1), 40000, spoil)
    for temperatures, better in (([1.0] * 3, False), (fit_temperatures(rounds), True)):
        predicted = survival(held_out.confidence, temperatures)
        errors = [calibration_error(predicted[:, k], (held_out.accepted > k) * 1.0) for k in range(3)]
        assert (max(errors) < 0.02) is better


@settings(max_examples=30)
@given(st.floats(0.001, 0.999), st.floats(0.2, 5.0))
def test_a_temperature_divides_the_logit(confidence: float, temperature: float) -> None:
    found = float(scale(np.array([confidence]), temperature)[0])
    assert np.log(found / (1 - found)) == pytest.approx(np.log(confidence / (1 - confidence)) / temperature)


def test_rounds_of_other_lengths_and_cut_ones() -> None:
    def a_round(confidence: list[float], verified: int, accepted: int, cut: bool = False) -> Round:
        return Round(3, verified, accepted, accepted + 1, cut, 0, 0, 0, confidence=confidence)

    rounds = [
        a_round([0.9, 0.8, 0.7], 2, 1),  # the third was not verified
        a_round([0.5], 1, 0),
        a_round([], 2, 2),
        a_round([0.9, 0.9], 2, 1, cut=True),
    ]
    found = rounds_with_confidence(rounds)
    assert found.accepted.tolist() == [1, 0]
    np.testing.assert_array_equal(found.confidence, [[0.9, 0.8], [0.5, np.nan]])
    assert len(fit_temperatures(found)) == 2


def test_a_calibration_is_fitted_and_reported_on_different_prompts() -> None:
    records = make_records(24)
    assert calibrate(records, "k") is None  # no draft that tells how sure it is
    generator = np.random.default_rng(2)
    for record in records:
        for r in record.speculative[0].rounds:
            r.confidence = generator.uniform(0.2, 0.9, r.drafted).round(3).tolist()
    found = calibrate(records, "k")
    assert found is not None and found.key == "k" and len(found.temperatures) == 5
    usable = [r for record in records for r in record.speculative[0].rounds if not r.cut and r.confidence]
    assert found.fitted_rounds + found.reported_rounds == len(usable)
    assert [row.position for row in found.before] == [row.position for row in found.after] == [1, 2, 3, 4, 5]
    assert all(row.rounds <= found.reported_rounds for row in found.before)
    # The order of the records decides nothing.
    assert calibrate(records[::-1], "k") == found
