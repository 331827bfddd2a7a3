"""Acceptance rules: which drafted tokens stand, and what comes after them, so that the output is the target's.

A rule has two steps. Its law is deterministic and can be enumerated: the probability that each drafted token
passes, and the distribution of the token after it for every place where the accepted ones may end. `draw` turns
uniforms into a verdict. `chains` and `trees` have the laws; `choose` picks one.
Shapes: B rows, N drafted tokens, V target vocabulary, Vd draft vocabulary.
"""

from torch import Tensor

from deepspec.decoding.acceptance.chains import block_law, greedy_law, token_law
from deepspec.decoding.acceptance.law import Law, Verdict, draw
from deepspec.decoding.acceptance.trees import Shape, greedy_tree_law, tree_law
from deepspec.drafts.contract import Proposal

RULES = ("auto", "greedy", "token", "block")

__all__ = ["RULES", "Law", "Shape", "Verdict", "choose_greedy", "choose_sampled", "draw"]


def choose_greedy(proposal: Proposal, logits: Tensor, shape: Shape | None) -> Law:
    """The law of a round in which every row is greedy. logits: [B, N+1, V]; shape: of a tree, None = a chain."""
    return greedy_law(proposal, logits) if shape is None else greedy_tree_law(proposal, logits, shape)


def choose_sampled(rule: str, proposal: Proposal, p: Tensor, shape: Shape | None) -> Law:
    """The law of a round that draws, by `decode.rule`. p: [B, N+1, V], after the request's processors.

    `auto` is block verification for a chain: its accepted length is in expectation never less than token
    rejection's, it is the same for a deterministic draft (where `block_law` is `token_law`), and it costs one
    more pass over p, which the softmax has already paid several of. A tree has one rule.
    """
    if shape is not None:
        return tree_law(proposal, p, shape)
    return token_law(proposal, p) if rule == "token" else block_law(proposal, p)
