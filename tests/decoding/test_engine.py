"""The engine against `transformers.generate`, and its sampled output against exact probabilities."""

import pytest
import torch

from deepspec.decoding import Engine, Request, Sampling
from deepspec.drafts.contract import Proposal
from deepspec.drafts.eagle3 import Eagle3Options
from deepspec.drafts.ngram import NgramDraft, NgramOptions
from deepspec.drafts.registry import new_draft
from deepspec.errors import UserError
from deepspec.target import Target
from tests.decoding.fakes import NEW, reference, tokens_of
from tests.drafts.packed import fit
from tests.models import FAMILIES, VOCAB, prompts, tiny_target


def draft_for(target: Target, *taught: list[list[int]], **options: object) -> torch.nn.Module:
    """A random draft, or one taught the answers of `taught` = (prompts, answers).

    Its proposals are poor or fair, neither of which a lossless decoder may show.
    """
    torch.manual_seed(0)
    ids = torch.arange(0, VOCAB, 2)
    draft = new_draft(Eagle3Options(vocab_size=len(ids), ttt_steps=3, **options), target, ids).double().eval()
    if taught:
        fit(draft, target, *taught)
    return draft


class Oracle:
    """Proposes the right answer."""

    needs_features = False
    capture_layers = ()

    def __init__(self, answer: list[int]) -> None:
        self.answer = answer

    def begin(self, beginning):
        return {"at": 1}

    def join(self, state, new):
        return new

    def propose(self, state, control):
        ahead = self.answer[state["at"] : state["at"] + control.max_tokens]
        ahead += [0] * (control.max_tokens - len(ahead))
        return Proposal(torch.tensor([ahead]), [control.max_tokens])

    def update(self, state, committed):
        state["at"] += committed.counts[0]

    def select(self, state, rows):
        pass


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_greedy_text_is_generates_text(family: str) -> None:
    """1,400 tokens a family by chains; `test_trees` has 680 a family by trees: more than 20,000 in all."""
    target, texts = tiny_target(family), prompts(7, seed=1)
    expected = [reference(family, text) for text in texts]
    requests = [Request(text, NEW, id=str(index)) for index, text in enumerate(texts)]
    draft = draft_for(target, texts, expected)
    assert tokens_of(Engine(target).generate(requests)) == expected
    assert tokens_of(Engine(target, max_batch_size=4).generate(requests)) == expected
    for engine in (Engine(target, draft, k=4), Engine(target, draft, k=3, max_batch_size=4)):
        results = engine.generate(requests)
        assert tokens_of(results) == expected
        accepted = [r.accepted for result in results for r in result.rounds]
        assert sum(accepted) > len(accepted) / 4  # many rounds accept, and
        assert accepted.count(0) > len(accepted) / 20  # some do not
    lookup = Engine(target, NgramDraft(NgramOptions()), k=4, max_batch_size=4)
    assert tokens_of(lookup.generate(requests)) == expected


def test_a_perfect_draft_is_accepted_whole() -> None:
    """With the target's own next tokens proposed, every round commits K + 1: the accounting shows it."""
    target, (text,) = tiny_target("llama"), prompts(1, seed=2)
    answer = reference("llama", text, 31)

    (result,) = Engine(target, Oracle(answer), k=5).generate([Request(text, 31)])
    assert result.tokens == answer
    assert [r.accepted for r in result.rounds] == [5] * 5
    assert [r.committed for r in result.rounds] == [6] * 5
    assert not any(r.cut for r in result.rounds)


def test_an_end_token_inside_an_accepted_block_ends_the_answer() -> None:
    target, (text,) = tiny_target("llama"), prompts(1, seed=4)
    whole = reference("llama", text)
    eos = whole[17]
    expected = whole[: whole.index(eos) + 1]
    draft = draft_for(target)
    for engine in (Engine(target), Engine(target, draft, k=6)):
        (result,) = engine.generate([Request(text, NEW, eos=(eos,))])
        assert result.tokens == expected
        assert result.finish == "eos"
        assert sum(r.committed for r in result.rounds) == len(expected) - 1


def test_what_lies_behind_an_end_token_counts_for_nothing() -> None:
    """A round whose drafted tokens were all right, with the end token among them."""
    target, (text,) = tiny_target("llama"), prompts(1, seed=2)
    answer = reference("llama", text, 31)
    eos = answer[3]
    (result,) = Engine(target, Oracle(answer), k=6).generate([Request(text, 31, eos=(eos,))])
    (round_,) = result.rounds
    assert result.tokens == answer[: answer.index(eos) + 1]
    kept = answer.index(eos)  # the first token belongs to the prefill
    assert 1 <= kept <= 3
    assert (round_.cut, round_.drafted) == (True, 6)
    assert (round_.committed, round_.accepted, round_.verified) == (kept, kept, kept)


