"""Tuning finds what is fastest by a known clock, proves it on other prompts, and else keeps what there is."""

import copy
import json
import random
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspec import evaluate as stage
from deepspec.config.schema import Config, DecodeConfig, ScheduleKind, Tree
from deepspec.decoding.cost import CostTable, Curve
from deepspec.decoding.request import Request, Result
from deepspec.errors import UserError
from deepspec.evaluation.machine import describe_machine
from deepspec.evaluation.metric import Metric
from deepspec.evaluation.result import EvaluationResult, load_result, save_result
from deepspec.evaluation.tuning.candidates import Candidate, candidates, check_record
from deepspec.evaluation.tuning.findings import Tuned
from deepspec.evaluation.tuning.predict import (
    Costs,
    best_thresholds,
    predicted_speedups,
    table_costs,
    threshold_speedup,
)
from deepspec.evaluation.tuning.trials import Timed, best_of, gain, heats, take_turns
from deepspec.reporting.tuning import overrides, verdict, write_page, write_recipe
from deepspec.target import Target
from tests.config.processes import ROOT, environment
from tests.reporting.synthetic import make_records, make_result
from tests.reporting.test_report import Page


class Clock:
    """Goes on only when something is decoded."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def way(self, speed: float, log: list[str] | None = None, name: str = "") -> Any:
        """Eight tokens behind the first one of every answer, at `speed` tokens a second; the prefill takes one."""

        def decode(requests: Sequence[Request]) -> list[Result]:
            if log is not None:
                log.append(name)
            self.now += len(requests) * (1.0 + 8 / speed)
            return [Result(r.id, list(range(9)), "length", 1.0, 8 / speed) for r in requests]

        return decode


def groups(count: int, size: int = 1) -> list[list[Request]]:
    return [[Request([1], 9, id=f"{number}/{i}") for i in range(size)] for number in range(count)]


@given(st.floats(0.05, 0.95), st.floats(0.01, 0.5), st.integers(1, 12), st.floats(0.001, 10.0))
def test_chains_are_predicted_by_the_closed_form(alpha: float, c: float, k: int, second: float) -> None:
    """Every position accepts with α, a proposal of k costs k·c, a forward the same at any width."""
    costs = Costs([second] * (k + 1), [j * c * second for j in range(1, k + 1)])
    found = predicted_speedups([alpha**j for j in range(1, k + 1)], costs)
    expected = [(1 - alpha ** (j + 1)) / ((1 - alpha) * (1 + j * c)) for j in range(1, k + 1)]
    assert found == pytest.approx(expected)


@given(st.floats(0.3, 0.9), st.floats(0.01, 0.3), st.floats(0.0, 0.2), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_the_best_length_of_known_costs_wins_end_to_end(
    alpha: float, c: float, slope: float, seed: int
) -> None:
    """Chains of 1 … 6 with acceptance α at every position, costs c·k to draft and 1 + slope·k to verify, decoded by a
    clock that knows them: what wins is the K of the closed form, or one within what so few tokens can tell."""
    clock, draw = Clock(), random.Random(seed)

    def chain(k: int) -> Any:
        def decode(requests: Sequence[Request]) -> list[Result]:
            found = []
            for request in requests:
                tokens = 1
                while tokens < 2000:
                    clock.now += c * k + 1 + slope * k
                    accepted = next((j for j in range(k) if draw.random() >= alpha), k)
                    tokens += 1 + accepted
                found.append(Result(request.id, list(range(tokens)), "length", 0.0, 0.0))
            return found

        return decode

    best, _ = best_of({str(k): chain(k) for k in range(1, 7)}, groups(6), clock=clock)
    costs = Costs([1 + slope * n for n in range(7)], [c * k for k in range(1, 7)])
    speeds = predicted_speedups([alpha**j for j in range(1, 7)], costs)
    closed = [(1 - alpha ** (k + 1)) / ((1 - alpha) * (1 + slope * k + c * k)) for k in range(1, 7)]
    assert speeds == pytest.approx(closed)
    assert closed[int(best) - 1] > 0.93 * max(closed)


@given(
    st.lists(
        st.tuples(st.lists(st.floats(0.01, 0.99), min_size=3, max_size=3), st.integers(0, 3)),
        min_size=1,
        max_size=20,
    ),
    st.floats(0.05, 0.95),
)
def test_a_threshold_is_predicted_by_a_plain_walk(
    seen: list[tuple[list[float], int]], threshold: float
) -> None:
    costs = Costs([1.0, 1.5, 1.75, 2.5], [0.25, 0.375, 0.5])
    tokens = seconds = 0.0
    for sure, accepted in seen:
        verified = 0
        for c in sure:
            if c < threshold:
                break
            verified += 1
        tokens += min(accepted, verified) + 1
        seconds += costs.verify[verified] + costs.draft[max(verified, 1) - 1]
    assert threshold_speedup(seen, costs, threshold) == pytest.approx(tokens / seconds)


def test_thresholds_that_pay_are_found_among_the_recorded_confidences() -> None:
    """Half of the rounds are sure and right, half unsure and wrong: what lies between the two pays."""
    seen = [([0.9, 0.88, 0.86], 3), ([0.2, 0.18, 0.16], 0)] * 30
    costs = Costs([1.0, 1.4, 1.8, 2.2], [0.1, 0.2, 0.3])
    found = best_thresholds(seen, costs)
    assert found and all(0.2 < one <= 0.9 for one in list(found) if found[one] == max(found.values()))
    assert max(found.values()) > predicted_speedups([0.5] * 3, costs)[2]  # than of verifying all
    assert best_thresholds([], costs) == {}


def test_a_table_tells_of_the_batch_that_is_tuned_for() -> None:
    """Verification that is free for one row and dear for many: the longest chain pays for one, the shortest for eight."""
    verify = Curve([1, 8], [1, 2, 3], [[1.0, 1.0, 1.0], [1.0, 3.0, 5.0]])
    draft = Curve([1, 8], [1, 2], [[0.01, 0.02], [0.01, 0.02]])
    table = CostTable({}, verify, draft)
    for rows, best in ((1, 2), (8, 1)):
        speeds = predicted_speedups([0.6, 0.5], table_costs(table, rows, 2))
        assert max(range(2), key=speeds.__getitem__) + 1 == best
    assert table_costs(table, 8, 2).verify == [1.0, 3.0, 5.0]


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=12, unique=True),
    st.integers(4, 9),
    st.integers(1, 3),
)
def test_the_fastest_wins_whatever_the_order(speeds: list[int], count: int, size: int) -> None:
    clock = Clock()
    ways = {str(speed): clock.way(speed) for speed in speeds}
    best, times = best_of(ways, groups(count, size), clock=clock)
    assert best == str(max(speeds))
    assert times[best].tokens_per_second == pytest.approx(max(speeds))
    assert len(times[best].tokens) == count


def test_the_slower_half_falls_out_after_each_heat_and_the_default_stays() -> None:
    clock, log = Clock(), list[str]()
    ways = {str(speed): clock.way(speed, log, str(speed)) for speed in range(1, 10)}
    best, times = best_of(ways, groups(6), always=["1"], clock=clock)
    assert (best, heats(9)) == ("9", [9, 5, 3])
    assert {name: len(timed.tokens) for name, timed in times.items()} == {
        **{"1": 6, "2": 2, "3": 2, "4": 2, "5": 4, "6": 4, "7": 6, "8": 6, "9": 6}
    }
    assert log[:9] != log[9:18] and sorted(log[:9]) == sorted(log[9:18])  # others go first the next time


def test_a_way_that_is_none_falls_out_whatever_its_speed() -> None:
    clock = Clock()
    ways = {str(speed): clock.way(speed) for speed in range(1, 7)}
    best, times = best_of(ways, groups(4), lambda name, timed: name == "6", clock=clock)
    assert best == "5"
    assert len(times["6"].tokens) < len(times["5"].tokens)


def test_a_gain_is_the_ratio_of_speeds_and_equal_ways_have_none() -> None:
    clock = Clock()
    times = take_turns({"a": clock.way(30.0), "b": clock.way(20.0)}, groups(9), clock=clock)
    assert gain(times["a"], times["b"], 200).value == pytest.approx(1.5)
    uneven = Timed([8] * 9, [1.0, 2.0, 1.5, 1.2, 0.9, 1.1, 1.4, 1.8, 1.0])
    other = Timed([8] * 9, [1.1, 1.9, 1.5, 1.1, 1.0, 1.1, 1.5, 1.7, 1.0])
    one = gain(uneven, other, 500)
    assert one.low is not None and one.high is not None and one.low < 1 < one.high
    assert gain(Timed([8], [1.0]), Timed([8], [2.0]), 200).low is None


def recorded(**conditions: Any) -> EvaluationResult:
    result = make_result(make_records(40))
    result.conditions = replace(result.conditions, **conditions)
    return result


def test_only_what_draft_and_sampling_can_do_is_tried() -> None:
    result = recorded()
    greedy = candidates(result, DecodeConfig(), 1)
    assert greedy[0].words == "as it stands"
    assert greedy[0].settings["k"] == result.conditions.k
    assert any(one.settings["tree"] == "dynamic" for one in greedy)
    recorded_k = result.conditions.k
    assert any(one.settings["k"] == recorded_k + 2 for one in greedy if "k" in one.settings)
    sampled = candidates(result, DecodeConfig(temperature=1.0), 1)
    assert all(one.settings["tree"] == "none" for one in sampled)
    assert any(one.settings["fallback"] == "auto" for one in candidates(result, DecodeConfig(), 4))
    assert not any(one.settings["fallback"] == "auto" for one in greedy)
    assert len({json.dumps(dict(one.settings), sort_keys=True) for one in greedy}) == len(greedy)
    assert not any("rule" in one.settings for one in greedy)
    assert any(one.settings.get("rule") == "token" for one in sampled)


def test_a_candidate_is_applied_to_what_it_changes_alone() -> None:
    decode = DecodeConfig(k=3, top_p=0.5)
    changed = Candidate("x", {"tree": "dynamic", "tree_depth": 2, "schedule": "threshold"}).applied(decode)
    assert changed == replace(decode, tree=Tree.dynamic, tree_depth=2, schedule=ScheduleKind.threshold)


def test_records_that_say_too_little_are_refused() -> None:
    few = make_result(make_records(1))
    few.records[0].speculative[0].rounds = few.records[0].speculative[0].rounds[:3]
    with pytest.raises(UserError, match=r"r\.json has \d+ rounds .* tuning needs 50"):
        check_record(few, "r.json")
    tree = recorded()
    tree.settings = {**tree.settings, "decode": {"tree": "dynamic"}}
    with pytest.raises(UserError, match=r"decode\.tree=dynamic"):
        check_record(tree, "r.json")


# ---------------------------------------------------------------- the whole


@pytest.fixture
def evaluated(config: Config, trained: Path) -> Config:
    config.decode = replace(config.decode, k=2, max_new_tokens=24)
    config.evaluate = replace(config.evaluate, sweep=[], max_prompts=6, baselines=False)
    stage.run(config)
    return replace(config, tune=True, tuning=replace(config.tuning, trials=2, confirmations=2))


def test_a_run_is_tuned_and_nothing_unproven_is_recommended(evaluated: Config) -> None:
    page = stage.run(evaluated)
    found = json.loads((page.parent / "tuning.json").read_text(encoding="utf-8"))
    assert found["groups"] == 2 and found["gain"]["low"] is None  # too few to prove anything
    assert not found["worth"] and found["settings"] == found["default"]
    assert not (page.parent / "recipe" / "tuned.yaml").exists()
    assert found["answers"] and found["equal"] == found["answers"]
    assert {"chain, K = 1", "chain, K = 2"} & {one["words"] for one in found["tried"]}
    assert "default" in Page(page.read_text(encoding="utf-8")).text


def test_what_it_starts_from_must_be_of_this_draft_and_sampling(evaluated: Config) -> None:
    path = Path(evaluated.out) / "evaluation" / "result.json"
    with pytest.raises(UserError, match=r"decoded at temperature 0, decode\.temperature is 1"):
        stage.run(replace(evaluated, decode=replace(evaluated.decode, temperature=1.0)))
    with pytest.raises(UserError, match=r"tuning\.batch_size=64 needs 128 prompts"):
        stage.run(replace(evaluated, tuning=replace(evaluated.tuning, batch_size=64)))
    result = load_result(path)
    for section, name, words in (
        (result.conditions.machine, "cpu", "another cpu"),
        (result.conditions.machine, "device", "another device"),
        (result.target, "weights", "another target's weights"),
        (result.settings["decode"], "top_p", r"another decode\.top_p"),
    ):
        changed = copy.deepcopy(result)
        place = {
            id(result.conditions.machine): vars(changed.conditions.machine),
            id(result.target): changed.target,
        }
        place.get(id(section), changed.settings["decode"])[name] = "other"
        save_result(changed, path)
        with pytest.raises(UserError, match=words):
            stage.run(evaluated)
    result.draft["manifest"]["fingerprint"] = "another"
    save_result(result, path)
    with pytest.raises(UserError, match="is of another draft"):
        stage.run(evaluated)
    path.unlink()
    with pytest.raises(UserError, match="Evaluate first"):
        stage.run(evaluated)


# ---------------------------------------------------------------- its settings


def tuned(target: Target, **more: Any) -> Tuned:
    settings = {"tree": "static", "schedule": "fixed", "fallback": "off", "tree_parents": [-1, -1, 0], "k": 5}
    gained, level = Metric(1.2, 1.1, 1.3, 12, None), Metric(1.0, 0.9, 1.1, 12, None)
    made = Tuned(
        name="quickstart",
        command="python -m deepspec.evaluate +recipe=quickstart tune=true",
        created="2026-01-01T00:00:00+00:00",
        recorded="runs/quickstart/evaluation/result.json",
        fingerprint="f",
        target="tiny",
        batch_size=1,
        temperature=0.0,
        max_new_tokens=64,
        default={"k": 2},
        chosen=settings,
        chosen_words="static tree of 3",
        settings=settings,
        worth=True,
        gain=gained,
        over_plain=Metric(1.5, 1.4, 1.6, 12, None),
        default_over_plain=level,
        groups=12,
        equal=12,
        answers=12,
        tried=[],
        machine=describe_machine(target.device, (0.0, 0.0, 0.0)),
    )
    return replace(made, **more)


def test_the_recipe_goes_behind_another_one(target: Target, tmp_path: Path) -> None:
    one = tuned(target)
    path = write_recipe(one, tmp_path)
    assert path is not None and yaml.safe_load(path.read_text(encoding="utf-8")) == {
        "decode": one.settings,
        "evaluate": {"sweep": []},
    }
    call = [sys.executable, "-m", "deepspec.evaluate", "--cfg", "job", "--config-dir", str(tmp_path)]
    how: dict[str, Any] = {"capture_output": True, "text": True, "cwd": tmp_path, "env": environment(ROOT)}
    done = subprocess.run([*call, "+recipe=[quickstart,tuned]"], check=False, **how)
    assert done.returncode == 0, done.stderr
    composed = yaml.safe_load(done.stdout)
    decode = composed["decode"]
    assert composed["evaluate"]["sweep"] == []  # else it would choose K anew
    assert {name: decode[name] for name in one.settings} == one.settings
    assert decode["max_new_tokens"] == 64  # the recipe's in front
    words = shlex.split(overrides(one))
    again = subprocess.run([*call, "+recipe=quickstart", *words], check=False, **how)
    assert again.returncode == 0, again.stderr
    assert {name: yaml.safe_load(again.stdout)["decode"][name] for name in one.settings} == one.settings


def test_the_verdict_says_what_was_proven(target: Target, tmp_path: Path) -> None:
    better = verdict(tuned(target))
    assert better.startswith("Static tree of 3 is 1.20× (95% 1.10–1.30) as fast as the default at batch 1")
    assert "1.50× (95% 1.40–1.60) as fast as plain decoding" in better
    unproven = tuned(target, worth=False, gain=Metric(1.05, 0.98, 1.1, 12, None))
    assert verdict(unproven).startswith("Keep the default")
    slower = tuned(target, worth=False, default_over_plain=Metric(0.8, 0.7, 0.9, 12, None))
    assert "should not be used here" in verdict(slower)
    assert write_recipe(unproven, tmp_path) is None
    page = Page(write_page(unproven, tmp_path / "tuning.html").read_text(encoding="utf-8"))
    assert "Keep the default" in page.text
