"""Summaries against sums written out, and against their own records."""

import random
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspec.decoding.request import Round
from deepspec.evaluation.result import Decoding, PromptRecord, StepTimes, Tie
from deepspec.evaluation.summary import summarise, summarise_result
from tests.reporting.synthetic import make_records, make_result, spoil


def one_round(verified: int, accepted: int, committed: int) -> Round:
    cut = committed < accepted + 1
    return Round(verified, verified, accepted, committed, cut, 0.001 * verified, 0.05, 0.002)


def record(
    rounds: list[Round], plain_seconds: float, category: str = "a", prefill: float = 0.2
) -> PromptRecord:
    tokens = list(range(1 + sum(r.committed for r in rounds)))
    seconds = sum(r.draft_seconds + r.verify_seconds + r.rest_seconds for r in rounds)
    split = [
        sum(getattr(r, part) for r in rounds) for part in ("draft_seconds", "verify_seconds", "rest_seconds")
    ]
    speculative = Decoding(tokens, "", "length", prefill, seconds, *split, rounds)
    plain = Decoding(tokens, "", "length", prefill, plain_seconds, 0.0, plain_seconds, 0.0)
    return PromptRecord("x", category, "?", 5, [plain], [speculative], [], True, None)


rounds_strategy = st.lists(
    st.integers(0, 5).flatmap(lambda v: st.tuples(st.just(v), st.integers(0, v))), min_size=1, max_size=12
).map(lambda pairs: [one_round(v, a, a + 1) for v, a in pairs])


@settings(max_examples=30, deadline=None)
@given(st.lists(rounds_strategy, min_size=1, max_size=6))
def test_tau_acceptance_and_speedup_equal_sums_written_out(texts: list[list[Round]]) -> None:
    draw = random.Random(0)
    records = [record(rounds, draw.uniform(0.5, 3.0)) for rounds in texts]
    summary = summarise(records, resamples=100)
    flat = [r for rounds in texts for r in rounds]
    assert summary.tau.value == pytest.approx(sum(r.committed for r in flat) / len(flat))
    for row in summary.acceptance:
        k = row.position
        verified = [r for r in flat if r.verified >= k]
        reached = [r for r in verified if r.accepted >= k - 1]
        hits = sum(r.accepted >= k for r in verified)
        assert row.unconditional.value == pytest.approx(hits / len(verified))
        assert row.conditional.value == (pytest.approx(hits / len(reached)) if reached else None)
    plain = sum(r.plain[0].decode_seconds for r in records)
    speculative = sum(r.speculative[0].decode_seconds for r in records)
    assert summary.speedup.value == pytest.approx(plain / speculative)  # the same tokens on both sides
    end_to_end = (plain + 0.2 * len(records)) / (speculative + 0.2 * len(records))
    assert summary.speedup_end_to_end.value == pytest.approx(end_to_end)
    assert sum(summary.committed_histogram) == summary.rounds == len(flat)
    assert sum(n * count for n, count in enumerate(summary.committed_histogram, 1)) == summary.round_tokens


def test_speedup_is_a_ratio_of_totals_and_not_a_mean_of_ratios() -> None:
    long, short = record([one_round(5, 4, 5)] * 20, 10.0), record([one_round(5, 0, 1)], 0.01)
    summary = summarise([long, short], resamples=100)
    spent = sum(r.speculative[0].decode_seconds for r in (long, short))
    assert summary.speedup.value == pytest.approx(10.01 / spent)


def test_speedup_counts_tokens_where_the_answers_have_different_lengths() -> None:
    one = record([one_round(3, 3, 4)] * 5, 4.0)
    one.plain[0].tokens = list(range(11))  # 10 tokens after the first in 4 s; speculative: 20
    summary = summarise([one], resamples=100)
    assert summary.speedup.value == pytest.approx((4.0 / 10) / (one.speculative[0].decode_seconds / 20))


