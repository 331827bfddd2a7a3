"""What every draft must keep, whatever its family: trained as it decodes, and what it decodes follows from the text."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepspec.decoding import Engine, Request
from deepspec.drafts.contract import Beginning, Committed, DraftContext, DraftLoss, DynamicTree, Proposal
from deepspec.drafts.statistics import StepStatistics
from deepspec.drafts.walk import walk
from deepspec.target import Target
from deepspec.training.saved_draft import load_draft
from tests.drafts.packed import batch_of, fit
from tests.models import prompts


class Forced:
    """A control that 'draws' given tokens (a list, or one a row) and keeps the logits it was shown."""

    tree = None

    def __init__(self, tokens: list[int] | list[list[int]], steps: int) -> None:
        self.tokens = tokens if tokens and isinstance(tokens[0], list) else [tokens]
        self.max_tokens, self.logits, self.confidence = steps, [], []

    def draw(self, logits, parent, vocab=None):
        self.logits.append(logits if len(self.tokens) > 1 else logits[0])
        return torch.tensor([row[parent + 1] for row in self.tokens]), None

    def go_on(self, confidence):
        self.confidence.append(confidence if len(self.tokens) > 1 else confidence[0])
        return torch.ones(len(self.tokens), dtype=torch.bool)


class Drawn:
    """A control for trees: a node's children are the most probable, or given ones; keeps the logits by node."""

    def __init__(self, tree, max_tokens: int, with_q: bool = False) -> None:
        self.tree, self.max_tokens, self.with_q = tree, max_tokens, with_q
        self.logits: dict[int, Tensor] = {}

    def draw_children(self, logits, parent, count, vocab=None):
        self.logits[parent] = logits
        picked = logits.topk(count, -1).indices
        q = logits.softmax(-1) if self.with_q else None
        return (picked if vocab is None else vocab[picked]), q


def features_of(draft, target: Target, text: list[int]) -> Tensor:
    tokens = torch.tensor([text])
    positions = torch.arange(len(text))[None]
    return target.capture(tokens, positions, torch.zeros_like(tokens), draft.capture_layers).features


def begun(draft, target: Target, text: list[int], max_rows: int = 1):
    """A fresh state whose pending token is the text's last."""
    features = features_of(draft, target, text[:-1])
    return draft.begin(Beginning(DraftContext(target), torch.tensor([text]), features, 64, max_rows))


def decoding_logits(draft, target: Target, text: list[int], anchor: int, steps: int) -> Tensor:
    """[K, Vd] logits that `propose` computes after `text[:anchor+1]`, forced along the text's own tokens."""
    return torch.stack(decoded(draft, target, text, anchor, steps).logits)


def decoded(draft, target: Target, text: list[int], anchor: int, steps: int) -> Forced:
    state = begun(draft, target, text[: anchor + 1])
    forced = Forced(text[anchor + 1 :], steps)
    with torch.inference_mode():
        draft.propose(state, forced)
    return forced


def training_steps(draft, batch, monkeypatch) -> tuple[DraftLoss, dict[int, tuple[Tensor, Tensor | None]]]:
    """The loss of a batch, and (logits [n, Vd], raw confidence [n]) of every step at its supervised anchors."""
    seen: dict[int, tuple[Tensor, Tensor | None]] = {}
    add = StepStatistics.add

    def spy(self, step, logits, weight=1.0, confidence=None):
        seen[step] = logits(slice(None)), confidence
        return add(self, step, logits, weight, confidence)

    monkeypatch.setattr(StepStatistics, "add", spy)
    with torch.no_grad():
        loss = draft(batch)
    monkeypatch.undo()
    return loss, seen


def training_logits(draft, batch, monkeypatch) -> tuple[DraftLoss, dict[int, Tensor]]:
    loss, seen = training_steps(draft, batch, monkeypatch)
    return loss, {step: logits for step, (logits, _) in seen.items()}


def check_training_is_decoding(
    draft, target: Target, texts: list[list[int]], starts: list[int], steps: int, monkeypatch, every: int = 3
) -> None:
    """At every `every`-th anchor of the packed texts (answers from `starts`), all `steps` steps, to 1e-5: logits,
    and the confidence of a draft that has any."""
    batch = batch_of(target, draft, texts, starts, steps)
    loss, seen = training_steps(draft, batch, monkeypatch)
    where = [torch.nonzero(loss.valid[0, :, step])[:, 0].tolist() for step in range(steps)]
    offset = checked = 0
    for text, start in zip(texts, starts, strict=True):
        for anchor in range(start, len(text) - steps, every):
            forced = decoded(draft, target, text, anchor, steps)
            for step in range(steps):
                row = where[step].index(offset + anchor)
                logits, confidence = seen[step]
                torch.testing.assert_close(logits[row], forced.logits[step], rtol=1e-5, atol=1e-5)
                if confidence is not None:
                    expected = forced.confidence[step]
                    torch.testing.assert_close(confidence[row].sigmoid(), expected, rtol=1e-5, atol=1e-5)
                checked += 1
        offset += len(text)
    assert checked > 4 * steps


