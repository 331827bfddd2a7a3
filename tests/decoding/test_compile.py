"""`decode.compile`: the same text from one graph a shape; without a compiler, the same text without one."""

import pytest
import torch

from deepspec.decoding import Engine, Request
from deepspec.drafts.eagle3 import Eagle3Options
from deepspec.drafts.registry import new_draft
from deepspec.target import Target
from deepspec.target.compiled import Compiled
from tests.decoding.fakes import reference, tokens_of
from tests.models import prompts, tiny_model

NEW = 24


@pytest.fixture
def target() -> Target:
    """Its own, as compiling leaves hooks behind; the model is cached, and its hooks are removed again."""
    made = Target(tiny_model("llama"), None, "tiny llama")
    yield made
    for layer in made.layers:
        layer._forward_hooks.clear()
    torch._dynamo.reset()


def head(target: Target) -> torch.nn.Module:
    torch.manual_seed(0)
    return new_draft(Eagle3Options(vocab_size=None), target, None).double().eval()


def check_text(target: Target) -> None:
    texts = prompts(5, seed=3)
    requests = [Request(text, NEW) for text in texts]
    expected = [reference("llama", text, NEW) for text in texts]
    for rows in (1, 2):
        for draft in (None, head(target)):
            assert (
                tokens_of(Engine(target, draft, k=2, max_batch_size=rows, compile=True).generate(requests))
                == expected
            )


def test_one_graph_a_shape_and_the_same_text(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced by the real tracer; what a graph's code is made of is not this test's business, and takes a minute."""
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda step, **how: compile_(step, backend=count, fullgraph=True, **how)
    )
    check_text(target)
    assert len(graphs) == 4  # one and two rows; plainly, and with three tokens and features


def test_features_are_those_of_this_forward(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that reads features accepts as much as without compiling, round for round."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda step, **how: compile_(step, backend="eager", **how))
    requests = [Request(text, NEW) for text in prompts(4, seed=3)]
    counts = []
    for compiled in (False, True):
        results = Engine(target, head(target), k=3, compile=compiled).generate(requests)
        counts.append([[r.accepted for r in result.rounds] for result in results])
    assert counts[0] == counts[1]


def test_without_a_compiler_one_warning_says_so(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> None:
        raise RuntimeError("no C++ compiler")

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda step, **how: compile_(step, backend=broken, **how))
    with pytest.warns(UserWarning, match="decode.compile: nothing is compiled here") as seen:
        check_text(target)
    assert len(seen) == 2  # of plain decoding and of the draft's


def test_other_errors_are_not_taken_for_a_missing_compiler() -> None:
    def step() -> torch.Tensor:
        raise torch.OutOfMemoryError("full")

    compiled = Compiled(step, [])
    compiled.run = step
    with pytest.raises(torch.OutOfMemoryError):
        compiled()
