"""P-EAGLE (Hui et al. 2026): EAGLE-3's body, all depths in one pass instead of one after the other.

Row i = a−1 of depth 0 is EAGLE-3's: the target's features at i with the token at i + 1. A deeper slot of the same row
knows neither, and has the draft's own in their place:

    depth 0:      x = [norm(emb(t_a)); norm(g_i)],  g_i = fc(f_i)              rotary position i
    depth d > 0:  x = [norm(mask); norm(g*)],       g* = fc(learnt vector)     rotary position i + d
    q(t_{a+k} | ·) = softmax(lm_head(norm(h)))  at depth d = k−1

A slot sees depth 0 up to its own row, and its own row's depths up to its own: in decoding a causal pass over what was
committed and K−1 masks behind it. In training depth d keeps a row with probability r^d, nested, by a hash of (the
row's seed, position); what is kept weighs as much more, so that the loss is that of all rows on average.
Loss Σ_d decay^d · cross-entropy against the target's distribution (`soft_ce`).
"""

from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from deepspec.drafts.contract import Control, DraftBatch, DraftLoss, Proposal
from deepspec.drafts.eagle3 import Eagle3Config, Eagle3Draft
from deepspec.drafts.mask_token import MaskToken
from deepspec.drafts.recursive import RecursiveState, working_dtype
from deepspec.drafts.slots import propose_from_slots
from deepspec.drafts.statistics import StepStatistics
from deepspec.drafts.step_weights import WeightedSteps
from deepspec.drafts.unrolled import KeysValues, SupervisedRows, shift, supervised
from deepspec.drafts.walk import keyed_uniforms
from deepspec.target.layout import chain, document_mask


class PEagleConfig(Eagle3Config):
    model_type = "deepspec_peagle"

    def __init__(self, keep_rows: float = 0.7, mask_token: int | None = None, **eagle3: Any) -> None:
        self.keep_rows = keep_rows
        self.mask_token = mask_token
        super().__init__(**eagle3)


class PEagleDraft(Eagle3Draft):
    one_pass = True
    config_class: Any = PEagleConfig
    init_conversions: ClassVar[dict[str, tuple[str, ...]]] = {"deepspec_eagle3": ("mask.", "mask_hidden")}

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        self.mask = MaskToken(config.hidden_size, config.mask_token)
        self.mask_hidden = nn.Parameter(torch.randn(self.fc.in_features))
        self.post_init()

    @classmethod
    def sized(cls, options: Any, target: Any, target_ids: Tensor | None, **settings: Any) -> Self:
        own = {"keep_rows": options.keep_rows, "mask_token": options.mask_token}
        draft = super().sized(options, target, target_ids, **own, **settings)
        draft.mask.start(target)
        return draft

    def forward(self, batch: DraftBatch) -> DraftLoss:
        """All depths of the rows that count; see the module's docstring."""
        self.mask.check(batch)
        target, steps = batch.context.target, batch.steps or self.config.ttt_steps
        by_anchor, decay = supervised(batch.loss_mask, batch.documents, steps), self.config.step_decay
        if self.training and batch.seeds is not None:
            by_anchor &= kept_depths(by_anchor, self.config.keep_rows, batch.seeds)
            decay = decay / self.config.keep_rows
        parts = batch.loss_parts or tuple(self.default_loss)
        statistics = StepStatistics(batch, by_anchor, target, self.target_ids, parts)
        weighted = WeightedSteps(statistics, self.config.step_weights, decay)
        left, positions = shift(by_anchor, 1), batch.positions  # row i drafts from anchor i + 1
        rows = SupervisedRows(left[..., 0])
        hidden = self.training_inputs(batch)
        mask = document_mask(batch.documents, batch.positions, working_dtype(hidden))
        embeddings = self._embed(target, shift(batch.tokens, 1))
        seen: list[list[KeysValues]] = [[] for _ in self.layers]
        hidden = self._unroll(embeddings, hidden, positions, mask, seen, rows)
        for depth in range(steps):
            if depth > 0:
                rows = SupervisedRows(left[..., depth])
                seen = [[base, *(pick_both(rows, own) for own in deeper)] for base, *deeper in seen]
            left, positions = rows.pick(left) & rows.real[..., None], rows.pick(positions)
            mask = rows.pick(mask, dim=2)
            if depth > 0:
                masks = self.mask(target, hidden).expand(*positions.shape, -1)
                unknown = self.fuse(target, self.mask_hidden).expand(*positions.shape, -1)
                hidden = self._unroll(masks, unknown, positions + depth, mask, seen)
            output = self.settle(hidden)[left[..., depth]]
            previous = shift(batch.tokens, depth)[by_anchor[..., depth]]
            confidence = self._confidence(output, self._embed(target, previous))
            weighted.add(depth, partial(self._logits_of, target, output), confidence)
        return weighted.loss()

    def propose(self, state: RecursiveState, control: Control) -> Proposal:
        """One pass over what was committed and K−1 masks, then a chain or a tree of what the depths say."""
        target, count = state.context.target, control.max_tokens
        pending = state.waiting.last(state.waiting.tokens)
        settled = self.settle(self._depths(state, count))
        logits = self.logits(target, settled.flatten(0, 1)).unflatten(0, settled.shape[:2])

        def slot(
            index: int, previous: Tensor, memory: Tensor | None
        ) -> tuple[Tensor, Tensor | None, Tensor | None]:
            here, mine = (x[:, index, None].expand(-1, previous.shape[1], -1) for x in (settled, logits))
            return mine, self._confidence(here, self._embed(target, previous)), None

        return propose_from_slots(control, pending, count, slot, self.target_ids)

    def _depths(self, state: RecursiveState, count: int) -> Tensor:
        """Run the waiting row pairs with `count` − 1 masks behind each row's last; [B, count, H] the stream at all
        depths. Only the row pairs stay in the state."""
        target, waiting = state.context.target, state.waiting
        counts = torch.tensor(waiting.counts, device=waiting.tokens.device)[:, None]
        shape = (len(counts), waiting.tokens.shape[1] + count - 1, -1)
        real = (torch.arange(shape[1], device=counts.device) < counts)[..., None]
        known = self._embed(target, waiting.tokens), self.fuse(target, waiting.features)
        unknown = self.mask(target, known[0]), self.fuse(target, self.mask_hidden)
        embeddings, hidden = (
            torch.where(real, nn.functional.pad(a, (0, 0, 0, count - 1)), b.expand(shape))
            for a, b in zip(known, unknown, strict=True)
        )
        layout = chain(state.kv.lengths, shape[1], counts.device)
        stream = self._run(state.kv, layout, embeddings, hidden)
        state.kv.keep(waiting.counts)
        waiting.clear()
        depths = counts - 1 + torch.arange(count, device=counts.device)
        return stream.gather(1, depths[..., None].expand(-1, -1, stream.shape[-1]))


def kept_depths(like: Tensor, ratio: float, seeds: Tensor) -> Tensor:
    """[B, T, K] bool: depth d of an anchor stays with probability ratio^d, and only if the depths before it do."""
    drawn = keyed_uniforms(0, seeds.tolist(), like.shape[1]).to(like.device)
    depths = torch.arange(like.shape[2], device=like.device)
    return drawn[..., None] < ratio**depths


def pick_both(rows: SupervisedRows, own: KeysValues) -> KeysValues:
    return rows.pick(own[0], dim=2), rows.pick(own[1], dim=2)