def check_rows_are_alone(draft, target: Target, steps: int) -> None:
    """Ragged rows that come, accept differently and go propose what each would alone, from a fresh start."""
    texts = [[*text, *range(3 + row, 30)] for row, text in enumerate(prompts(3, seed=21, longest=9))]
    ends = [len(prompt) + 1 for prompt in prompts(3, seed=21, longest=9)]
    state, alive = None, []

    def check() -> None:
        forced = Forced([texts[row][ends[row] :] for row in alive], steps)
        draft.propose(state, forced)
        for place, row in enumerate(alive):
            alone = decoding_logits(draft, target, texts[row], ends[row] - 1, steps)
            found = [logits[place] if len(alive) > 1 else logits for logits in forced.logits]
            torch.testing.assert_close(torch.stack(found), alone, rtol=1e-5, atol=1e-5)

    def update(counts: Sequence[int]) -> None:
        width = max(counts)
        tokens = torch.zeros(len(alive), width, dtype=torch.long)
        features = None
        for place, (row, count) in enumerate(zip(alive, counts, strict=True)):
            text, end = texts[row], ends[row]
            tokens[place, :count] = torch.tensor(text[end : end + count])
            captured = features_of(draft, target, text[: end + count - 1])[0, end - 1 :]
            features = (
                captured.new_zeros(len(alive), width, captured.shape[-1]) if features is None else features
            )
            features[place, :count] = captured
            ends[row] += count
        values = [row[:count] for row, count in zip(tokens.tolist(), counts, strict=True)]
        draft.update(state, Committed(tokens, features, values))

    with torch.inference_mode():
        for row in (0, 1):
            state = draft.join(state, begun(draft, target, texts[row][: ends[row]], 3))
            alive.append(row)
        check()
        update([2, 1])
        state = draft.join(state, begun(draft, target, texts[2][: ends[2]], 3))
        alive.append(2)
        check()
        update([1, steps + 1, 2])
        update([1, 2, 1])  # a round without a proposal
        draft.select(state, [0, 2])
        alive[:] = [0, 2]
        check()
        update([2, 3])
        draft.select(state, [1])
        alive[:] = [2]
        check()


def check_packed_is_the_sum(draft, target: Target) -> None:
    """Sums and weights of every part over packed documents are those of the documents alone."""
    texts, starts = [[*text, *range(3, 12)] for text in prompts(3, seed=13)], [1, 2, 3]
    together = draft(batch_of(target, draft, texts, starts))
    apart = [
        draft(batch_of(target, draft, [text], [start])) for text, start in zip(texts, starts, strict=True)
    ]
    for part in draft.default_loss:
        for kind in ("sums", "weights"):
            total = sum(getattr(loss, kind)[part] for loss in apart)
            torch.testing.assert_close(getattr(together, kind)[part], total, rtol=1e-5, atol=1e-7)


def check_offline_is_the_engine(draft, target: Target, k: int = 4) -> None:
    """On the target's own greedy text, walking the training statistics gives the engine's rounds one by one."""
    texts = prompts(3, seed=15)
    answers = [result.tokens for result in Engine(target).generate([Request(text, 30) for text in texts])]
    fit(draft, target, texts, answers)
    seen = total = 0
    for prompt, answer in zip(texts, answers, strict=True):
        (result,) = Engine(target, draft, k=k).generate([Request(prompt, 30)])
        assert result.tokens == answer
        batch = batch_of(target, draft, [[*prompt, *result.tokens]], [len(prompt)], k)
        with torch.no_grad():
            loss = draft(batch)
        hits = loss.hits[0]
        anchor = len(prompt)
        for round_ in result.rounds:
            accepted = int(hits[anchor, : round_.verified].long().cumprod(0).sum())
            assert accepted == round_.accepted
            anchor += round_.committed
            seen, total = seen + accepted, total + 1
        walked = walk(hits[None], loss.valid, batch.loss_mask, batch.documents)
        assert (walked.rounds, walked.committed) == (
            len(result.rounds),
            sum(r.committed for r in result.rounds),
        )
    assert seen > total  # more than one accepted token a round: partial and full acceptance both occur


def check_saved_is_loaded(draft, target: Target, folder: Path) -> None:
    """The same proposals from the folder, bit by bit; nothing of the target is copied into it."""
    (prompt,) = prompts(1, seed=17)
    draft.save_pretrained(folder)
    loaded = load_draft(folder).to(draft.dtype)
    text = [*prompt, *range(3, 12)]
    a, b = (decoding_logits(d, target, text, len(prompt), 4) for d in (draft, loaded))
    assert torch.equal(a, b)
    first, second = (Engine(target, d, k=4).generate([Request(prompt, 20)])[0] for d in (draft, loaded))
    assert [r.accepted for r in first.rounds] == [r.accepted for r in second.rounds]


