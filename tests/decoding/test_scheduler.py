"""Schedules inside the engine: the text stays the target's, and no more is drafted or verified than decided."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from deepspec.config.schema import DecodeConfig, ScheduleKind
from deepspec.decoding import Engine, Request, Sampling
from deepspec.decoding.cost import CostTable, Curve
from deepspec.decoding.engine import calibration_key, schedule_of
from deepspec.decoding.schedule import RoundPlan
from deepspec.decoding.scheduler import Schedule, Scheduler
from deepspec.drafts.chained import ChainedTokens
from deepspec.drafts.contract import Proposal, StaticTree
from deepspec.errors import UserError
from tests.decoding.test_engine import reference
from tests.models import VOCAB, prompts, tiny_target

THRESHOLD = Schedule("threshold", confidence_threshold=0.5)
HARDWARE = Schedule("hardware")


def before_the_first_below(sure: list[float], threshold: float) -> int:
    return next((k for k, c in enumerate(sure) if c < threshold), len(sure))


def costs(rows: int = 4, step: float = 0.2) -> CostTable:
    """A token more costs `step` of a plain step, for every number of rows; the draft costs next to nothing."""
    line = [1 + step * n for n in range(7)]
    return CostTable({}, Curve([1], list(range(1, 8)), [line]), Curve([1], [1], [[1e-3]]))


class Guess:
    """Chains whose confidence is a hash of the text so far: right now and then, and never sure for long.

    asks: go_on before each draw; else all confidences are given with the proposal (None: not even those).
    """

    needs_features = False
    capture_layers = ()

    def __init__(self, answers: dict[int, list[int]], asks: bool | None = True) -> None:
        self.answers, self.asks, self.drawn = answers, asks, 0

    def begin(self, beginning):
        return [(int(beginning.tokens[0, 0]), 1)]

    def join(self, state, new):
        return [*(state or []), *new]

    def confidence(self, state, ahead):
        return torch.tensor([[0.95, 0.9, 0.7, 0.3][(at + 3 * ahead) % 4] for _, at in state])

    def propose(self, state, control):
        ahead = [self.answers[key][at : at + control.max_tokens] for key, at in state]
        ahead = [(row + [0] * control.max_tokens)[: control.max_tokens] for row in ahead]
        logits = torch.nn.functional.one_hot(torch.tensor(ahead), VOCAB).double() * 3
        if self.asks:
            chain = ChainedTokens(control, None)
            for step in range(control.max_tokens):
                if chain.draw(logits[:, step], self.confidence(state, step).logit()) is None:
                    break
                self.drawn += 1
            return chain.proposal()
        drawn = [control.draw(logits[:, step], step - 1) for step in range(control.max_tokens)]
        self.drawn += control.max_tokens
        known = [self.confidence(state, step) for step in range(control.max_tokens)]
        return Proposal(
            torch.stack([token for token, _ in drawn], 1),
            [control.max_tokens] * len(state),
            q=None if drawn[0][1] is None else torch.stack([q for _, q in drawn], 1),
            confidence=torch.stack(known, 1) if self.asks is False else None,
        )

    def update(self, state, committed):
        state[:] = [(key, at + count) for (key, at), count in zip(state, committed.counts, strict=True)]

    def select(self, state, rows):
        state[:] = [state[row] for row in rows]


def engine_of(draft, schedule: Schedule, table: CostTable | None = None, **others) -> Engine:
    engine = Engine(tiny_target("llama"), draft, k=4, schedule=schedule, **others)
    if schedule.kind == "hardware":  # a table of its own instead of one measured here
        engine.learn_costs = lambda requests: setattr(engine.scheduler, "costs", table or costs())
    return engine


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    return [[7 + index, *text] for index, text in enumerate(prompts(5, seed=3))]


@pytest.fixture(scope="module")
def answers(texts) -> dict[int, list[int]]:
    """The right answers, every sixth token spoiled."""
    found = {text[0]: reference("llama", text, 40) for text in texts}
    return {key: [t if i % 6 else (t + 1) % VOCAB for i, t in enumerate(a)] for key, a in found.items()}


@pytest.mark.parametrize("asks", [True, False, None])
@pytest.mark.parametrize("schedule", [THRESHOLD, HARDWARE, Schedule(fallback=True)], ids=lambda s: s.kind)
def test_greedy_text_is_the_targets_under_every_schedule(texts, answers, schedule, asks) -> None:
    requests = [Request(text, 32 + index) for index, text in enumerate(texts)]
    expected = [reference("llama", text, 32 + index) for index, text in enumerate(texts)]
    for rows in (1, 3):
        results = engine_of(Guess(answers, asks), schedule, max_batch_size=rows).generate(requests)
        assert [result.tokens for result in results] == expected
        rounds = [r for result in results for r in result.rounds]
        assert any(r.accepted for r in rounds)
        assert all(r.accepted <= r.verified <= r.scheduled <= r.drafted for r in rounds)
        assert schedule.fallback or len({r.scheduled for r in rounds}) > 2


@pytest.mark.parametrize(("schedule", "asks"), [(THRESHOLD, True), (THRESHOLD, False), (HARDWARE, True)])
def test_what_is_verified_is_what_the_pure_function_says(texts, answers, schedule, asks) -> None:
    draft = Guess(answers, asks)
    (result,) = engine_of(draft, schedule).generate([Request(texts[0], 40)])
    at = 1
    for r in result.rounds[:-4]:  # the last ones are shortened by the answer's end
        sure = [float(draft.confidence([(0, at)], step)) for step in range(4)]
        if schedule is THRESHOLD:
            said = before_the_first_below(sure, 0.5)
        else:
            seconds = costs().round_seconds(1, 4)
            rate = [sum(math.prod(sure[:k]) for k in range(n + 1)) / seconds[n] for n in range(5)]
            said = next((n for n in range(4) if not rate[n + 1] > rate[n]), 4)
        assert r.scheduled == said
        assert r.drafted == (said if asks else 4)  # asked before each draw, nothing is drafted in vain
        at += r.committed


@pytest.mark.parametrize("asks", [True, False])
def test_calibrated_confidences_decide(texts, answers, asks) -> None:
    """σ(logit(c)/T) in float64, and rounds that carry what the draft itself said."""
    temperatures = (3.0, 0.5)
    draft = Guess(answers, asks)
    schedule = replace(THRESHOLD, confidence_threshold=0.66, temperatures=temperatures)
    (result,) = engine_of(draft, schedule).generate([Request(texts[0], 40)])
    at, seen = 1, set()
    for r in result.rounds[:-4]:
        sure = [float(draft.confidence([(0, at)], step)) for step in range(4)]
        odds = [math.log(c / (1 - c)) / t for c, t in zip(sure, (*temperatures, 1, 1), strict=True)]
        assert r.scheduled == before_the_first_below([1 / (1 + math.exp(-o)) for o in odds], 0.66)
        assert r.confidence == pytest.approx(sure[: r.scheduled], abs=1e-6)
        seen.add(r.scheduled != before_the_first_below(sure, 0.66))
        at += r.committed
    assert seen == {True, False}


def test_temperatures_come_from_the_drafts_configuration(answers) -> None:
    draft = Guess(answers)
    decode = DecodeConfig(schedule=ScheduleKind.threshold, temperature=0.7)
    key = "temperature=0.7,top_k=0,top_p=1,min_p=0,repetition_penalty=1,rule=block"
    assert calibration_key(decode) == key
    draft.config = SimpleNamespace(confidence_temperatures={key: [1.5, 2.0]})
    assert schedule_of(decode, draft).temperatures == (1.5, 2.0)
    assert schedule_of(replace(decode, temperature=0.8), draft).temperatures == ()
    assert schedule_of(replace(decode, schedule=ScheduleKind.fixed), draft) == Schedule()


def test_sampled_text_has_the_same_uniforms_under_any_schedule(texts, answers) -> None:
    """A schedule that never cuts is the fixed one, token for token; batch mates change nothing under a threshold."""
    requests = [Request(text, 20, Sampling(0.9), seed=index) for index, text in enumerate(texts)]

    def tokens(schedule: Schedule, rows: int) -> list[list[int]]:
        engine = engine_of(Guess(answers), schedule, max_batch_size=rows)
        return [result.tokens for result in engine.generate(requests)]

    fixed = tokens(Schedule(), 1)
    assert tokens(Schedule("threshold", confidence_threshold=0.0), 1) == fixed
    assert tokens(THRESHOLD, 1) == tokens(THRESHOLD, 3) != fixed


def test_hardware_admission_drafts_less_where_tokens_cost_more(texts, answers) -> None:
    scheduled = []
    for step in (0.02, 0.3, 2.0):
        (result,) = engine_of(Guess(answers), HARDWARE, costs(step=step)).generate([Request(texts[0], 40)])
        scheduled.append(sum(r.scheduled for r in result.rounds) / len(result.rounds))
    assert scheduled[0] > scheduled[1] > scheduled[2] == 0


def test_without_confidence_past_acceptance_decides(texts, answers) -> None:
    """A draft that is never right is soon asked for nothing, and now and then again."""
    wrong = {
        key: [(t + 1) % VOCAB for t in reference("llama", [key, *text[1:]], 130)]
        for key, text in ((t[0], t) for t in texts)
    }
    (result,) = engine_of(Guess(wrong, None), THRESHOLD).generate([Request(texts[0], 120)])
    drafted = [r.drafted for r in result.rounds]
    assert sum(d > 0 for d in drafted[:3]) and sum(d > 0 for d in drafted[20:]) < len(drafted[20:]) / 2
    assert any(d > 0 for d in drafted[20:])


def test_a_busy_device_verifies_only_what_is_likely() -> None:
    level = 0.2
    schedule = Schedule(confidence_threshold=0.6, utilization_threshold=0.5)
    scheduler = Scheduler(schedule, 4, utilization=lambda: level)
    assert scheduler.plan([9]) is None
    level = 0.8
    plan = scheduler.plan([9])
    assert plan is not None and plan.through([[0.9, 0.5, 0.9]]) == [1]


def test_a_row_that_can_keep_fewer_is_cut_there() -> None:
    assert RoundPlan([1, 3], 2, 0.0, None).through([[0.9] * 4, [0.9] * 4]) == [1, 2]
    assert RoundPlan([0, 0], 2, 0.0, None).through([[0.9] * 4, [0.9] * 4]) == [0, 0]


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (Schedule("adaptive"), r"decode\.schedule is 'adaptive'"),
        (Schedule("threshold", confidence_threshold=1.5), "between 0 and 1"),
        (Schedule("threshold", max_candidates=0), "max_candidates is 0"),
    ],
)
def test_impossible_schedules_are_refused(schedule: Schedule, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Engine(tiny_target("llama"), Guess({}), schedule=schedule)


def test_a_tree_is_not_cut() -> None:
    with pytest.raises(UserError, match="a tree is verified whole"):
        Engine(tiny_target("llama"), Guess({}), tree=StaticTree((-1, -1)), schedule=THRESHOLD)
