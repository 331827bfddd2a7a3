"""The target against the model's own plain forward, family by family."""

import gc
import weakref

import pytest
import torch

from deepspec.errors import UserError
from deepspec.target import chain, tree
from deepspec.target.layout import Layout
from tests.models import FAMILIES, VOCAB, prompts, tiny_model, tiny_target

# These families' own code goes through float32 (eager softmax, router) even in a float64 model, and a matrix of
# another shape rounds differently there; everything else must agree to float64.
THROUGH_FLOAT32 = ("deepseek_v3", "gemma2", "gpt_oss")
families = pytest.mark.parametrize("family", sorted(FAMILIES))


def plain(family: str, tokens: list[int]) -> torch.Tensor:
    """[T, V] logits of a whole text, by the library alone."""
    with torch.no_grad():
        return tiny_model(family)(torch.tensor([tokens]), use_cache=False).logits[0]


def assert_same(family: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1e-4 if family in THROUGH_FLOAT32 else 1e-10
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@families
def test_capture_is_the_layers_output(family: str) -> None:
    target, (text,) = tiny_target(family), prompts(1, seed=3, longest=30)
    text = [*text, *range(5, 15)]
    tokens = torch.tensor([text])
    with torch.no_grad():
        hidden = tiny_model(family)(tokens, use_cache=False, output_hidden_states=True).hidden_states
    captured = target.capture(tokens, torch.arange(len(text))[None], torch.zeros_like(tokens), [0, 2])
    torch.testing.assert_close(captured.features, torch.cat([hidden[1], hidden[3]], -1))
    none = target.capture(tokens, torch.arange(len(text))[None], torch.zeros_like(tokens), [])
    assert none.features.shape == (1, len(text), 0)
    # The library's last entry is after the final norm; ours is before it.
    torch.testing.assert_close(target.norm(captured.last_hidden), hidden[-1])


@families
def test_edges_are_the_models_own(family: str) -> None:
    target, tokens = tiny_target(family), torch.arange(3, 23)[None]
    seen = {}
    hook = target.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(x=args[0] if args else kwargs["hidden_states"]),
        with_kwargs=True,
    )
    expected = plain(family, tokens[0].tolist())
    hook.remove()
    torch.testing.assert_close(target.embed(tokens), seen["x"])
    captured = target.capture(tokens, torch.arange(20)[None], torch.zeros_like(tokens), [0])
    torch.testing.assert_close(target.logits(captured.last_hidden[0]), expected)


@families
def test_a_reduced_head_is_those_columns_of_the_whole(family: str) -> None:
    """Gathered while decoding and then trained through, and the model is left as it was."""
    target, rows = tiny_target(family), torch.tensor([3, 4, 50, 96])
    hidden = torch.randn(5, 32, dtype=torch.float64)
    with torch.inference_mode():
        whole, found = target.head(hidden), target.head(hidden, rows)
        torch.testing.assert_close(found, whole[:, rows])
    hidden.requires_grad_()
    torch.testing.assert_close(target.head(hidden, rows), whole[:, rows])
    target.head(hidden, rows).sum().backward()
    assert hidden.grad is not None
    other = torch.tensor([7, 8])
    torch.testing.assert_close(target.head(hidden, other), whole[:, other])
    torch.testing.assert_close(target.head(hidden), whole)


@families
def test_a_tree_grown_level_by_level_is_its_paths(family: str) -> None:
    """Two ragged rows, three forwards: roots a, b; then c below a; then d, e below c and f below b."""
    target, texts = tiny_target(family), [[*range(5, 19)], [*range(30, 39)]]
    state = target.new_state(2, 32, rows=0)
    for text in texts:
        one = target.new_state(1, 32)
        target.forward(torch.tensor([text]), one, chain([0], len(text), target.device))
        one.keep([len(text)])
        state.append(one)
    parents = [-1, -1, 0, 2, 2, 1]
    levels, nodes = (
        [[0, 1], [2], [3, 4, 5]],
        torch.tensor([[60, 61, 62, 63, 64, 65], [70, 71, 72, 73, 74, 75]]),
    )
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    depth = torch.tensor([len(path) - 1 for path in paths])
    starts = torch.tensor(state.lengths)[:, None]
    for level in levels:
        written = level[-1] + 1
        visible = torch.tensor([[column in paths[node] for column in range(written)] for node in level])
        layout = Layout(
            state.lengths, starts + depth[level], visible.expand(2, -1, -1), starts + depth[:written]
        )
        logits = target.forward(nodes[:, level], state, layout).logits
        for row, text in enumerate(texts):
            for place, node in enumerate(level):
                expected = plain(family, [*text, *nodes[row, paths[node]].tolist()])[-1]
                assert_same(family, logits[row, place], expected)
    assert state.lengths == [14, 9]


