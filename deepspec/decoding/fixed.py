"""Forwards of one shape: for `torch.compile`, or so that a token's arithmetic does not depend on what is beside it.

In bfloat16 a forward over six tokens rounds otherwise than one over a single token, and greedy text then parts
at near ties. With `decode.exact` every forward after the prefill has the same rows, tokens and attended columns,
in plain decoding too: what is missing is filled up with tokens that nobody looks at. A matrix product then gives
each of its rows the same sums in the same order wherever the row stands, and masked columns add zeros behind
them. In a tree a token's keys lie in other columns than in a chain, which attention in float64 makes up for: the
order of its sums does not reach the rounded result.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from deepspec.decoding.request import Request
from deepspec.decoding.trial import How
from deepspec.errors import UserError
from deepspec.target import Layout, State, Target, TargetOutput, chain, tree
from deepspec.target.attention import attends_grouped

COLUMNS = 256  # attended columns are a multiple of this, so that few shapes occur
TRIED = 8  # tokens that `check_exact` reads in both ways
Words = Callable[[int], list[int]]


@dataclass(frozen=True)
class FixedShape:
    """rows: of every forward. tokens: a row. columns: attended, at least. wide: attention in float64. compiled: by
    `torch.compile`."""

    target: Target
    rows: int
    tokens: int
    columns: int
    wide: bool = False
    compiled: bool = False

    @classmethod
    def of(
        cls, target: Target, how: How, max_rows: int, requests: Iterable[Request], plain: bool
    ) -> "FixedShape | None":
        """The shape for these requests, of any proposal that `how` allows; None if it asks for none.

        plain: there is no draft; with `exact` the shape is that of speculative decoding all the same.
        """
        if not how.exact and not how.compile:
            return None
        most = target.max_positions
        longest = max((min(len(r.tokens) + r.max_new_tokens, most) for r in requests), default=1)
        columns = -(-(longest + how.most + 1) // COLUMNS) * COLUMNS
        tokens = 1 if plain and not how.exact else how.most + 1
        return cls(target, max_rows, tokens, columns, how.exact and how.tree is not None, how.compile)

    def forward(
        self, tokens: Tensor, state: State, layout: Layout, *, layers: Sequence[int] = ()
    ) -> TargetOutput:
        """`Target.forward` at this shape; logits and features of the tokens asked for alone."""
        rows, count = tokens.shape
        all_tokens, whole = self.padded(tokens, layout)
        output = self.target.forward(all_tokens, state, whole, 0, layers, self.compiled)
        features = None if output.features is None else output.features[:rows, :count]
        return TargetOutput(output.logits[:rows, :count], features)

    def padded(self, tokens: Tensor, layout: Layout) -> tuple[Tensor, Layout]:
        """Rows and tokens filled up with a row's first token again, which sees itself and what is cached.

        No other token will do: its embedding may be damaged, and a masked column still counts as 0 · value.
        """
        rows, count = tokens.shape
        all_tokens = tokens[:1, :1].repeat(self.rows, self.tokens)
        all_tokens[:rows] = tokens[:, :1]
        all_tokens[:rows, :count] = tokens
        positions = torch.zeros_like(all_tokens)
        positions[:rows, :count] = layout.positions
        visible = torch.eye(self.tokens, dtype=torch.bool, device=tokens.device).repeat(self.rows, 1, 1)
        visible[:rows, :count, :count] = layout.visible
        lengths = [*layout.lengths, *[0] * (self.rows - rows)]
        whole = Layout(lengths, positions, visible, least_width=self.columns, wide=self.wide)
        return all_tokens, whole


@torch.inference_mode()
def check_exact(shape: FixedShape) -> None:
    """UserError unless this target's logits keep every bit, whatever stands beside a token and wherever it stands.

    Tried: some tokens one by one in the first row, and all at once in the last row among others; as a tree's path
    where trees are to be read.
    """
    target = shape.target
    if shape.wide and not attends_grouped(target.model):
        raise UserError(
            f"decode.exact reads trees with scaled-dot-product attention, and {target.name} does without it. Use "
            "decode.tree=none."
        )
    generator = torch.Generator().manual_seed(0)

    def words(count: int) -> list[int]:
        return torch.randint(target.vocab_size, (count,), generator=generator).tolist()

    count = min(shape.tokens, TRIED)
    prompts, text = [words(24) for _ in range(shape.rows)], words(count)
    places = [0, *sorted((torch.randperm(shape.tokens - 1, generator=generator)[: count - 1] + 1).tolist())]
    alone = _one_by_one(shape, prompts[0], text)
    together = _among_others(shape, [*prompts[1:], prompts[0]], text, places, words)
    if not torch.equal(alone, together):
        difference = float((alone.double() - together.double()).abs().max())
        raise UserError(
            f"decode.exact cannot be had with {target.name} in {str(target.dtype).removeprefix('torch.')} here: a "
            f"token's logits change by up to {difference:.1g} with what is read beside it, at one fixed shape too (as "
            "with experts, whose matrices have as many rows as tokens come to them). Use decode.exact=false."
        )


def _one_by_one(shape: FixedShape, prompt: list[int], text: list[int]) -> Tensor:
    """[count, V] logits after each token of the text."""
    state, device, logits = _prefilled(shape, [prompt]), shape.target.device, []
    for token in text:
        new = torch.tensor([[token]], device=device)
        logits.append(shape.forward(new, state, chain(state.lengths, 1, device)).logits[0])
        state.keep([1])
    return torch.cat(logits)


def _among_others(
    shape: FixedShape,
    prompts: list[list[int]],
    text: list[int],
    places: list[int],
    words: Words,
) -> Tensor:
    """The same of the last row, where the text is the beginning of a chain, or a path through a tree."""
    state, device = _prefilled(shape, prompts), shape.target.device
    tokens = torch.tensor([words(shape.tokens) for _ in prompts], device=device)
    if not shape.wide:
        places = list(range(len(text)))
        layout = chain(state.lengths, shape.tokens, device)
    else:
        parents = [-1] * (shape.tokens - 1)
        for above, node in pairwise(places):
            parents[node - 1] = above - 1
        layout = tree(state.lengths, torch.tensor([parents] * len(prompts), device=device))
    tokens[-1, places] = torch.tensor(text, device=device)
    return shape.forward(tokens, state, layout).logits[-1, places]


def _prefilled(shape: FixedShape, prompts: list[list[int]]) -> State:
    target = shape.target
    state = target.new_state(shape.rows, shape.columns, rows=0)
    for prompt in prompts:
        new, one = torch.tensor([prompt], device=target.device), target.new_state(1, len(prompt))
        target.forward(new, one, chain([0], len(prompt), target.device), 1)
        one.keep([len(prompt)])
        state.append(one)
    return state