def test_ideal_and_efficiency_by_hand() -> None:
    steps = StepTimes(100, verify=[1.0, 1.1, 1.2, 1.3], draft=[0.1, 0.2, 0.3], repeats=3)
    one = record([one_round(3, 2, 3), one_round(1, 0, 1), one_round(0, 0, 1)], plain_seconds=6.0)
    summary = summarise([one], resamples=100, steps=steps)
    ideal = (5 * 1.0) / ((0.3 + 1.3) + (0.1 + 1.1) + (0.0 + 1.0))
    assert summary.ideal_speedup.value == pytest.approx(ideal)
    measured = 6.0 / one.speculative[0].decode_seconds
    assert summary.efficiency.value == pytest.approx(measured / ideal)


def test_a_cut_round_pays_for_all_the_target_read() -> None:
    steps = StepTimes(100, verify=[1.0, 1.1, 1.2, 1.3], draft=[0.1, 0.2, 0.3], repeats=3)
    cut = Round(3, 1, 1, 1, True, 0.003, 0.05, 0.002)
    summary = summarise([record([cut], plain_seconds=1.0)], resamples=100, steps=steps)
    assert summary.ideal_speedup.value == pytest.approx(1.0 / (0.3 + 1.3))


def test_cut_rounds_count_with_what_was_kept() -> None:
    summary = summarise([record([one_round(5, 5, 6), one_round(5, 5, 2)], 1.0)], resamples=100)
    assert (summary.rounds, summary.round_tokens, summary.cut_rounds) == (2, 8, 1)
    assert summary.tau.value == 4.0


def test_answers_of_one_token_have_no_rounds_and_no_numbers() -> None:
    only = Decoding([2], "", "eos", 0.1, 0.0, 0.0, 0.0, 0.0)
    summary = summarise([PromptRecord("x", "a", "?", 5, [only], [only], [], True, None)] * 3, resamples=100)
    for metric in (
        summary.tau,
        summary.speedup,
        summary.plain.tokens_per_second,
        summary.speculative.tpot.p50,
    ):
        assert metric.value is None and metric.reason
    assert summary.speculative.ttft.p50.value == pytest.approx(0.1)
    assert summary.acceptance == []


def test_the_headline_is_against_the_fastest_plain_decoding() -> None:
    one = record([one_round(3, 3, 4)] * 5, 4.0)
    one.fastest = [Decoding(one.plain[0].tokens, "", "length", 0.2, 3.0)]
    summary = summarise([one], resamples=100)
    assert summary.speedup.value == pytest.approx(3.0 / one.speculative[0].decode_seconds)
    assert summary.speedup_same_loop.value == pytest.approx(4.0 / one.speculative[0].decode_seconds)
    assert summary.fastest.draft_seconds.value is None  # transformers does not tell its time split


def test_cost_of_a_million_tokens() -> None:
    summary = summarise([record([one_round(3, 3, 4)] * 5, 4.0)], resamples=100, price_per_hour=1.8)
    assert summary.plain.cost_per_million.value == pytest.approx(1.8 * (4.2 / 21) / 3600 * 1e6)


def test_equality_counts() -> None:
    records = make_records(6)
    spoil(records[0], proven=True)
    spoil(records[1], proven=False)
    records[2].equal = None
    records[3].equal, records[3].tie = False, Tie(0, 1, 2, None, None, False, "ends early")
    equality = summarise(records, resamples=100).equality
    assert asdict(equality) == {"compared": 5, "equal": 2, "proven_ties": 1, "unproven": 2}


def test_a_result_recomputes_from_its_records() -> None:
    result = make_result()
    result.conditions.price_per_hour = 0.5
    result.summary, result.categories = summarise_result(result)
    again, categories = summarise_result(result)
    assert again == result.summary
    assert categories == result.categories
    assert sum(group.rounds for group in categories.values()) == again.rounds
    assert sum(group.prompts for group in categories.values()) == again.prompts
