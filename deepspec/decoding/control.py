"""What the engine hands to a draft: how much to draft, how to branch, and how to draw each token."""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspec.decoding.randomness import Purpose, uniforms
from deepspec.decoding.request import Request
from deepspec.decoding.sampling import distributions, draw, penalise
from deepspec.decoding.schedule import RoundPlan
from deepspec.decoding.trees import PENDING, children_of
from deepspec.drafts.contract import DynamicTree, StaticTree
from deepspec.errors import UserError


class RoundControl:
    """One round's `Control`.

    positions: each row's output position at the round's beginning. When every request is greedy, tokens are
    plain argmaxes and q is None; otherwise a greedy row's q is a point mass. tree: how to branch (None: a
    chain). sampled_children: the children of a static tree's node are drawn, not the most probable. seen:
    [B, V] bool, the tokens of each row's text, where a request has a repetition penalty, else None. plan: the
    schedule's decisions (None: a fixed length).
    """

    def __init__(
        self,
        requests: Sequence[Request],
        positions: Sequence[int],
        max_tokens: int,
        tree: StaticTree | DynamicTree | None = None,
        sampled_children: bool = False,
        seen: Tensor | None = None,
        plan: RoundPlan | None = None,
    ) -> None:
        self.plan, self.asked = plan, False
        self.max_tokens = max_tokens
        self.tree = tree
        self.requests = requests
        self.positions = positions
        self.samplings = [request.sampling for request in requests]
        self.greedy = all(sampling.temperature == 0 for sampling in self.samplings)
        self.sampled_children = sampled_children and not self.greedy
        self._children = children_of(tree.parents) if isinstance(tree, StaticTree) else {}
        self._seen = None if seen is None else {PENDING: seen}  # node → tokens of the text that ends there

    def draw(self, logits: Tensor, parent: int, vocab: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """See `deepspec.drafts.contract.Control.draw`: a chain's next token."""
        logits = self._penalised(logits, parent, vocab)
        if self.greedy:
            picked, q = logits.argmax(-1), None
        else:
            q = distributions(logits, self.samplings)
            picked = draw(q, self._uniform(parent + 1, logits.device))
        tokens = picked if vocab is None else vocab[picked]
        self._note(parent, [parent + 1], tokens[:, None])
        return tokens, q

    def draw_children(
        self, logits: Tensor, parent: int, count: int, vocab: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See `deepspec.drafts.contract.Control.draw_children`.

        A dynamic tree, whose nodes only the draft can number, is grown without asking here and without a
        repetition penalty: its children are deterministic, so that this decides how good they are and nothing else.
        """
        if count > logits.shape[-1]:
            raise UserError(
                f"A node of the tree has {count} children, and the draft's vocabulary {logits.shape[-1]} tokens. "
                "Give it fewer (decode.tree_parents or decode.tree_top_k)."
            )
        logits = self._penalised(logits, parent, vocab)
        nodes = self._children.get(parent, [])[:count]
        if self.sampled_children and isinstance(self.tree, StaticTree):
            picked, q = self._without_replacement(logits, nodes, count)
        else:
            picked, q = logits.topk(count, dim=-1).indices, None
        tokens = picked if vocab is None else vocab[picked]
        self._note(parent, nodes, tokens)
        return tokens, q

    def go_on(self, confidence: Tensor) -> Tensor:
        """See `deepspec.drafts.contract.Control.go_on`. A schedule reads the confidences on the host: whether the
        draft goes on is decided there."""
        self.asked = True
        if self.plan is None:
            return torch.ones_like(confidence, dtype=torch.bool)
        return torch.tensor(self.plan.told(confidence.tolist()), device=confidence.device)

    def _without_replacement(self, logits: Tensor, nodes: Sequence[int], count: int) -> tuple[Tensor, Tensor]:
        """[B, count] draft ids and q [B, Vd]. Where q has fewer tokens than that, the likeliest others follow:
        `trees.tree_law` takes them for what they are, deterministic."""
        if len(nodes) != count:
            raise UserError(
                f"A draft drew {count} children of a node that has {len(nodes)} in decode.tree_parents; children that "
                "are sampled must all be drawn, and none more. Use decode.children=deterministic."
            )
        q = distributions(logits, self.samplings)
        left, others = q.clone(), logits.clone()
        picked: list[Tensor] = []
        for node in nodes:
            drawn = draw(left, self._uniform(node, q.device))
            token = torch.where(left.sum(-1) > 0, drawn, others.argmax(-1))
            left.scatter_(1, token[:, None], 0.0)
            others.scatter_(1, token[:, None], -torch.inf)
            picked.append(token)
        return torch.stack(picked, 1), q

    def _uniform(self, node: int, device: torch.device) -> Tensor:
        seeds = [request.seed for request in self.requests]
        drawn = uniforms(seeds, self.positions, Purpose.draft, index=node)[:, 0]
        return torch.from_numpy(drawn).to(device, non_blocking=True)

    def _penalised(self, logits: Tensor, parent: int, vocab: Tensor | None) -> Tensor:
        if self._seen is None:
            return logits
        seen = self._seen.get(parent, self._seen[PENDING])
        return penalise(logits, seen if vocab is None else seen[:, vocab], self.samplings)

    def _note(self, parent: int, nodes: Sequence[int], tokens: Tensor) -> None:
        """Remember what stands on the paths to the nodes just drawn."""
        if self._seen is None or parent not in self._seen:
            return
        for index, node in enumerate(nodes):
            self._seen[node] = self._seen[parent].scatter(1, tokens[:, index, None], True)
