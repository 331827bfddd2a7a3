"""Order of decodings, records, ties, prompts: with decoders that only pretend."""

import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspec.decoding.request import Request, Result, Round, Sampling
from deepspec.errors import UserError
from deepspec.evaluation.baselines import OURS, TRANSFORMERS, time_baselines
from deepspec.evaluation.ideal import MOST_LENGTHS, MOST_PROMPTS, StepClock, lengths
from deepspec.evaluation.machine import CpuTimes, NoiseMeter
from deepspec.evaluation.measure import Decode, Hooks, Plan, decodings_of, measure, records
from deepspec.evaluation.prompts import Prompt, choose, fitting, read_held_out, spread
from deepspec.evaluation.result import StepTimes
from deepspec.evaluation.ties import prove_tie
from deepspec.target.fit import check_fit
from tests.reporting.synthetic import make_records

PROMPTS = [Prompt(f"p{i}", "ab"[i % 2], f"question {i}", (1, 2, i)) for i in range(4)]


def pretending(name: str, log: list[str], answer: list[int]) -> Decode:
    def decode(request: Request) -> Result:
        log.append(f"{request.id}{name}")
        rounds = [Round(2, 2, 1, 2, False, 0.01, 0.05, 0.0)] * ((len(answer) - 1) // 2)
        return Result(request.id, list(answer), "length", 0.2, 0.5, rounds)

    return decode


def test_a_warm_up_is_as_short_as_asked() -> None:
    asked: list[int] = []

    def decode(request: Request) -> Result:
        asked.append(request.max_new_tokens)
        return Result(request.id, [1], "length", 0.0, 1.0)

    measure(PROMPTS[:2], {"A": decode}, Plan(8, (), warmup=1, warmup_tokens=3))
    measure(PROMPTS[:1], {"A": decode}, Plan(2, (), warmup=1, warmup_tokens=3))
    measure(PROMPTS[:1], {"A": decode}, Plan(8, (), warmup=1))
    assert asked == [3, 8, 8, 2, 2, 8, 8]


def test_arms_take_turns_and_warm_up_is_not_counted() -> None:
    log: list[str] = []
    done: list[None] = []
    arms = {name: pretending(name, log, [5, 6, 7]) for name in "AB"}
    plan = Plan(8, (0,), repeats=2, warmup=1)
    results = measure(PROMPTS[:2], arms, plan, Hooks(progress=lambda: done.append(None)))
    assert log == ["p0A", "p0B", "p0A", "p0B", "p0B", "p0A", "p1B", "p1A", "p1A", "p1B"]
    assert len(done) == len(log) == decodings_of(2, 2, plan)
    assert all(len(repeats) == 2 for arm in results.values() for repeats in arm)


def test_every_arm_is_first_equally_often() -> None:
    log: list[str] = []
    measure(
        PROMPTS[:3], {name: pretending(name, log, [1]) for name in "ABC"}, Plan(8, (), repeats=2, warmup=0)
    )
    assert Counter(entry[-1] for entry in log[::3]) == {"A": 2, "B": 2, "C": 2}


def test_requests_depend_on_seed_prompt_and_repeat_alone() -> None:
    plan = Plan(8, (0,), seed=3)
    seeds = {plan.request(prompt, repeat).seed for prompt in PROMPTS for repeat in range(3)}
    assert len(seeds) == 12
    assert plan.request(PROMPTS[1], 2) == Plan(8, (0,), seed=3).request(PROMPTS[1], 2)
    assert plan.request(PROMPTS[0], 0).seed != Plan(8, (0,), seed=4).request(PROMPTS[0], 0).seed


def test_records_keep_rounds_split_and_equality() -> None:
    answer = [5, 6, 7, 8, 9]
    arms = {"plain": pretending("A", [], answer), "speculative": pretending("B", [], answer)}
    results = measure(PROMPTS, arms, Plan(8, (0,)))
    found = records(PROMPTS, results, lambda tokens: "-".join(map(str, tokens)), never)
    first = found[0]
    assert first.equal is True and first.tie is None and first.fastest == []
    assert first.speculative[0].text == "5-6-7-8-9"
    assert len(first.speculative[0].rounds) == 2 and first.plain[0].rounds == []
    parts = first.speculative[0]
    assert parts.draft_seconds == pytest.approx(0.02) and parts.rest_seconds == pytest.approx(0.5 - 0.12)
    assert records(PROMPTS, results, str, None)[0].equal is None


def never(prompt: object, answer: object) -> tuple[torch.Tensor, torch.Tensor]:
    raise AssertionError("equal answers need no proof")


def test_a_differing_repeat_makes_the_record_differ() -> None:
    answers = iter([[5, 6], [5, 7]])
    results = measure(PROMPTS[:1], {"plain": pretending("A", [], [5, 6])}, Plan(8, (0,), repeats=2, warmup=0))
    results["speculative"] = [[Result("p0", next(answers), "length", 0.1, 0.1) for _ in range(2)]]
    (record,) = records(PROMPTS[:1], results, str, lambda prompt, answer: (torch.eye(9)[6], torch.eye(9)[6]))
    assert record.equal is False and record.tie is not None and not record.tie.proven


@pytest.mark.parametrize(
    ("first", "second", "proven"),
    [
        ([0.0, 1.0, 1.01, 0.0], [0.0, 1.01, 1.0, 0.0], True),  # the two forwards choose differently
        ([0.0, 1.0, 1.01, 0.0], [0.0, 1.0, 1.004, 0.0], True),  # margin 0.01 ≤ 2·0.006
        ([0.0, 1.0, 1.01, 0.0], [0.0, 1.0, 1.006, 0.0], False),  # margin 0.01 > 2·0.004
        ([0.0, 1.0, 1.01, 0.0], [0.0, 1.0, 1.01, 0.0], False),  # equal forwards excuse nothing
        (
            [0.0, 0.1, 1.01, 1.01],
            [0.0, 0.1, 1.011, 1.01],
            False,
        ),  # a tie of the top two, but 1 is not one of them
    ],
)
def test_ties_are_proven_by_margin_and_difference(
    first: list[float], second: list[float], proven: bool
) -> None:
    asked: list[tuple[list[int], list[int]]] = []

    def two_ways(prompt: list[int], answer: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append((list(prompt), list(answer)))
        return torch.tensor(first, dtype=torch.float64), torch.tensor(second, dtype=torch.float64)

    tie = prove_tie(two_ways, [9, 9], [4, 4, 1, 0], [4, 4, 2, 3])
    assert tie is not None
    assert asked == [([9, 9], [4, 4])]
    assert (tie.position, tie.plain_token, tie.speculative_token, tie.proven) == (2, 1, 2, proven)


@given(
    st.lists(st.floats(-3, 3), min_size=4, max_size=4), st.lists(st.floats(-0.5, 0.5), min_size=4, max_size=4)
)
def test_two_argmaxes_of_forwards_that_differ_are_always_a_proven_tie(
    logits: list[float], noise: list[float]
) -> None:
    one = torch.tensor(logits, dtype=torch.float64)
    other = one + torch.tensor(noise, dtype=torch.float64)
    a, b = int(one.argmax()), int(other.argmax())
    tie = prove_tie(lambda prompt, answer: (one, other), [1], [a], [b])
    assert tie is None if a == b else tie is not None and tie.proven


def test_an_answer_that_stops_early_is_never_excused() -> None:
    tie = prove_tie(never, [1], [4, 5, 6], [4, 5])
    assert tie is not None and not tie.proven and (tie.position, tie.speculative_token) == (2, None)
    assert prove_tie(never, [1], [4, 5], [4, 5]) is None


@given(st.lists(st.sampled_from("abcd"), max_size=40), st.integers(0, 30))
def test_prompts_are_spread_evenly_over_categories(categories: list[str], number: int) -> None:
    prompts = [Prompt(str(i), category, "", (1,)) for i, category in enumerate(categories)]
    chosen = spread(prompts, number)
    assert len(chosen) == min(number, len(prompts)) == len({prompt.id for prompt in chosen})
    assert chosen == spread(prompts, number)
    available, taken = Counter(categories), Counter(prompt.category for prompt in chosen)
    for name in available:  # nobody has two fewer than another, unless it has no more to give
        assert taken[name] == available[name] or taken[name] >= max(taken.values(), default=0) - 1


def test_the_sweep_takes_other_prompts_while_there_are_any() -> None:
    main, sweep, shared = choose(PROMPTS, main=2, sweep=2)
    assert not {p.id for p in main} & {p.id for p in sweep} and shared == 0
    main, sweep, shared = choose(PROMPTS, main=3, sweep=3)
    assert len(sweep) == 3 and shared == 2 == len({p.id for p in main} & {p.id for p in sweep})


def test_prompts_without_room_are_counted() -> None:
    kept, left_out = fitting([*PROMPTS, Prompt("long", "a", "", (1,) * 50)], 20)
    assert kept == PROMPTS and list(left_out.values()) == [1]


def test_held_out_prompts_are_read_or_refused_by_line(tmp_path: Path) -> None:
    file = tmp_path / "held_out_prompts.jsonl"
    row = (
        '{"id": "a", "category": "c", "messages": [{"role": "user", "content": "Why?"}], "tokens": [1, 2]}\n'
    )
    file.write_text(row + '{"id": "b"}\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"Row 2 .* make it"):
        read_held_out(tmp_path, "make it")
    file.write_text(row, encoding="utf-8")
    assert read_held_out(tmp_path, "make it") == [Prompt("a", "c", "Why?", (1, 2))]
    file.write_text(row.replace("Why?", "One.\u2028Two.\x85Three."), encoding="utf-8")
    (prompt,) = read_held_out(tmp_path, "make it")
    assert prompt.text == "One.\u2028Two.\x85Three."
    file.write_text(row + '{"id": \n', encoding="utf-8")
    with pytest.raises(UserError, match=r"cannot be read.* make it"):
        read_held_out(tmp_path, "make it")
    file.write_text("", encoding="utf-8")
    with pytest.raises(UserError, match="no held-out prompts"):
        read_held_out(tmp_path, "make it")


def test_steps_are_timed_after_each_prompt_in_alternating_order() -> None:
    order: list[str] = []
    now = 0.0

    def step(name: str, n: int, seconds: float) -> Callable[[], None]:
        def run() -> None:
            nonlocal now
            order.append(f"{name}{n}")
            now += seconds

        return run

    steps = StepClock(1, prompts=6, clock=lambda: now)
    assert [steps.wants(number) for number in range(6)] == [True] * 6
    for number in range(6):
        slow = 100.0 if number == 0 else 1.0  # the machine was disturbed at the first prompt
        steps.take(
            lambda n, slow=slow: step("v", n, n * slow),
            lambda j, slow=slow: step("d", j, 0.25 * slow),
            10 + number,
        )
    assert order[:9] == ["v1", "v2", "d1", "v1", "v2", "d1", "d1", "v2", "v1"]
    assert steps.result() == StepTimes(context=12, verify=[1.0, 2.0], draft=[0.25], repeats=12)
    assert StepClock(1, prompts=6).result() is None


def test_long_rounds_are_timed_at_a_few_lengths_only() -> None:
    now, steps_run = 0.0, 0

    def step(n: int) -> Callable[[], None]:
        def run() -> None:
            nonlocal now, steps_run
            steps_run += 1
            now += 3.0 + 0.5 * n

        return run

    steps = StepClock(400, prompts=100, clock=lambda: now)
    timed = [number for number in range(100) if steps.wants(number)]
    for _ in timed:
        steps.take(step, step, 10)
    result = steps.result()
    assert len(timed) <= MOST_PROMPTS and steps_run <= len(timed) * 2 * 2 * MOST_LENGTHS
    assert result is not None and len(result.verify) == 401 and len(result.draft) == 400
    assert result.verify == pytest.approx([3.0 + 0.5 * n for n in range(1, 402)])  # what is a line stays one


@given(st.integers(1, 5000))
def test_timed_lengths_reach_from_one_to_the_longest(longest: int) -> None:
    found = lengths(longest)
    assert found[0] == 1 and found[-1] == longest and len(found) <= MOST_LENGTHS
    assert found == sorted(set(found))


def test_after_each_prompt_its_results_are_handed_on() -> None:
    log: list[str] = []
    arms = {name: pretending(name, log, [5, 6, 7]) for name in "AB"}

    def after(number: int, results: Mapping[str, Result]) -> None:
        log.append(f"after {number} {sorted(results)} {results['A'].id}")

    measure(PROMPTS[:2], arms, Plan(8, (0,), warmup=0), Hooks(after=after))
    assert log == ["p0A", "p0B", "after 0 ['A', 'B'] p0", "p1B", "p1A", "after 1 ['A', 'B'] p1"]


def test_texts_of_transformers_that_are_not_ours_are_counted() -> None:
    other = pretending("T", [], [5, 6, 8])
    ways = {
        (OURS, "float32"): pretending("A", [], [5, 6, 7]),
        (TRANSFORMERS, "float32"): lambda request: pretending("T", [], [5, 6, 7 + (request.id == "p1")])(
            request
        ),
        (OURS, "bfloat16"): other,
        (TRANSFORMERS, "bfloat16"): other,
    }
    plan = Plan(8, (0,))
    found = {(b.decoder, b.dtype): b.differing for b in time_baselines(ways, PROMPTS, plan, resamples=100)}
    assert found == {
        (OURS, "float32"): None,
        (TRANSFORMERS, "float32"): 1,
        (OURS, "bfloat16"): None,
        (TRANSFORMERS, "bfloat16"): 0,
    }
    sampled = replace(plan, sampling=Sampling(temperature=1.0))
    assert {b.differing for b in time_baselines(ways, PROMPTS, sampled, resamples=100)} == {None}


IDENTITY = {"name": "t", "weights": "w", "tokenizer": "k", "hidden_size": 8, "num_layers": 2, "vocab_size": 9}


@pytest.mark.parametrize("key", ["tokenizer", "hidden_size", "num_layers", "vocab_size"])
def test_a_draft_for_another_shape_or_tokenizer_is_refused(key: str) -> None:
    with pytest.raises(UserError, match=key):
        check_fit({**IDENTITY, key: "other"}, IDENTITY, True, "The draft")


def test_a_draft_for_other_weights_only_when_asked_and_recorded() -> None:
    assert check_fit(IDENTITY, IDENTITY, False, "The draft") == []
    with pytest.raises(UserError, match="allow_other_target"):
        check_fit({**IDENTITY, "weights": "v"}, IDENTITY, False, "The draft")
    (warning,) = check_fit({**IDENTITY, "weights": "v"}, IDENTITY, True, "The draft")
    assert "other weights" in warning


def metered(seconds: float = 10.0, **spent: float) -> NoiseMeter:
    """A meter around one decoding, in which so much time was spent."""
    start = CpuTimes(5.0, 100.0, 7.0, 1.0, 1.0)
    times = iter([start, CpuTimes(5.0 + seconds, *(getattr(start, k) + spent[k] for k in KINDS))])
    meter = NoiseMeter(lambda: next(times))
    with meter():
        pass
    return meter


KINDS = ("busy", "stolen", "process", "thread")


def test_noise_is_what_others_take_and_not_that_threads_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.cpu_count", lambda logical=True: 2)
    calm = make_records(12)
    # an idle machine whose decoding thread slept a quarter of the time, waiting for its helper
    verdict = metered(busy=12.2, stolen=0.0, process=11.6, thread=7.3).verdict(calm)
    assert not verdict.noisy
    assert (verdict.cpu_per_wall, verdict.cores_used, verdict.others) == (0.73, 1.16, 0.06)
    disturbed = metered(busy=20.0, stolen=0.0, process=11.6, thread=9.9).verdict(calm)
    assert disturbed.noisy and "other processes kept 0.84 cores" in disturbed.words
    withheld = metered(busy=11.7, stolen=3.0, process=11.6, thread=9.9).verdict(calm)
    assert withheld.noisy and "withheld 0.3 cores" in withheld.words
    monkeypatch.setattr("psutil.cpu_count", lambda logical=True: 128)  # its services alone are a core
    assert not metered(busy=20.0, stolen=0.0, process=11.6, thread=9.9).verdict(calm).noisy


def test_uneven_plain_decoding_is_said_and_blames_nobody() -> None:
    calm, draw = make_records(12), random.Random(1)
    meter = metered(busy=11.7, stolen=0.0, process=11.6, thread=9.9)
    assert not meter.verdict(calm).noisy
    for record in calm:
        record.plain[0].decode_seconds *= draw.uniform(0.6, 1.8)
    uneven = meter.verdict(calm)
    assert not uneven.noisy and re.search(r"varied by \d+% between prompts", uneven.words)


def test_another_process_that_computes_is_seen() -> None:
    code = "import time\nend = time.time() + 2\nprint(1, flush=True)\nwhile time.time() < end: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        meter, end = NoiseMeter(), time.perf_counter() + 1
        with meter():
            while time.perf_counter() < end:
                sum(range(1000))
        other.kill()
    assert meter.others is not None and meter.others > 0.2
