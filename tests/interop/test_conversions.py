"""Layer ids, vocabularies and rope fields: there and back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspec.errors import UserError
from deepspec.interop.conversions import (
    from_layer_inputs,
    from_offsets,
    from_rope_fields,
    published_layers,
    to_layer_inputs,
    to_offsets,
    to_rope_fields,
)
from tests.models import tiny_target


def test_an_input_id_indexes_transformers_hidden_states() -> None:
    target = tiny_target("llama")
    tokens = torch.arange(9)[None]
    states = target.model(tokens, output_hidden_states=True).hidden_states
    ours = target.capture(tokens, tokens, torch.zeros_like(tokens), [0, 2]).features
    theirs = torch.cat([states[i] for i in to_layer_inputs([0, 2])], -1)
    torch.testing.assert_close(ours, theirs)
    assert from_layer_inputs(to_layer_inputs([0, 2])) == [0, 2]


def test_the_published_defaults_are_the_inputs_of_2_half_and_minus_3() -> None:
    assert published_layers(32) == [1, 15, 28]


@given(
    st.integers(1, 300).flatmap(lambda v: st.tuples(st.just(v), st.sets(st.integers(0, v - 1), min_size=1)))
)
def test_offsets_there_and_back(case: tuple[int, set[int]]) -> None:
    size, chosen = case
    ids = torch.tensor(sorted(chosen))
    made = to_offsets(ids, size)
    assert [i + int(d) for i, d in enumerate(made["d2t"])] == sorted(chosen)
    assert {i for i, used in enumerate(made["t2d"].tolist()) if used} == chosen
    back = from_offsets(made["d2t"], made["t2d"], len(ids), size)
    assert back is None if len(ids) == size else back.tolist() == sorted(chosen)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 1e6}, LLAMA3])
def test_rope_there_and_back_by_the_new_fields_and_by_the_old(rope: dict) -> None:
    fields = to_rope_fields(rope)
    assert from_rope_fields(fields) == rope
    assert from_rope_fields({key: fields[key] for key in ("rope_theta", "rope_scaling")}) == rope


def test_the_oldest_spelling_and_none_at_all() -> None:
    old = {"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert from_rope_fields(old) == {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000.0}
    assert from_rope_fields({}) == {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize(
    "config",
    [{"rope_parameters": {"mrope_section": [1, 2]}}, {"rope_parameters": {"partial_rotary_factor": 0.5}}],
)
def test_a_rope_of_another_kind_is_refused(config: dict) -> None:
    with pytest.raises(UserError, match="only a rope over the whole head"):
        from_rope_fields(config)
