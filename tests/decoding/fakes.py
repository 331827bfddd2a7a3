"""Right answers by another library, and drafts that propose trees of any shape."""

import functools
import random
import zlib

import torch

from deepspec.decoding import Result
from deepspec.decoding.trees import children_of
from deepspec.drafts.contract import Proposal, StaticTree
from tests.models import tiny_model

NEW = 40


@functools.cache
def _generated(
    family: str, prompt: tuple[int, ...], count: int, eos: int | None, penalty: float
) -> list[int]:
    ids = torch.tensor([prompt])
    out = tiny_model(family).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0,
        repetition_penalty=penalty,
    )
    return out[0, len(prompt) :].tolist()


def reference(
    family: str, prompt: list[int], count: int = NEW, eos: int | None = None, penalty: float = 1.0
) -> list[int]:
    """Greedy text by `transformers.generate`."""
    return list(_generated(family, tuple(prompt), count, eos, penalty))


def tokens_of(results: list[Result]) -> list[list[int]]:
    return [result.tokens for result in results]


def random_parents(draw: random.Random, nodes: int, deepest: int) -> list[int]:
    parents: list[int] = []
    depths = {-1: 0}
    for node in range(nodes):
        parents.append(draw.choice([above for above, depth in depths.items() if depth < deepest]))
        depths[node] = depths[parents[-1]] + 1
    return parents


class TextDraft:
    """Keeps each row's text; a row's shape and length follow from its text alone."""

    needs_features = False
    capture_layers = ()

    def begin(self, beginning):
        return [beginning.tokens[0].tolist()]

    def join(self, state, new):
        if state is None:
            return new
        state.extend(new)
        return state

    def update(self, state, committed):
        for text, tokens in zip(state, committed.values, strict=True):
            text.extend(tokens)

    def select(self, state, rows):
        state[:] = [state[row] for row in rows]

    @staticmethod
    def dice(text: list[int]) -> random.Random:
        return random.Random(zlib.crc32(str(text).encode()))


class TableDraft(TextDraft):
    """The next token's logits depend on the last token alone: table [V, V]. Proposes what control asks for:
    chains of ragged lengths, static trees, or (dynamic) trees of a random shape for each row and round."""

    def __init__(self, table: torch.Tensor, ragged: bool = True) -> None:
        self.table, self.ragged = table, ragged

    def propose(self, state, control):
        if control.tree is None:
            return self._chain(state, control)
        return (
            self._static(state, control)
            if isinstance(control.tree, StaticTree)
            else self._dynamic(state, control)
        )

    def _chain(self, state, control):
        last = torch.tensor([text[-1] for text in state])
        tokens, q = [], []
        for step in range(control.max_tokens):
            last, law = control.draw(self.table[last], step - 1)
            tokens.append(last)
            q.append(law)
        lengths = [min(self.dice(text).randint(0, 9), len(tokens)) for text in state]
        if not self.ragged:
            lengths = [len(tokens)] * len(state)
        return Proposal(torch.stack(tokens, 1), lengths, q=None if q[0] is None else torch.stack(q, 1))

    def _static(self, state, control):
        parents = control.tree.parents
        tokens = torch.zeros(len(state), len(parents), dtype=torch.long)
        laws, rows = [], [0] * len(parents)
        for parent, nodes in sorted(children_of(parents).items()):
            last = tokens[:, parent] if parent >= 0 else torch.tensor([text[-1] for text in state])
            tokens[:, nodes], law = control.draw_children(self.table[last], parent, len(nodes))
            for node in nodes:
                rows[node] = len(laws)
            laws.append(law)
        drawn = laws[0] is not None
        return Proposal(
            tokens,
            [len(parents)] * len(state),
            parents=torch.tensor([parents] * len(state)),
            q=torch.stack(laws, 1) if drawn else None,
            q_row=torch.tensor([rows] * len(state)) if drawn else None,
        )

    def _dynamic(self, state, control):
        count = control.tree.total_tokens
        proposal = Proposal(
            torch.zeros(len(state), count, dtype=torch.long), [], torch.zeros(len(state), count).long()
        )
        for row, text in enumerate(state):
            dice = self.dice(text)
            parents = random_parents(dice, count, control.max_tokens)
            for parent, nodes in sorted(children_of(parents).items()):
                last = proposal.tokens[row, parent] if parent >= 0 else text[-1]
                best = self.table[last].argsort(descending=True)[: len(nodes)]
                proposal.tokens[row, nodes[: len(best)]] = best
            proposal.parents[row] = torch.tensor(parents)
            proposal.length.append(dice.randint(0, count))
        return proposal


class AnswerDraft(TextDraft):
    """Knows the right answers, and hides them in trees among wrong tokens; sometimes it forgets."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], vocab: int) -> None:
        self.answers, self.vocab = answers, vocab

    def propose(self, state, control):
        shapes, rows = [], []
        for text in state:
            dice = self.dice(text)
            if isinstance(control.tree, StaticTree):
                parents = list(control.tree.parents)
            else:
                parents = random_parents(dice, dice.randint(1, control.tree.total_tokens), control.max_tokens)
            shapes.append(parents)
            rows.append(self._tokens(dice, parents, self._ahead(text)))
        count = max(map(len, shapes))
        return Proposal(
            torch.tensor([row + [0] * (count - len(row)) for row in rows]),
            [len(row) for row in rows],
            parents=torch.tensor([shape + [-1] * (count - len(shape)) for shape in shapes]),
        )

    def _ahead(self, text: list[int]) -> list[int]:
        prompt = next(p for p in self.answers if tuple(text[: len(p)]) == p and len(p) < len(text))
        return self.answers[prompt][len(text) - len(prompt) :]

    def _tokens(self, dice: random.Random, parents: list[int], ahead: list[int]) -> list[int]:
        tokens, depth = [0] * len(parents), {-1: 0}  # depth: of the nodes on the right path
        for parent, nodes in sorted(children_of(parents).items()):
            wrong = dice.sample(range(self.vocab), len(nodes))
            for node, token in zip(nodes, wrong, strict=True):
                tokens[node] = token
            here = depth.get(parent)
            if here is None or here >= len(ahead):
                continue
            right = ahead[here]
            if right in wrong:
                depth[nodes[wrong.index(right)]] = here + 1
            elif dice.random() < 0.8:
                node = dice.choice(nodes)
                tokens[node], depth[node] = right, here + 1
        return tokens