def fresh_logits(draft, target: Target, text: list[int], path: Sequence[int], monkeypatch) -> Tensor:
    """[Vd] behind `path` drafted after `text`, by the training pass: no state, no cache, the text from scratch."""
    whole = [*text, *path, 0]
    batch = batch_of(target, draft, [whole], [len(text) - 1], len(path) + 1)
    _, seen = training_logits(draft, batch, monkeypatch)
    return seen[len(path)][0]


def plain_eagle2(
    says: Callable[[Sequence[int]], Tensor], tree: DynamicTree, vocab: Tensor | None
) -> tuple[list[int], list[int]]:
    """EAGLE-2 by its definition, in Python: tokens and parents of the tree that is proposed.

    says: a path → the draft's logits [Vd] behind it.
    """
    made: list[tuple[float, list[int], int]] = []  # log-probability, path, parent's number

    def give_children(score: float, path: list[int], number: int) -> list[int]:
        log_q = says(path).log_softmax(-1)
        best = sorted(range(len(log_q)), key=lambda v: -float(log_q[v]))[: tree.top_k]
        for v in best:
            token = v if vocab is None else int(vocab[v])
            made.append((score + float(log_q[v]), [*path, token], number))
        return list(range(len(made) - len(best), len(made)))

    level = give_children(0.0, [], -1)
    for _ in range(tree.depth):
        kept = sorted(level, key=lambda n: (-made[n][0], n))[: tree.top_k]
        level = [child for n in kept for child in give_children(made[n][0], made[n][1], n)]
    chosen = sorted(sorted(range(len(made)), key=lambda n: (-made[n][0], n))[: tree.total_tokens])
    place = {number: index for index, number in enumerate(chosen)} | {-1: -1}
    return [made[n][1][-1] for n in chosen], [place[made[n][2]] for n in chosen]


def path_to(proposal: Proposal, row: int, node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, int(proposal.tokens[row, node]))
        node = int(proposal.parents[row, node])
    return path


def check_dynamic_trees(
    draft, target: Target, tree: DynamicTree, vocab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ragged rows, three rounds: the very trees of `plain_eagle2`."""
    texts = [[*text, *range(3, 20)] for text in prompts(2, seed=31, longest=8)]
    ends = [5, 8]
    with torch.inference_mode():
        state = None
        for text, end in zip(texts, ends, strict=True):
            state = draft.join(state, begun(draft, target, text[:end], 2))
        for counts in ([1, 3], [2, 1], None):
            proposal = draft.propose(state, Drawn(tree, tree.depth + 1))
            for row, (text, end) in enumerate(zip(texts, ends, strict=True)):
                tokens, parents = plain_eagle2(
                    lambda path, text=text, end=end: fresh_logits(
                        draft, target, text[:end], path, monkeypatch
                    ),
                    tree,
                    vocab,
                )
                assert proposal.length[row] == len(tokens)
                assert proposal.tokens[row].tolist() == tokens
                assert proposal.parents[row].tolist() == parents
            assert proposal.q is None
            if counts is None:
                return
            committed, features = torch.zeros(2, max(counts), dtype=torch.long), []
            for row, (text, end, count) in enumerate(zip(texts, ends, counts, strict=True)):
                committed[row, :count] = torch.tensor(text[end : end + count])
                features.append(features_of(draft, target, text[: end + max(counts) - 1])[:, end - 1 :])
            values = [row[:count] for row, count in zip(committed.tolist(), counts, strict=True)]
            draft.update(state, Committed(committed, torch.cat(features), values))
            ends = [end + count for end, count in zip(ends, counts, strict=True)]


def check_static_trees(draft, target: Target, tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node's logits are those of its path alone; siblings share the distribution they are drawn from."""
    texts = [[*text, *range(3, 9)] for text in prompts(2, seed=33, longest=8)]
    with torch.inference_mode():
        state = None
        for text in texts:
            state = draft.join(state, begun(draft, target, text, 2))
        control = Drawn(tree, 9, with_q=True)
        proposal = draft.propose(state, control)
    assert proposal.parents.tolist() == [list(tree.parents)] * 2
    assert proposal.length == [len(tree.parents)] * 2
    for row, text in enumerate(texts):
        for node, parent in enumerate(tree.parents):
            path = path_to(proposal, row, parent) if parent >= 0 else []
            expected = fresh_logits(draft, target, text, path, monkeypatch)
            torch.testing.assert_close(control.logits[parent][row], expected, rtol=1e-5, atol=1e-5)
            q = proposal.q[row, proposal.q_row[row, node]]
            torch.testing.assert_close(q, expected.softmax(-1), rtol=1e-5, atol=1e-5)
