"""How often a round waits for the device: counted, so that no line can quietly add one."""

from collections import Counter

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from deepspec.decoding import Engine, Request, Sampling
from deepspec.drafts.contract import DynamicTree, StaticTree
from deepspec.drafts.eagle3 import Eagle3Options
from deepspec.drafts.ngram import NgramDraft
from deepspec.drafts.options import NgramOptions
from deepspec.drafts.registry import new_draft
from tests.decoding.fakes import TableDraft
from tests.models import VOCAB, prompts, tiny_target

# What copies a value to Python, or makes a shape from values, and so waits for all that the device has to do.
WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "equal",
    "is_nonzero",
    "masked_select",
    "unique",
    "_unique2",
    "item",
}
METHODS = {
    torch.Tensor.tolist,
    torch.Tensor.item,
    torch.Tensor.numpy,
    torch.Tensor.cpu,
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
}


class Waits(TorchDispatchMode):
    def __init__(self, found: Counter) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name in WAITS or (name == "index" and any(_is_mask(index) for index in args[1])):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


class Methods(TorchFunctionMode):
    """On a CPU `tolist` is no operation of the dispatcher."""

    def __init__(self, found: Counter) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in METHODS:
            self.found[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype == torch.bool


def waits_of_a_round(draft, sampling: Sampling, rows: int = 3, **settings) -> Counter:
    target, found = tiny_target("llama"), Counter()
    engine = Engine(target, draft, k=3, max_batch_size=4, **settings)
    batch = engine._batch([])
    for seed, text in enumerate(prompts(rows, seed=9)):
        batch.admit(Request(text, 30, sampling, seed=seed), 30)
    batch.step()
    with Waits(found), Methods(found):
        batch.step()
    return found


def eagle3():
    torch.manual_seed(0)
    ids = torch.arange(0, VOCAB, 2)
    return new_draft(Eagle3Options(vocab_size=len(ids)), tiny_target("llama"), ids).double().eval()


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(0.8, top_k=20, top_p=0.9), Sampling(1.0, repetition_penalty=1.2)],
    ids=str,
)
@pytest.mark.parametrize("rule", ["auto", "token"])
def test_a_round_of_chains_waits_once(rule: str, sampling: Sampling) -> None:
    """For the accepted lengths and tokens, which the next round needs."""
    assert waits_of_a_round(eagle3(), sampling, rule=rule) == {"tolist": 1}


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8)], ids=str)
def test_prompt_lookup_waits_once(sampling: Sampling) -> None:
    """It reads what was committed from what the round has fetched already."""
    assert waits_of_a_round(NgramDraft(NgramOptions(min_n=1)), sampling) == {"tolist": 1}


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=str)
def test_plain_decoding_waits_once(sampling: Sampling) -> None:
    assert waits_of_a_round(None, sampling) == {"tolist": 1}


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8)], ids=str)
def test_a_fixed_shape_adds_no_wait(sampling: Sampling) -> None:
    assert waits_of_a_round(eagle3(), sampling, exact=True) == {"tolist": 1}
    assert waits_of_a_round(eagle3(), sampling, tree=StaticTree((-1, -1, 0)), exact=True) == {"tolist": 1}


@pytest.mark.parametrize("children", ["deterministic", "sampled"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8)], ids=str)
def test_a_round_of_trees_waits_once(children: str, sampling: Sampling) -> None:
    draft = TableDraft(torch.randn(VOCAB, VOCAB, dtype=torch.float64))
    found = waits_of_a_round(draft, sampling, tree=StaticTree((-1, -1, 0, 0, 2)), children=children)
    assert found == {"tolist": 1}


@pytest.mark.parametrize("tree", [StaticTree((-1, -1, 0, 0, 2)), DynamicTree(2, 3, 9)], ids=str)
def test_a_tree_that_a_draft_grows_waits_once(tree: StaticTree | DynamicTree) -> None:
    assert waits_of_a_round(eagle3(), Sampling(0.8), tree=tree) == {"tolist": 1}


def test_the_counters_count() -> None:
    found: Counter = Counter()
    mask = torch.tensor([True, False])
    with Waits(found), Methods(found):
        mask.tolist()
        mask[0].item()
        bool(mask[0])
        torch.nonzero(mask)
        torch.equal(mask, mask)
        mask[mask]
    assert {"tolist", "item", "nonzero", "equal"} <= set(found)
    assert sum(found.values()) >= 6
