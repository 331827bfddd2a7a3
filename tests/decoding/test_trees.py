"""Trees in the engine: greedy text against `transformers.generate`, what is kept, what is refused."""

import pytest
import torch
import transformers

from deepspec.config.ranges import check
from deepspec.config.schema import Children, Config, DecodeConfig, Rule, TargetConfig, Tree
from deepspec.decoding import Engine, Request, Sampling
from deepspec.decoding.trees import children_of, depths_of
from deepspec.drafts.contract import DynamicTree, StaticTree
from deepspec.drafts.ngram import NgramOptions
from deepspec.drafts.registry import new_draft, option_classes
from deepspec.errors import UserError
from deepspec.target import State, Target
from tests.decoding.fakes import NEW, AnswerDraft, TableDraft, reference, tokens_of
from tests.models import FAMILIES, VOCAB, prompts, tiny_target

STATIC = StaticTree((-1, -1, 0, 0, 1, 2, 2, 5, -1, 8))
DYNAMIC = DynamicTree(depth=4, top_k=3, total_tokens=12)


def table(seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_greedy_text_is_generates_text(family: str) -> None:
    """Batch 1 and ragged batches, trees of one shape and of one a row."""
    target, texts = tiny_target(family), prompts(5, seed=1)
    answers = {tuple(text): reference(family, text) for text in texts}
    requests = [Request(text, NEW - 3 * index) for index, text in enumerate(texts)]
    expected = [answers[tuple(text)][: NEW - 3 * index] for index, text in enumerate(texts)]
    for tree, rows in ((STATIC, 1), (DYNAMIC, 1), (STATIC, 4), (DYNAMIC, 4)):
        results = Engine(target, AnswerDraft(answers, VOCAB), tree=tree, max_batch_size=rows).generate(
            requests
        )
        assert tokens_of(results) == expected
        accepted = [r.accepted for result in results for r in result.rounds]
        assert sum(accepted) > len(accepted)  # most rounds accept, and
        assert accepted.count(0) > len(accepted) / 50  # some do not


@pytest.mark.parametrize("algorithm", ["eagle3", "eagle", "mtp", "standalone"])
def test_real_drafts_grow_trees_that_change_nothing(algorithm: str) -> None:
    """Fresh ones, whose own text is poor: what is accepted is up to their luck, what is said is not."""
    target, texts = tiny_target("llama"), prompts(4, seed=5)
    torch.manual_seed(0)
    options = option_classes()[algorithm]()
    if hasattr(options, "vocab_size"):
        options.vocab_size = None
    draft = new_draft(options, target, None).double().eval()
    expected = [reference("llama", text) for text in texts]
    for tree, rows in ((STATIC, 3), (DYNAMIC, 1), (DYNAMIC, 3)):
        results = Engine(target, draft, tree=tree, max_batch_size=rows).generate(
            [Request(text, NEW) for text in texts]
        )
        assert tokens_of(results) == expected
        assert max(r.scheduled for result in results for r in result.rounds) > 5


def test_features_of_the_accepted_path_are_what_a_forward_gives() -> None:
    """[B, M, F] beside each committed token: captured at the position before it."""
    target, texts = tiny_target("qwen3"), prompts(4, seed=3)
    answers = {tuple(text): reference("qwen3", text) for text in texts}
    seen: list[tuple[list[int], torch.Tensor]] = []

    class Reader(AnswerDraft):
        needs_features, capture_layers = True, (0, 2)

        def update(self, state, committed):
            for row, count in enumerate(committed.counts):
                seen.append((list(state[row]), committed.features[row, :count].clone()))
            super().update(state, committed)

    engine = Engine(target, Reader(answers, VOCAB), tree=DYNAMIC, max_batch_size=3)
    engine.generate([Request(text, 20) for text in texts])
    several = [len(features) for _, features in seen]
    assert max(several) > 2
    for text, features in seen:
        prompt = next(p for p in answers if tuple(text[: len(p)]) == p)
        whole = torch.tensor([[*prompt, *answers[prompt]]])
        captured = target.capture(
            whole, torch.arange(whole.shape[1])[None], torch.zeros_like(whole), [0, 2]
        ).features[0]
        start = len(text) - 1
        torch.testing.assert_close(features, captured[start : start + len(features)])


@pytest.mark.parametrize("children", ["deterministic", "sampled"])
def test_batch_mates_do_not_change_a_sampled_answer(children: str) -> None:
    target, texts = tiny_target("llama"), prompts(5, seed=6)
    requests = [
        Request(text, 9 + 4 * index, Sampling(0.8, top_p=0.95), seed=index)
        for index, text in enumerate(texts)
    ]
    requests[3] = Request(texts[3], 25)  # a greedy one among them
    requests[4] = Request(texts[4], 18, Sampling(1.2, repetition_penalty=1.4))
    settings = {"tree": STATIC, "children": children}
    alone = [Engine(target, TableDraft(table()), **settings).generate([one])[0] for one in requests]
    together = Engine(target, TableDraft(table()), max_batch_size=4, **settings).generate(requests)
    assert tokens_of(alone) == tokens_of(together)
    for one, other in zip(alone, together, strict=True):
        assert [r.accepted for r in one.rounds] == [r.accepted for r in other.rounds]


@pytest.mark.parametrize("left", range(1, 9))
def test_the_contexts_end_cuts_trees_not_answers(left: int) -> None:
    target, (text,) = tiny_target("llama"), prompts(1, seed=4)
    answer = reference("llama", text, 12)
    target.max_positions = len(text) + left
    draft = AnswerDraft({tuple(text): answer}, VOCAB)
    (result,) = Engine(target, draft, tree=STATIC).generate([Request(text, NEW)])
    assert result.tokens == answer[:left]
    assert all(not r.cut and r.accepted <= r.verified <= 4 for r in result.rounds)


def test_learned_positions_have_an_end_that_no_drafted_token_passes() -> None:
    """A family whose positions are a table, and rows that reach its end beside rows that do not."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=2
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    texts, answers = [[5, 6, 7], [9] * 20, [3, 4]], {}
    for text in texts:
        ids = torch.tensor([text])
        settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None}
        written = model.generate(ids, max_new_tokens=32 - len(text), pad_token_id=0, **settings)
        answers[tuple(text)] = written[0, len(text) :].tolist()
    target = Target(model, None, "learned positions")
    known = AnswerDraft(answers, VOCAB)
    for engine in (
        Engine(target, TableDraft(table()), k=6, max_batch_size=3),
        Engine(target, known, tree=STATIC, max_batch_size=3),
        Engine(target, known, tree=DYNAMIC),
    ):
        results = engine.generate([Request(text, 99) for text in texts])
        assert tokens_of(results) == list(answers.values())
        assert {result.finish for result in results} == {"length"}


def test_records_of_a_tree_count_its_nodes_and_its_depth() -> None:
    target, (text,) = tiny_target("llama"), prompts(1, seed=2)
    draft = AnswerDraft({tuple(text): reference("llama", text)}, VOCAB)
    (result,) = Engine(target, draft, tree=STATIC).generate([Request(text, 30)])
    first, last = result.rounds[0], result.rounds[-1]
    assert (first.drafted, first.scheduled, first.verified) == (10, 10, 4)
    assert last.accepted + 1 == last.committed <= last.verified + 1
    assert sum(r.committed for r in result.rounds) == 29


@pytest.mark.parametrize(
    ("parents", "words"),
    [
        ([], "is empty"),
        ([-1, 3, 0], "orphan"),
        ([-1, -2], "orphan"),
        ([-1, 2, 1], "cycle"),
        ([-1, 1], "cycle"),
        ([-1, 2, -1], "before its parent"),
        ([-1] * (VOCAB + 1), "different tokens"),
    ],
)
def test_a_shape_that_is_no_tree_is_refused_before_anything_runs(parents: list[int], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Engine(tiny_target("llama"), TableDraft(table()), tree=StaticTree(tuple(parents)))


@pytest.mark.parametrize("parents", [[-1, 1, 0], [-1, 2, 0], [-1, -3, 0], [-1, 7, 0], [2, 0, 1]])
def test_a_drafts_tree_that_is_none_is_refused(parents: list[int]) -> None:
    class Broken(TableDraft):
        def propose(self, state, control):
            proposal = super().propose(state, control)
            proposal.parents = torch.tensor([parents])
            return proposal

    with pytest.raises(UserError, match="tree that is none"):
        Engine(tiny_target("llama"), Broken(table()), tree=StaticTree((-1, -1, 0))).generate(
            [Request([3], 9)]
        )


def test_sampled_children_that_were_left_out_are_refused() -> None:
    """A drawn child that is dropped for its looks is a leak."""

    class Pruning(TableDraft):
        def propose(self, state, control):
            proposal = super().propose(state, control)
            proposal.length = [2] * len(state)
            return proposal

    class Reordering(TableDraft):
        def propose(self, state, control):
            proposal = super().propose(state, control)
            proposal.parents = torch.tensor([[-1, 0, 0]])
            return proposal

    tree, request = StaticTree((-1, -1, 0)), Request([3], 9, Sampling(1.0))
    for draft, words in ((Pruning(table()), "every node"), (Reordering(table()), "all be there")):
        with pytest.raises(UserError, match=words):
            Engine(tiny_target("llama"), draft, tree=tree, children="sampled").generate([request])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tree": DYNAMIC, "children": "sampled"}, "decode.tree=dynamic"),
        ({"tree": STATIC, "rule": "block"}, "verifies chains"),
        ({"tree": DynamicTree(0, 1, 1)}, "tree_depth is 0"),
        ({"children": "random"}, "deterministic or sampled"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Engine(tiny_target("llama"), TableDraft(table()), **settings)


def test_a_target_that_cannot_do_trees_is_named() -> None:
    target = tiny_target("llama")
    target.require("chain")
    target._abilities["tree"] = "its state is recurrent"
    with pytest.raises(UserError, match=r"tree.*its state is recurrent"):
        Engine(target, TableDraft(table()), tree=STATIC)
    Engine(target, tree=STATIC)  # plain decoding needs none


@pytest.mark.parametrize(
    ("decode", "words"),
    [
        (DecodeConfig(tree=Tree.dynamic, children=Children.sampled), "decode.tree=dynamic"),
        (DecodeConfig(tree=Tree.static, rule=Rule.block), "verifies chains"),
        (DecodeConfig(tree_parents=[-1, 1]), "node 1 the parent 1"),
        (DecodeConfig(repetition_penalty=0.0), "repetition_penalty"),
        (DecodeConfig(tree_depth=0), "tree_depth"),
    ],
)
def test_the_configuration_is_checked_before_any_work(decode: DecodeConfig, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check(Config(name="x", target=TargetConfig(name="x", path="x"), draft=NgramOptions(), decode=decode))


def test_the_configuration_makes_the_engine() -> None:
    decode = DecodeConfig(tree=Tree.static, children=Children.sampled, tree_parents=[-1, 0], rule=Rule.token)
    how = Engine.configured(tiny_target("llama"), TableDraft(table()), decode).how
    assert (how.tree, how.sampled_children, how.rule) == (StaticTree((-1, 0)), True, "token")
    how = Engine.configured(tiny_target("llama"), None, DecodeConfig(tree=Tree.dynamic, tree_depth=3)).how
    assert how.tree == DynamicTree(3, DecodeConfig().tree_top_k, DecodeConfig().tree_total_tokens)
    assert Engine.configured(tiny_target("llama"), None, DecodeConfig(), k=7).how.k == 7
    default = DecodeConfig().tree_parents
    assert max(depths_of(default)) == 5 and max(map(len, children_of(default).values())) == 3


@pytest.mark.parametrize(("parents", "moved"), [((-1, 0, 1), False), ((-1, -1, 0, 1), True)])
def test_only_a_path_beside_the_first_nodes_is_moved(
    parents: tuple[int, ...], moved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moving touches every layer's keys and values; the nodes of a path that come first stand right already."""
    paths = []
    keep = State.keep

    def spy(state: State, counts: list[int], path: torch.Tensor | None = None) -> None:
        paths.append(path)
        keep(state, counts, path)

    monkeypatch.setattr(State, "keep", spy)
    target, (text,) = tiny_target("llama"), prompts(1, seed=2)
    answer = reference("llama", text)
    draft = AnswerDraft({tuple(text): answer}, VOCAB)
    (result,) = Engine(target, draft, tree=StaticTree(parents)).generate([Request(text, NEW)])
    assert result.tokens == answer and max(r.accepted for r in result.rounds) > 1
    assert any(path is not None for path in paths) == moved
