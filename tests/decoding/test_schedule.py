"""Schedules: what they decide, that they do not look ahead, and that the output stays the target's."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepspec.decoding.acceptance.chains import block_law, token_law
from deepspec.decoding.estimate import Acceptance, DecayedMean
from deepspec.decoding.fallback import Fallback
from deepspec.decoding.schedule import admit_levels, admit_tokens, first_fall, survival
from deepspec.drafts.contract import Proposal

confidences = st.lists(st.floats(0, 1), min_size=0, max_size=6)
batches = st.lists(confidences, min_size=1, max_size=4)
rising = st.lists(st.floats(0, 0.5), min_size=7, max_size=7).map(
    lambda steps: [1 + sum(steps[: i + 1]) for i in range(7)]
)


def test_first_fall_by_hand() -> None:
    assert first_fall([0.9, 0.8, 0.4, 0.9], 0.5) == 2  # what lies behind the fall does not count
    assert first_fall([0.9, 0.8, 0.4, 0.9], 0.5, max_candidates=1) == 1
    assert first_fall([0.5], 0.5) == 1
    assert first_fall([], 0.5) == 0


def test_admission_of_one_stream_by_hand() -> None:
    # expected tokens 1, 1.9, 2.62, 2.98; a second: 1/1, 1.9/1.2 = 1.58, 2.62/1.4 = 1.87, 2.98/1.6 = 1.86
    assert admit_levels([survival([0.9, 0.8, 0.5])], [1.0, 1.2, 1.4, 1.6]) == 2
    # speculation that does not pay at all
    assert admit_levels([survival([0.3, 0.9, 0.9])], [1.0, 1.4, 1.5, 1.6]) == 0


def test_flat_admission_by_hand() -> None:
    """SPS(B) = 1/(1 + B/10): τ·SPS from R = 2 rises for .9 (2.231), .8 (2.643), .63 (2.887), .4 (2.956), not for .2."""
    speed = lambda width: 1 / (1 + width / 10)  # noqa: E731
    assert admit_tokens([[0.9, 0.63, 0.2], [0.8, 0.4]], speed) == [2, 2]
    assert admit_tokens([], speed) == []


@given(batches, rising)
def test_flat_admission_stops_at_the_first_fall_of_the_greedy_order(
    batch: list[list[float]], seconds: list[float]
) -> None:
    """Against a plain simulation that picks the best remaining head of a row at each step."""
    survivals = [survival(row) for row in batch]
    speed = lambda width: 1 / (1 + width * (seconds[0] - 0.9))  # noqa: E731
    taken, tokens, width = [0] * len(batch), float(len(batch)), len(batch)
    while True:
        heads = [(row[taken[r]], -taken[r], -r) for r, row in enumerate(survivals) if taken[r] < len(row)]
        if not heads:
            break
        a, _, minus_r = max(heads)
        if not (tokens + a) * speed(width + 1) > tokens * speed(width):
            break
        taken[-minus_r], tokens, width = taken[-minus_r] + 1, tokens + a, width + 1
    assert admit_tokens(survivals, speed) == taken


@given(batches, rising, st.data())
def test_no_decision_about_a_position_changes_with_what_lies_behind_it(
    batch: list[list[float]], seconds: list[float], data: st.DataObject
) -> None:
    """Row r's positions k.. get other confidences: position k−1 is verified as before, by every schedule."""
    row = data.draw(st.integers(0, len(batch) - 1))
    k = data.draw(st.integers(0, len(batch[row])))
    other = [list(r) for r in batch]
    other[row] = other[row][:k] + data.draw(confidences)[: 6 - k]
    speed = lambda width: 1 / seconds[min(width, 6)]  # noqa: E731
    schedules: list[Callable[[list[list[float]]], list[int]]] = [
        lambda rows: [first_fall(r, 0.5) for r in rows],
        lambda rows: admit_tokens([survival(r) for r in rows], speed),
        lambda rows: [min(admit_levels([survival(r) for r in rows], seconds), len(r)) for r in rows],
    ]
    for schedule in schedules:
        before, after = schedule(batch)[row], schedule(other)[row]
        assert min(before, k) == min(after, k)


