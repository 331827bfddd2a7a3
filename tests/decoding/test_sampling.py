"""Processors against transformers' own, draws against exact counts, uniforms against their keys."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from deepspec.decoding.randomness import Purpose, uniforms
from deepspec.decoding.request import Sampling
from deepspec.decoding.sampling import check_sampling, distributions, draw, penalise, penalise_paths
from deepspec.errors import UserError
from deepspec.target.layout import tree


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    temperature=st.floats(0.2, 3.0),
    top_k=st.integers(0, 30),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 0.2]),
    min_p=st.sampled_from([0.0, 0.05, 0.3]),
)
def test_processors_agree_with_transformers(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    scores = torch.randn(2, 24, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    expected = TemperatureLogitsWarper(temperature)(None, scores)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    if min_p:
        expected = MinPLogitsWarper(min_p)(None, expected)
    found = distributions(scores, [Sampling(temperature, top_k, top_p, min_p)] * 2)
    torch.testing.assert_close(found, expected.softmax(-1))


@settings(max_examples=40, deadline=None)
@given(data=st.data(), penalty=st.sampled_from([0.5, 1.0, 1.7]))
def test_penalties_on_paths_are_transformers_on_each_path(data: st.DataObject, penalty: float) -> None:
    """Every node of a random tree against the library's processor on its whole text, repeated tokens and all."""
    nodes, vocab = data.draw(st.integers(0, 5)), 8
    tokens = st.integers(0, vocab - 1)
    text = data.draw(st.lists(tokens, min_size=1, max_size=6))
    drafted = data.draw(st.lists(tokens, min_size=nodes, max_size=nodes))
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(nodes)]
    seed = data.draw(st.integers(0, 10**6))
    logits = torch.randn(nodes + 1, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    paths = [text]
    for parent, token in zip(parents, drafted, strict=True):
        paths.append([*paths[parent + 1], token])
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    expected = [
        processor(torch.tensor([path]), row[None])[0] for path, row in zip(paths, logits.clone(), strict=True)
    ]
    seen = torch.zeros(1, vocab, dtype=torch.bool)
    seen[0, text] = True
    visible = tree([0], torch.tensor([parents], dtype=torch.long)).visible
    read = torch.tensor([[text[-1], *drafted]])
    setting = [Sampling(repetition_penalty=penalty)]
    found = penalise_paths(logits[None], read, visible, seen, setting)[0]
    torch.testing.assert_close(found, torch.stack(expected))
    torch.testing.assert_close(penalise(logits[:1], seen, setting)[0], expected[0])


def test_rows_keep_their_own_settings() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5]]).repeat(2, 1)
    rows = distributions(logits, [Sampling(0.0), Sampling(1.0)])
    assert rows[0].tolist() == [0.0, 1.0, 0.0]
    torch.testing.assert_close(rows[1], logits[1].softmax(-1))


@given(seed=st.integers(0, 10**6), zero=st.integers(0, 4))
def test_a_draw_is_the_inverse_cdf_and_never_a_zero_entry(seed: int, zero: int) -> None:
    probabilities = torch.rand(5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    probabilities[zero] = 0
    probabilities /= probabilities.sum()
    grid = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    drawn = draw(probabilities.repeat(1000, 1), grid)
    counts = torch.bincount(drawn, minlength=5).double() / 1000
    assert counts[zero] == 0
    assert (counts - probabilities).abs().max() < 2 / 1000
    extremes = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert (probabilities[draw(probabilities.repeat(2, 1), extremes)] > 0).all()


def test_uniforms_are_functions_of_their_keys() -> None:
    both = uniforms([5, 9], [3, 100], Purpose.accept, count=6)
    assert np.array_equal(both[1:], uniforms([9], [100], Purpose.accept, count=6))
    assert np.array_equal(both[0, 2:4], uniforms([5], [3], Purpose.accept, count=2, index=2)[0])
    for other in (
        uniforms([5], [3], Purpose.draft, 6),
        uniforms([6], [3], Purpose.accept, 6),
        uniforms([5], [4], Purpose.accept, 6),
        uniforms([5], [3], Purpose.accept, 6, 6),
    ):
        assert not np.any(other[0] == both[0])


def test_uniforms_look_uniform_and_independent_across_neighbouring_keys() -> None:
    found = uniforms(list(range(400)), [0] * 400, Purpose.next, count=400)
    assert found.min() >= 0 and found.max() < 1
    cells = np.bincount((found.ravel() * 100).astype(int), minlength=100)
    statistic = ((cells - 1600) ** 2 / 1600).sum()
    assert statistic < 160  # chi-square with 99 degrees of freedom: p ≈ 1e-4
    for axis in (0, 1):
        a, b = np.take(found, range(399), axis).ravel(), np.take(found, range(1, 400), axis).ravel()
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / np.sqrt(a.size)


@pytest.mark.parametrize(
    "bad", [Sampling(-0.1), Sampling(1.0, -1), Sampling(1.0, 0, 0.0), Sampling(1.0, 0, 1.0, 2.0)]
)
def test_impossible_settings_are_refused(bad: Sampling) -> None:
    with pytest.raises(UserError, match="must be"):
        check_sampling(bad)