@families
def test_packed_documents_do_not_see_each_other(family: str) -> None:
    target, texts = tiny_target(family), prompts(3, seed=5)
    row = torch.tensor([[token for text in texts for token in text]])
    documents = torch.tensor([[index for index, text in enumerate(texts) for _ in text]])
    positions = torch.tensor([[at for text in texts for at in range(len(text))]])
    captured = target.capture(row, positions, documents, [1])
    logits = target.logits(captured.last_hidden[0])
    expected = torch.cat([plain(family, text) for text in texts])
    torch.testing.assert_close(logits, expected)


@families
def test_two_branches_then_a_ragged_keep_then_a_continuation(family: str) -> None:
    """A tree is verified as if each branch were a text; the kept path continues as if it had been typed."""
    target, texts = tiny_target(family), prompts(2, seed=7, longest=30)
    state = target.new_state(2, 128, rows=0)
    for text in texts:
        one = target.new_state(1, 128)
        target.forward(torch.tensor([text]), one, chain([0], len(text), target.device), 1)
        one.keep([len(text)])
        state.append(one)
    # pending 9, then two branches: 11 → 13 and 12 → 14 → 15
    nodes, parents = [11, 12, 13, 14, 15], torch.tensor([[-1, -1, 0, 1, 3]] * 2)
    tokens = torch.tensor([[9, *nodes]] * 2)
    logits = target.forward(tokens, state, tree(state.lengths, parents)).logits
    for row, text in enumerate(texts):
        for branch, at in (([11, 13], [0, 1, 3]), ([12, 14, 15], [0, 2, 4, 5])):
            expected = plain(family, [*text, 9, *branch])[len(text) :]
            assert_same(family, logits[row, at], expected)
    # Row 0 keeps 9, 12, 14, 15; row 1 keeps 9, 11.
    state.keep([4, 2], torch.tensor([[0, 2, 4, 5], [0, 1, 0, 0]]))
    after = target.forward(torch.tensor([[20, 21]] * 2), state, chain(state.lengths, 2, target.device)).logits
    assert_same(family, after[0], plain(family, [*texts[0], 9, 12, 14, 15, 20, 21])[-2:])
    assert_same(family, after[1], plain(family, [*texts[1], 9, 11, 20, 21])[-2:])


def test_rows_leave_and_buffers_grow() -> None:
    target, texts = tiny_target("llama"), prompts(3, seed=11)
    state = target.new_state(3, 8, rows=0)
    for text in texts:
        one = target.new_state(1, 4)
        target.forward(torch.tensor([text]), one, chain([0], len(text), target.device), 1)
        one.keep([len(text)])
        state.append(one)
    state.select([0, 2])
    for step in range(70):
        tokens = torch.full((2, 1), 3 + step % (VOCAB - 3))
        logits = target.forward(tokens, state, chain(state.lengths, 1, target.device)).logits
        state.keep([1, 1])
    typed = [3 + step % (VOCAB - 3) for step in range(70)]
    for row, text in enumerate([texts[0], texts[2]]):
        torch.testing.assert_close(logits[row, 0], plain("llama", [*text, *typed])[-1])


def test_a_layer_that_does_not_exist_is_named() -> None:
    with pytest.raises(UserError, match="Layer 4 does not exist"):
        tiny_target("llama").check_layers([1, 4])


def test_a_states_buffers_are_freed_with_it() -> None:
    """Without the garbage collector: a batch's buffers are large, and it comes round rarely."""
    target = tiny_target("llama")
    gc.collect()
    gc.disable()
    try:
        state = target.new_state(1, 16)
        target.forward(torch.tensor([[1, 2, 3]]), state, chain([0], 3, target.device))
        state.keep([3])
        buffer = weakref.ref(state.buffers[0].keys)
        assert buffer() is not None
        del state
        assert buffer() is None
    finally:
        gc.enable()