# ---------------------------------------------------------------- the output's distribution, by enumeration

V, K = 2, 2
Table = dict[tuple[int, ...], Tensor]


def tables(seed: int) -> tuple[Table, Table]:
    generator = torch.Generator().manual_seed(seed)
    texts = [text for n in range(K + 1) for text in itertools.product(range(V), repeat=n)]

    def one() -> Table:
        return {
            text: torch.rand(V, generator=generator, dtype=torch.float64).softmax(0).pow(3) for text in texts
        }

    return tuple({t: x / x.sum() for t, x in table.items()} for table in (one(), one()))  # type: ignore[return-value]


def output(p: Table, q: Table, cut: Callable[[tuple[int, ...]], int], rule: Callable = token_law) -> Tensor:
    """P(the first K+1 tokens) when a draft x ~ q is cut to cut(x) tokens and judged by `rule`."""
    found = torch.zeros([V] * (K + 1), dtype=torch.float64)
    for x in itertools.product(range(V), repeat=K):
        chance = float(torch.stack([q[x[:i]][x[i]] for i in range(K)]).prod())
        target = torch.stack([p[x[:i]] for i in range(K + 1)])[None]
        drawn = torch.stack([q[x[:i]] for i in range(K)])[None]
        law = rule(Proposal(torch.tensor([x]), [cut(x)], q=drawn), target)
        for passed in itertools.product((False, True), repeat=K):
            tests = zip(law.accept[0].tolist(), passed, strict=True)
            happens = chance * math.prod(accept if passes else 1 - accept for accept, passes in tests)
            ending = law.ending(torch.tensor([passed]))
            n, after = int(ending.length), law.next_distribution(ending.at)[0]
            for token in range(V):
                spread(found, p, (*x[:n], token), happens * float(after[token]))
    return found


def spread(found: Tensor, p: Table, text: tuple[int, ...], chance: float) -> None:
    """Continue a text by the target's own sampling up to K + 1 tokens."""
    if len(text) == K + 1:
        found[text] += chance
        return
    for token in range(V):
        spread(found, p, (*text, token), chance * float(p[text][token]))


def exact(p: Table) -> Tensor:
    found = torch.zeros([V] * (K + 1), dtype=torch.float64)
    spread(found, p, (), 1.0)
    return found


def legal_cuts(q: Table, seed: int) -> dict[str, Callable[[tuple[int, ...]], int]]:
    """Schedules fed with confidences that depend on x_{<k} alone: random ones, and the draft's largest probability."""
    generator = torch.Generator().manual_seed(seed)
    noise = {text: float(torch.rand((), generator=generator, dtype=torch.float64)) for text in q}

    def of(x: tuple[int, ...], table: dict[tuple[int, ...], float]) -> list[float]:
        return [table[x[:k]] for k in range(K)]

    top = {text: float(row.max()) for text, row in q.items()}
    return {
        "threshold": lambda x: first_fall(of(x, noise), 0.5),
        "threshold on max q": lambda x: first_fall(of(x, top), 0.7),
        "levels": lambda x: admit_levels([survival(of(x, noise))], [1.0, 1.3, 1.6]),
        "tokens": lambda x: admit_tokens([survival(of(x, noise)), [0.8, 0.3]], lambda b: 1 / (1 + b / 3))[0],
    }


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000))
def test_legal_schedules_keep_the_targets_distribution(seed: int) -> None:
    p, q = tables(seed)
    for cut in legal_cuts(q, seed).values():
        for rule in (token_law, block_law):
            torch.testing.assert_close(output(p, q, cut, rule), exact(p), rtol=0, atol=1e-12)


def test_schedules_that_look_at_the_drawn_token_do_not() -> None:
    """The two leaks the module warns of are seen by the same enumeration."""
    p, q = tables(3)
    by_probability = lambda x: next((k for k in range(K) if q[x[:k]][x[k]] < 0.5), K)  # noqa: E731

    def best_after_drawing(x: tuple[int, ...]) -> int:
        a = survival([float(q[x[: k + 1]].max()) for k in range(K)])  # c_k from x_k itself
        return max(range(K + 1), key=lambda n: (1 + sum(a[:n])) / (1 + 0.8 * n))

    for cut in (by_probability, best_after_drawing):
        assert float((output(p, q, cut) - exact(p)).abs().max()) > 1e-3