def test_the_context_limit_ends_the_answer() -> None:
    target, (text,) = tiny_target("llama"), prompts(1, seed=4)
    target.max_positions = len(text) + 7
    for engine in (Engine(target), Engine(target, draft_for(target), k=6)):
        (result,) = engine.generate([Request(text, NEW)])
        assert result.tokens == reference("llama", text, 7)
        assert result.finish == "length"


def test_batch_mates_do_not_change_a_sampled_answer() -> None:
    target, texts = tiny_target("qwen3"), prompts(5, seed=6)
    draft = draft_for(target)
    requests = [
        Request(text, 20 + index, Sampling(0.8, top_p=0.95), seed=index) for index, text in enumerate(texts)
    ]
    requests[3] = Request(texts[3], 25)  # a greedy one among them
    alone = [Engine(target, draft, k=3).generate([request])[0] for request in requests]
    together = Engine(target, draft, k=3, max_batch_size=4).generate(requests)
    assert tokens_of(alone) == tokens_of(together)
    for one, other in zip(alone, together, strict=True):
        assert [r.accepted for r in one.rounds] == [r.accepted for r in other.rounds]


def test_streamed_tokens_are_the_generated_ones() -> None:
    target, (text,) = tiny_target("llama"), prompts(1, seed=8)
    engine = Engine(target, draft_for(target), k=4)
    pieces = list(engine.stream(Request(text, NEW)))
    assert [token for tokens, _ in pieces for token in tokens] == reference("llama", text)
    assert pieces[0][1] is None
    assert all(round_.committed == len(tokens) for tokens, round_ in pieces[1:])


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request([], 5), "empty prompt"),
        (Request([3] * 256, 5), "Shorten the prompt"),
        (Request([3], 0), "max_new_tokens=0"),
        (Request([3], 5, Sampling(-1.0)), "temperature"),
        (Request([3], 5, Sampling(float("nan"))), "temperature is nan"),
        (Request([3], 5, Sampling(float("inf"))), "temperature is inf"),
        (Request([3], 5, Sampling(repetition_penalty=0.0)), "repetition_penalty"),
        (Request([3, VOCAB], 5), "another tokenizer"),
        (Request([3], 5, stop=("x",)), "no tokenizer"),
    ],
)
def test_impossible_requests_are_refused(request_: Request, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Engine(tiny_target("llama")).generate([request_])


@pytest.mark.parametrize("speculative", [False, True])
def test_logits_that_are_no_numbers_stop_the_request(speculative: bool) -> None:
    """argmax of NaN is token 0: without a check a broken target gives plausible text and full acceptance."""
    target, (text,) = tiny_target("llama"), prompts(1, seed=8)
    draft = draft_for(target) if speculative else None
    poisoned = reference("llama", text, 6)[-1]
    rows = target.model.get_input_embeddings().weight
    kept = rows[poisoned].clone()
    try:
        with torch.no_grad():
            rows[poisoned] = torch.nan
        with pytest.raises(UserError, match=r"'bad'.*not numbers"):
            Engine(target, draft, k=3).generate([Request(text, 20, id="bad")])
    finally:
        with torch.no_grad():
            rows[poisoned] = kept


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=str)
@pytest.mark.parametrize("after", [0, 1])
def test_logits_that_have_overflowed_stop_the_request(after: int, sampling: Sampling) -> None:
    """An infinite one would win every argmax, and its softmax is NaN: no sum of logits shows it. −inf is a mask."""
    target, (text,) = tiny_target("llama"), prompts(1, seed=8)
    Engine(target, draft_for(target), k=3)  # what the target can do is tried before its logits are spoilt
    value, forwards = torch.inf, 0

    def spoil(module, inputs, logits):
        nonlocal forwards
        forwards += 1
        return logits.index_fill(-1, torch.tensor([5]), value) if forwards > after else logits

    engine = Engine(target, draft_for(target), k=3)  # tries what the target can do, while it is whole
    hook = target.model.get_output_embeddings().register_forward_hook(spoil)
    try:
        with pytest.raises(UserError, match=r"'bad'.*not numbers"):
            engine.generate([Request(text, 20, sampling, id="bad")])
        value, forwards = -torch.inf, 0
        (result,) = engine.generate([Request(text, 20, sampling)])
        assert len(result.tokens) == 20 and 5 not in result.tokens[after:]
    finally:
        hook.remove()


def test_k_below_one_is_refused() -> None:
    with pytest.raises(UserError, match=r"decode\.k is 0"):
        Engine(tiny_target("llama"), k=0)
