"""Every draft and every outcome of a rule's law on a tiny vocabulary, in float64."""

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from deepspec.decoding.acceptance import Law, Shape
from deepspec.drafts.contract import Proposal
from deepspec.target.layout import tree

V = 3
Text = tuple[int, ...]
Tables = dict[Text, Tensor]


def tables(seed: int, depth: int, holes: bool) -> Tables:
    """A distribution after every text shorter than `depth`; with `holes`, some tokens are impossible."""
    generator = torch.Generator().manual_seed(seed)
    found: Tables = {}
    for text in (text for n in range(depth) for text in itertools.product(range(V), repeat=n)):
        weights = torch.rand(V, generator=generator, dtype=torch.float64) ** 3
        if holes:
            weights[int(torch.randint(V, (1,), generator=generator))] = 0
        found[text] = weights / weights.sum()
    return found


def chain_parents(k: int) -> list[int]:
    return list(range(-1, k - 1))


def texts_of(parents: Sequence[int], tokens: Sequence[int]) -> list[Text]:
    """The text that ends at each node, the pending token's (empty) first."""
    texts: list[Text] = [()]
    for parent, token in zip(parents, tokens, strict=True):
        texts.append((*texts[parent + 1], token))
    return texts


def drafts(parents: Sequence[int], q: Tables, drawn: bool) -> Iterator[tuple[list[int], float]]:
    """Every way to fill the shape, with its probability; siblings without replacement, in their order.

    A node whose q has been used up by elder siblings gets the smallest token that they have left. Not `drawn`:
    children are the most probable ones, and there is one way.
    """

    def fill(tokens: list[int], chance: float) -> Iterator[tuple[list[int], float]]:
        node = len(tokens)
        if node == len(parents):
            yield tokens, chance
            return
        left = q[texts_of(parents[:node], tokens)[parents[node] + 1]].clone()
        elder = [tokens[i] for i in range(node) if parents[i] == parents[node]]
        left[elder] = 0 if drawn else -1
        if not drawn:
            yield from fill([*tokens, int(left.argmax())], chance)
        elif left.sum() == 0:
            yield from fill([*tokens, min(set(range(V)) - set(elder))], chance)
        else:
            for token in torch.nonzero(left)[:, 0].tolist():
                yield from fill([*tokens, token], chance * float(left[token] / left.sum()))

    return fill([], 1.0)


def proposal_of(
    parents: Sequence[int],
    tokens: list[list[int]],
    q: Tables | None,
    *,
    vocab: Tensor | None = None,
    lengths: list[int] | None = None,
) -> Proposal:
    """One row for each filling. Trees share their q between siblings, as drafts do."""
    rows, is_chain = len(tokens), list(parents) == chain_parents(len(parents))
    proposal = Proposal(torch.tensor(tokens), lengths or [len(parents)] * rows, vocab=vocab)
    nodes = sorted({parent + 1 for parent in parents})
    if q is not None:
        found = [[q[texts_of(parents, row)[node]] for node in nodes] for row in tokens]
        proposal.q = torch.stack([torch.stack(row) for row in found])
        proposal.q = proposal.q if vocab is None else proposal.q[..., vocab]
    if not is_chain:
        proposal.parents = torch.tensor([list(parents)] * rows)
        proposal.q_row = torch.tensor([[nodes.index(parent + 1) for parent in parents]] * rows)
    return proposal


def target_of(parents: Sequence[int], tokens: list[list[int]], p: Tables) -> Tensor:
    """[B, N+1, V]: p after every node."""
    return torch.stack([torch.stack([p[text] for text in texts_of(parents, row)]) for row in tokens])


def shape_of(proposal: Proposal, deepest: int = 99) -> Shape:
    visible = tree([0] * len(proposal.length), proposal.parents).visible
    lengths = torch.tensor(proposal.length)
    return Shape.of(proposal.parents, visible, lengths, torch.full_like(lengths, deepest))


class Outcomes:
    """What a law makes of weighted drafts: the output's distribution and the expected accepted length."""

    def __init__(self, parents: Sequence[int], p: Tables, length: int) -> None:
        self.parents, self.p, self.length = list(parents), p, length
        self.found: dict[Text, float] = {}
        self.accepted = 0.0

    def add(self, law: Law, tokens: list[list[int]], chances: Sequence[float]) -> "Outcomes":
        """Every pattern of tests passed and failed; the tokens it commits, continued by plain sampling from p."""
        weight = torch.tensor(chances, dtype=torch.float64)
        rows, count = law.accept.shape
        for pattern in itertools.product([True, False], repeat=count):
            passed = torch.tensor(pattern).repeat(rows, 1)
            chance = weight * torch.where(passed, law.accept, 1 - law.accept).double().prod(1)
            if not chance.any():
                continue
            ending = law.ending(passed)
            after = law.next_distribution(ending.at)  # type: ignore[attr-defined]
            after = after / after.sum(-1, keepdim=True)
            for row in torch.nonzero(chance)[:, 0].tolist():
                text = texts_of(self.parents, tokens[row])[int(ending.at[row])]
                self._check_path(ending, row, text, tokens[row])
                self.accepted += float(chance[row]) * len(text)
                for token in range(V):
                    self._spread((*text, token), float(chance[row] * after[row, token]))
        return self

    @staticmethod
    def _check_path(ending, row: int, text: Text, tokens: list[int]) -> None:
        length = int(ending.length[row])
        path = range(length) if ending.path is None else ending.path[row, :length].tolist()
        assert tuple(tokens[node] for node in path) == text

    def _spread(self, text: Text, chance: float) -> None:
        if chance == 0:
            return
        if len(text) >= self.length:
            text = text[: self.length]
            self.found[text] = self.found.get(text, 0.0) + chance
            return
        for token in range(V):
            self._spread((*text, token), chance * float(self.p[text][token]))

    def worst(self) -> float:
        """The largest difference from the target's own probability, over all texts."""
        return max(
            abs(self.found.get(text, 0.0) - probability(self.p, text))
            for text in itertools.product(range(V), repeat=self.length)
        )


def probability(p: Tables, text: Text) -> float:
    return float(torch.stack([p[text[:i]][text[i]] for i in range(len(text))]).prod())


def enumerate_rule(
    law: Callable[[Proposal, Tensor], Law],
    parents: Sequence[int],
    p: Tables,
    q: Tables,
    drawn: bool,
    *,
    vocab: Tensor | None = None,
    stop: Callable[[Text], bool] | None = None,
) -> Outcomes:
    """`law` over all drafts of a shape. stop: of chains, whether a draft ends after this text."""
    filled = [(tokens, chance) for tokens, chance in drafts(parents, q, drawn) if chance > 0]
    tokens, chances = [row for row, _ in filled], [chance for _, chance in filled]
    lengths = None
    if stop is not None:
        lengths = [next((i for i in range(len(row)) if stop(tuple(row[:i]))), len(row)) for row in tokens]
    proposal = proposal_of(parents, tokens, q if drawn else None, vocab=vocab, lengths=lengths)
    longest = max(len(text) for text in texts_of(parents, tokens[0])) + 1
    outcomes = Outcomes(parents, p, longest)
    return outcomes.add(law(proposal, target_of(parents, tokens, p)), tokens, chances)
