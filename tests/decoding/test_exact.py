"""`decode.exact`: in bfloat16, too, speculative text is plain decoding's, token for token; no tie is excused."""

import functools

import pytest
import torch
import transformers

from deepspec.config.schema import DecodeConfig
from deepspec.decoding import Engine, Request
from deepspec.drafts.contract import Proposal, StaticTree
from deepspec.errors import UserError
from deepspec.target import Target
from tests.decoding.fakes import AnswerDraft, TableDraft, tokens_of
from tests.models import FAMILIES, VOCAB, prompts, tiny_target

NEW = 28
TREE = StaticTree((-1, -1, 0, 0, 1, 2, 2, 5))


@functools.cache
def low_precision(family: str) -> Target:
    """As wide as a matrix must be for its product to be summed otherwise at another height."""
    name, extra = FAMILIES[family]
    config = getattr(transformers, name)(
        vocab_size=VOCAB,
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=2,
        pad_token_id=0,
        **{key: value for key, value in extra.items() if key == "sliding_window"},
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.08)
    return Target(model, None, f"{family} in bfloat16")


def requests_of(count: int) -> list[Request]:
    return [Request(text, NEW - index % 7) for index, text in enumerate(prompts(count, seed=31))]


class Knowing(AnswerDraft):
    """Chains of the right answers, with a mistake now and then."""

    def propose(self, state, control):
        path = list(range(-1, control.max_tokens - 1))
        rows = [self._tokens(self.dice(text), path, self._ahead(text)) for text in state]
        return Proposal(torch.tensor(rows), [len(path)] * len(rows))


def check_same(target: Target, rows: int, requests: list[Request]) -> None:
    """Chains and trees that are accepted in part, each against plain decoding of the same shape."""
    for draft, settings in ((Knowing, {"k": 4}), (AnswerDraft, {"tree": TREE})):
        how = {**settings, "max_batch_size": rows, "exact": True}
        plain = tokens_of(Engine(target, **how).generate(requests))
        answers = {tuple(r.tokens): text for r, text in zip(requests, plain, strict=True)}
        results = Engine(target, draft(answers, VOCAB), **how).generate(requests)
        assert tokens_of(results) == plain
        rounds = [r for result in results for r in result.rounds]
        assert any(r.accepted == 0 for r in rounds) and sum(r.accepted for r in rounds) > len(rounds)


@pytest.mark.parametrize(("family", "rows"), [("llama", 1), ("mistral_sliding", 1), ("qwen2", 3)])
def test_text_is_plain_decodings_bit_for_bit(family: str, rows: int) -> None:
    check_same(low_precision(family), rows, requests_of(6))


def test_arithmetic_that_follows_the_shape_of_a_forward_does_no_harm() -> None:
    """A layer that adds another constant for every number of tokens: rounding by shape, seen large."""
    target, requests = low_precision("llama"), requests_of(3)

    def by_shape(module: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(output.shape[1])
        return output + 0.5 * torch.randn(output.shape[-1], generator=generator).to(output.dtype)

    hook = target.layers[0].register_forward_hook(by_shape)
    try:
        check_same(target, 1, requests)
        check_same(target, 2, requests)
        plain = tokens_of(Engine(target, k=4).generate(requests))
        answers = {tuple(r.tokens): text for r, text in zip(requests, plain, strict=True)}
        assert tokens_of(Engine(target, Knowing(answers, VOCAB), k=4).generate(requests)) != plain
    finally:
        hook.remove()


@pytest.mark.parametrize("rows", [1, 2])
def test_a_target_whose_tokens_feel_their_neighbours_is_refused(rows: int) -> None:
    target = low_precision("llama")

    def mix(module: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        return output + output.mean((0, 1)) / 64

    hook = target.layers[1].register_forward_hook(mix)
    try:
        with pytest.raises(UserError, match=r"decode\.exact cannot be had with llama in bfloat16"):
            Engine(target, k=4, max_batch_size=rows, exact=True)
    finally:
        hook.remove()


def test_trees_need_an_attention_that_can_be_computed_in_float64() -> None:
    with pytest.raises(UserError, match=r"decode\.exact reads trees with scaled-dot-product"):
        Engine(tiny_target("gemma2"), tree=TREE, exact=True)
    Engine(tiny_target("gemma2"), exact=True)


def test_the_shape_is_one_for_plain_decoding_and_for_every_proposal() -> None:
    """Seen at the model itself: what its first layer reads after the prompts."""
    target, requests = low_precision("llama"), requests_of(5)
    shapes: set[tuple] = set()

    def see(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        shapes.add((tuple(args[0].shape), tuple(kwargs["attention_mask"].shape)))

    engine = Engine(target, TableDraft(table()), k=3, max_batch_size=2, exact=True)
    decode = DecodeConfig(k=3, exact=True)
    plain = Engine.configured(target, None, decode, max_batch_size=2)
    hook = target.layers[0].register_forward_pre_hook(see, with_kwargs=True)
    try:
        engine.generate(requests)
        plain.generate(requests)
    finally:
        hook.remove()
    longest = max(len(r.tokens) + r.max_new_tokens for r in requests) + 4
    assert {shape for shape in shapes if shape[0][0] == 2} == {((2, 4, 192), (2, 1, 4, 256))}
    assert longest < 256


def table() -> torch.Tensor:
    return 2 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))