def test_the_figures_of_the_leak() -> None:
    """One token, p = (½, ½), q = (.8, .2), verified only if q(x) ≥ ½: the output is (.6, .4)."""
    half, q = torch.tensor([0.5, 0.5], dtype=torch.float64), torch.tensor([0.8, 0.2], dtype=torch.float64)
    found = torch.zeros(V, dtype=torch.float64)
    for x in range(V):
        length = 1 if q[x] >= 0.5 else 0
        law = token_law(Proposal(torch.tensor([[x]]), [length], q=q[None, None]), half.expand(1, 2, V))
        accept = float(law.accept[0, 0])
        found[x] += q[x] * accept
        found += q[x] * (1 - accept) * law.next_distribution(torch.tensor([0]))[0]
    torch.testing.assert_close(found, torch.tensor([0.6, 0.4], dtype=torch.float64))


# ---------------------------------------------------------------- estimates and fallback


def test_acceptance_is_estimated_from_rounds_that_tried_the_position() -> None:
    seen = Acceptance(3, decay=1.0)
    for verified, accepted in [(3, 3), (3, 1), (2, 2), (1, 0)] * 500:
        seen.add(verified, accepted)
    # position 1: 3 of 4; position 2: 2 of 3 (one round rejected position 1); position 3: 1 of 1
    assert seen.at_positions() == pytest.approx([3 / 4, 2 / 3, 1.0], abs=2e-3)


def test_a_position_not_tried_for_long_drifts_back_to_the_mean() -> None:
    seen = Acceptance(2)
    for _ in range(20):
        seen.add(2, 1)
    low = seen.at_positions()[1]
    for _ in range(100):
        seen.add(1, 1)
    assert low < 0.2 and seen.at_positions()[1] > 0.8


def test_a_decayed_mean_is_the_weighted_mean() -> None:
    mean, values = DecayedMean(0.9), [3.0, 1.0, 4.0, 1.0, 5.0]
    assert mean.value is None and mean.towards(2.0) == 2.0
    for value in values:
        mean.add(value)
    weights = [0.9 ** (len(values) - 1 - i) for i in range(len(values))]
    assert mean.value == pytest.approx(sum(map(float.__mul__, weights, values)) / sum(weights))


def simulate(rounds: int, tokens: Callable[[int], float], plain: float, speculative: float) -> list[bool]:
    """A stream of one row; tokens(i): what a speculative round at round i commits."""
    fallback, committed, said = Fallback(), DecayedMean(), []
    for i in range(rounds):
        speculate = fallback.speculate(committed.towards(2.0), 1)
        if speculate:
            committed.add(tokens(i))
        fallback.record(speculate, 1, speculative if speculate else plain)
        said.append(speculate)
    return said


def test_fallback_keeps_what_wins_and_leaves_what_loses() -> None:
    winning = simulate(1000, lambda i: 2.0, plain=1.0, speculative=1.5)
    assert sum(winning) > 970 and not all(winning)  # plain rounds are timed now and then
    losing = simulate(1000, lambda i: 1.2, plain=1.0, speculative=1.5)
    assert sum(losing[20:]) < 50  # about one probe in ever longer intervals
    assert any(losing[300:])


def test_fallback_comes_back_when_acceptance_does() -> None:
    said = simulate(3000, lambda i: 1.0 if i < 500 else 3.0, plain=1.0, speculative=1.5)
    assert sum(said[100:500]) < 40
    assert sum(said[1500:]) > 1450


def test_fallback_loses_little_against_either_way() -> None:
    """Seconds a token are within 12% of the better of always and never, on both sides of break-even."""
    for tau in (1.0, 1.2, 1.4, 1.6, 1.8, 3.0):
        said = simulate(2000, lambda i: tau, plain=1.0, speculative=1.5)  # noqa: B023
        seconds = sum(1.5 if s else 1.0 for s in said)
        tokens = sum(tau if s else 1.0 for s in said)
        assert seconds / tokens < 1.12 * min(1.0, 1.5 / tau)
