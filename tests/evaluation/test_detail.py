"""Acceptance in detail, against plain loops over the rounds."""

import pytest

from deepspec.decoding.request import Round
from deepspec.evaluation.detail import acceptance_detail, bucket, tries
from deepspec.evaluation.result import Decoding, PromptRecord
from tests.reporting.synthetic import make_records


def a_round(accepted: int, verified: int, cut: bool = False) -> Round:
    return Round(verified, verified, accepted, accepted + (not cut), cut, 0.1, 0.1, 0.1)


def record(
    tokens: list[int], rounds: list[Round], prompt: int = 10, outside: list[int] | None = None
) -> PromptRecord:
    speculative = Decoding(tokens, "", "eos", 0.1, 1.0, rounds=rounds, outside=outside)
    plain = Decoding(tokens, "", "eos", 0.1, 2.0)
    return PromptRecord(f"p{prompt}", "c", "?", prompt, [plain], [speculative], [], True, None)


def test_tries_follow_the_answer() -> None:
    # Token 0 is the prefill's. Round 1 accepts 5 6 and replaces the third; round 2 accepts nothing; round 3 all
    # of two and its bonus; round 4 is cut by the end token, which was accepted.
    tokens = [9, 5, 6, 7, 8, 1, 2, 3, 0]
    rounds = [a_round(2, 3), a_round(0, 2), a_round(2, 2), a_round(1, 1, cut=True)]
    found = list(tries(record(tokens, rounds).speculative[0]))
    assert found == [(1, True), (2, True), (3, False), (4, False), (5, True), (6, True), (8, True)]


def test_totals_and_histogram() -> None:
    rounds = [a_round(2, 3), a_round(0, 2), a_round(2, 2), a_round(0, 0)]
    detail = acceptance_detail([record(list(range(9)), rounds)], 100)
    assert (detail.drafted, detail.verified, detail.accepted) == (7, 7, 4)
    assert detail.hit_rate.value == pytest.approx(4 / 7)
    assert detail.rejection_rate.value == pytest.approx(
        2 / 3
    )  # a round that verified nothing rejects nothing
    assert detail.accepted_histogram == [2, 0, 2]


def test_inside_and_outside_the_draft_vocabulary() -> None:
    rounds = [a_round(2, 3), a_round(0, 2)]
    detail = acceptance_detail([record([9, 5, 6, 7, 8], rounds, outside=[0, 3, 4])], 100)
    inside, outside = detail.vocabulary
    assert (inside.tried, inside.acceptance.value) == (2, 1.0)
    assert (outside.tried, outside.acceptance.value) == (2, 0.0)
    assert acceptance_detail([record([9, 5], [a_round(0, 1)])], 100).vocabulary == []


def test_tenths_of_the_tokens_by_frequency() -> None:
    # Token 1 is 18 of 20 tokens and fills the first tenth; 2 and 3 lie at nine tenths.
    tokens = [1] * 18 + [2, 3]
    rounds = [a_round(1, 1)] * 8 + [a_round(0, 1)] * 3
    detail = acceptance_detail([record(tokens, rounds)], 100)
    assert [(group.name, group.tried) for group in detail.frequency] == [("tenth 1", 9), ("tenth 10", 2)]
    assert sum(group.tried for group in detail.frequency) == 11


def test_lengths_stay_apart_and_contexts_grow() -> None:
    tokens, rounds = list(range(100)), [a_round(8, 8)] * 11
    records = [record(tokens, rounds, 250), record(tokens, rounds, 1000), record(tokens, rounds, 2000)]
    detail = acceptance_detail(records, 100)
    by = {(group.kind, group.name): group for group in detail.groups}
    names = ["below 256 tokens", "256 to 1,024 tokens", "above 1,024 tokens"]
    assert [group.name for group in detail.groups if group.kind == "prompt length"] == names
    assert [by["prompt length", name].rounds for name in names] == [11, 11, 11]
    # The round after 1 token has 251 of context, that after 10 has 260; after 19, 1019; after 28, 1028.
    assert [by["context", name].rounds for name in names] == [1, 10 + 3, 8 + 11]
    assert by["context", names[1]].prompts == 2
    assert [bucket(n) for n in (255, 256, 1024, 1025)] == [names[0], names[1], names[1], names[2]]


def test_groups_are_the_categories_summaries() -> None:
    records = make_records(12)
    for number, one in enumerate(records):
        one.turn = 1 + number % 2
    detail = acceptance_detail(records, 100)
    tasks = [group for group in detail.groups if group.kind == "task"]
    assert len(tasks) == 4 and sum(group.prompts for group in tasks) == 12
    for group in detail.groups:
        if group.kind == "turn":
            rounds = [
                r
                for one in records
                if f"turn {one.turn}" == group.name
                for d in one.speculative
                for r in d.rounds
            ]
            assert group.rounds == len(rounds)
            assert group.tau.value == pytest.approx(sum(r.committed for r in rounds) / len(rounds))


def test_nothing_makes_an_empty_detail() -> None:
    detail = acceptance_detail([], 100)
    assert detail.drafted == 0 and detail.groups == [] and detail.hit_rate.reason
