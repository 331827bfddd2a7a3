"""What training keeps for the backward pass: less where that is asked for, or would be too much, with the same loss."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepspec.drafts import statistics
from tests.drafts.packed import batch_of
from tests.drafts.test_drafts_conform import IDS, ONE_EACH, STEPS, make
from tests.models import VOCAB, prompts, tiny_target

KEYS = ("valid", "hits", "match", "overlap", "q_text", "p_text")


def batch(target, draft):
    texts = [[*text, *range(3, 25)] for text in prompts(3, seed=5, longest=12)]
    return batch_of(target, draft, texts, [2, 3, 4], STEPS)


def learnt(draft, target):
    """Loss parts, statistics and gradients of one batch."""
    draft.zero_grad()
    loss = draft.train()(batch(target, draft))
    total = sum(loss.sums[name] / loss.weights[name] for name in draft.default_loss)
    total.backward()
    gradients = {name: one.grad.clone() for name, one in draft.named_parameters() if one.grad is not None}
    return {**loss.sums, **loss.weights, **{key: loss[key] for key in KEYS}, **gradients}, loss


def check_same(first, second) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(
            second[name], value, rtol=1e-5, atol=1e-7, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize(("reduced", "weights"), [(False, "dpace"), (True, "decay")])
@pytest.mark.parametrize("variant", ONE_EACH)
def test_pieces_learn_what_the_whole_learns(
    variant: str, reduced: bool, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if weights == "dpace" and variant == "standalone":
        pytest.skip("a small language model has no steps to weigh: it is trained on every position once")
    more = {} if variant == "standalone" else {"step_weights": weights}
    target = tiny_target("llama")
    draft = make(target, variant, reduced=reduced, **more)
    whole, _ = learnt(draft, target)
    width = len(IDS) if reduced else VOCAB
    monkeypatch.setattr(statistics, "AT_ONCE", 0)
    monkeypatch.setattr(statistics, "TEACHER_AT_ONCE", 0)
    monkeypatch.setattr(statistics, "PIECE", 7 * width)  # seven positions at a time
    pieces, _ = learnt(draft, target)
    check_same(whole, pieces)


@pytest.mark.parametrize("variant", ONE_EACH)
def test_gradient_checkpointing_learns_the_same(variant: str) -> None:
    target = tiny_target("llama")
    draft = make(target, variant)
    plain, _ = learnt(draft, target)
    draft.gradient_checkpointing_enable({"use_reentrant": False})
    check_same(plain, learnt(draft, target)[0])
    draft.gradient_checkpointing_disable()
    check_same(plain, learnt(draft, target)[0])


def kept(draft, target) -> int:
    """Elements that the forward keeps for the backward pass, each tensor once; parameters and inputs left out."""
    given, seen = batch(target, draft), {}
    known = {one.untyped_storage().data_ptr() for one in draft.parameters()}
    known |= {one.untyped_storage().data_ptr() for one in vars(given).values() if isinstance(one, Tensor)}

    def pack(one: Tensor) -> Tensor:
        seen[one.untyped_storage().data_ptr()] = one
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        loss = draft.train()(given)
    assert loss.sums
    return sum(one.untyped_storage().nbytes() for at, one in seen.items() if at not in known)


@pytest.mark.parametrize("variant", ["eagle3", "mtp", "dflash", "standalone"])
def test_gradient_checkpointing_keeps_less(variant: str) -> None:
    target = tiny_target("llama")
    draft = make(target, variant)
    before = kept(draft, target)
    draft.gradient_checkpointing_enable({"use_reentrant": False})
    assert kept(draft, target) < 0.8 * before


class Largest(TorchDispatchMode):
    """Elements of the largest tensor of vocabulary width that an operation made."""

    def __init__(self, width: int, tables: set[int]) -> None:
        """tables: the other sides of weights that are as wide, which are no positions."""
        super().__init__()
        self.width, self.tables, self.most = width, tables, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if not isinstance(one, Tensor) or not one.is_floating_point() or one.shape[-1:] != (self.width,):
                continue
            if one.dim() < 2 or one.shape[-2] not in self.tables:
                self.most = max(self.most, one.numel())
        return made


@pytest.mark.parametrize("variant", [one for one in ONE_EACH if one != "standalone"])
def test_no_array_of_all_positions_and_tokens_is_made(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama")
    draft = make(target, variant, reduced=False)
    positions = 5
    monkeypatch.setattr(statistics, "AT_ONCE", 0)
    monkeypatch.setattr(statistics, "TEACHER_AT_ONCE", 0)
    monkeypatch.setattr(statistics, "PIECE", positions * VOCAB)
    given = batch(target, draft)
    draft.train()
    tables = {target.hidden_size} | {
        len(one.T) for one in draft.parameters() if one.dim() == 2 and VOCAB in one.shape
    }
    with Largest(VOCAB, tables) as largest:
        loss = draft(given)
        sum(loss.sums[name] for name in draft.default_loss).backward()
    assert int(loss.valid[..., 0].sum()) > 4 * positions
    assert 0 < largest.most <= positions * VOCAB
