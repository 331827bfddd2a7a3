"""What drafts share that run their own output back in (EAGLE, EAGLE-3, MTP): one row a token, K steps deep.

Row i pairs what the target left at position i with the token at i + 1 and predicts the token at i + 2:

    g_i = fuse(features_i)                                         F → H
    h_i = layers(enter(emb(t_{i+1}), g_i))                         H
    q(t_{i+2} | ·) = softmax(logits(settle(h_i)))                  H → Vd

and the next step has feedback(h_i) in place of g. A family says what those functions are; here is how they are run:
in training all rows and K steps at once, in decoding row by row on cached keys and values.

Unrolled (training-time test, Li et al. 2025): at step s row i holds the token t_{i+1+s}; its query sees step 0's keys
up to row i and, of steps 1..s, only its own row's; rotary position i + s. This is what decoding computes: cached keys
of committed rows, then those of the tokens drafted since.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from deepspec.drafts.chained import ChainedTokens
from deepspec.drafts.confidence import ConfidenceHead
from deepspec.drafts.contract import (
    Beginning,
    Committed,
    Control,
    DraftBatch,
    DraftContext,
    DraftLoss,
    Proposal,
    TargetModel,
    TrainableDraft,
)
from deepspec.drafts.layers import DecoderLayer, Rotary, draft_shape
from deepspec.drafts.statistics import WITHOUT_CONFIDENCE, StepStatistics
from deepspec.drafts.step_weights import OtherParts, WeightedSteps
from deepspec.drafts.tree import Seen, grow
from deepspec.drafts.unrolled import KeysValues, SupervisedRows, shift, supervised, unrolled_attention
from deepspec.drafts.waiting import Waiting
from deepspec.target.layout import Layout, additive_mask, chain, document_mask
from deepspec.target.state import State


class RecursiveConfig(PreTrainedConfig):
    """`shape`: the layers' sizes, as from `draft_shape`."""

    def __init__(
        self,
        hidden_size: int = 64,
        target_hidden_size: int = 64,
        vocab_size: int = 256,
        draft_vocab_size: int | None = None,
        capture_layers: Sequence[int] = (0,),
        num_layers: int = 1,
        ttt_steps: int = 5,
        ttt_ramp: float = 0.0,
        step_weights: str = "decay",
        step_decay: float = 0.8,
        confidence: bool = False,
        **shape: Any,
    ) -> None:
        self.hidden_size = hidden_size
        self.target_hidden_size = target_hidden_size
        self.vocab_size = vocab_size
        self.draft_vocab_size = draft_vocab_size
        self.capture_layers = list(capture_layers)
        self.num_layers = num_layers
        self.ttt_steps = ttt_steps
        self.ttt_ramp = ttt_ramp
        self.step_weights = step_weights
        self.step_decay = step_decay
        self.confidence = confidence
        super().__init__(**shape)


@dataclass
class RecursiveState:
    """kv: the draft layers' keys and values of committed rows. waiting: row pairs (features at i, token at i + 1)
    that the layers have not seen yet."""

    context: DraftContext
    kv: State
    waiting: Waiting


class RecursiveDraft(TrainableDraft):
    config_class: Any = RecursiveConfig
    base_model_prefix = "draft"
    layers: Any  # nn.ModuleList of DecoderLayer
    confidence_head: ConfidenceHead | None
    target_ids: Tensor | None

    def __init__(self, config: Any, layers: Sequence[DecoderLayer] = ()) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(layers)
        self.rotary = Rotary(config)
        self.confidence_head = (
            ConfidenceHead(config.hidden_size, config.target_hidden_size) if config.confidence else None
        )
        ids = torch.arange(config.draft_vocab_size) if config.draft_vocab_size else None
        self.register_buffer("target_ids", ids)

    @classmethod
    def sized(cls, options: Any, target: Any, target_ids: Tensor | None, **settings: Any) -> Self:
        """A fresh draft of the target's sizes, rope and norm. settings: the family's part of the configuration."""
        shape = draft_shape(target.config)
        if options.intermediate_size:
            shape["intermediate_size"] = options.intermediate_size
        config = cls.config_class(
            target_hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=None if target_ids is None else len(target_ids),
            num_layers=options.layers,
            ttt_steps=options.ttt_steps,
            ttt_ramp=options.ttt_ramp,
            step_weights=options.step_weights,
            step_decay=options.step_decay,
            confidence=options.confidence,
            **settings,
            **shape,
        )
        draft = cls(config)
        if target_ids is not None and draft.target_ids is not None:
            draft.target_ids.copy_(target_ids)
        return draft

    # ------------------------------------------------------------------ what a family says

    own_loss: ClassVar[dict[str, float]] = {"soft_ce": 1.0}
    own_parts: ClassVar[tuple[str, ...]] = ()

    def fuse(self, target: TargetModel, features: Tensor) -> Tensor:
        """[B, T, F] captured layers side by side → g [B, T, H]."""
        raise NotImplementedError

    def enter(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """The stream that enters the first layer. hidden: g or the fed back output, [B, T, H]."""
        return hidden

    def settle(self, hidden: Tensor) -> Tensor:
        """The layers' output [B, T, H] → what the head reads."""
        raise NotImplementedError

    def logits(self, target: TargetModel, settled: Tensor) -> Tensor:
        """[n, H] → [n, Vd]: the target's own head, on the draft's vocabulary."""
        return target.head(settled, self.target_ids)

    def feedback(self, hidden: Tensor, settled: Tensor) -> Tensor:
        """What stands in place of g at the next step."""
        return settled

    def training_inputs(self, batch: DraftBatch) -> Tensor:
        """g [B, T, H] of step 0, with whatever is done to it in training only."""
        return self.fuse(batch.context.target, batch.features)

    def other_parts(self, batch: DraftBatch, step: int, rows: Tensor, settled: Tensor) -> OtherParts:
        """Parts of the loss beside those on logits. rows: [B, T] bool, the n rows; settled: [n, H] of theirs."""
        return {}

    # ------------------------------------------------------------------ training

    @property
    def default_loss(self) -> dict[str, float]:
        return {**self.own_loss, "confidence": 1.0} if self.confidence_head is not None else self.own_loss

    @property
    def loss_parts(self) -> tuple[str, ...]:
        own = (*WITHOUT_CONFIDENCE, *self.own_parts)
        return (*own, "confidence") if self.confidence_head is not None else own

    def steps_at(self, progress: float) -> int | None:
        """1 … `ttt_steps` − 1 in equal parts of the ramp, then all."""
        if progress >= self.config.ttt_ramp:
            return None
        return 1 + int(progress / self.config.ttt_ramp * (self.config.ttt_steps - 1))

    def forward(self, batch: DraftBatch) -> DraftLoss:
        """Unroll `batch.steps` draft steps on every row; see the module's docstring."""
        target, steps = batch.context.target, batch.steps or self.config.ttt_steps
        by_anchor = supervised(batch.loss_mask, batch.documents, steps)
        parts = batch.loss_parts or tuple(self.default_loss)
        statistics = StepStatistics(batch, by_anchor, target, self.target_ids, parts)
        weighted = WeightedSteps(statistics, self.config.step_weights, self.config.step_decay)
        valid = shift(by_anchor, 1)  # row i drafts from anchor i + 1
        rows = SupervisedRows(valid[..., 0])
        hidden = self.training_inputs(batch)
        mask = document_mask(batch.documents, batch.positions, working_dtype(hidden))
        embeddings = self._embed(target, shift(batch.tokens, 1))
        seen: list[list[KeysValues]] = [[] for _ in self.layers]
        hidden = self._unroll(embeddings, hidden, batch.positions, mask, seen, rows)
        mask, embeddings = rows.pick(mask, dim=2), rows.pick(embeddings)
        for step in range(steps):
            if step > 0:
                embeddings = self._embed(target, rows.pick(shift(batch.tokens, step + 1)))
                hidden = self._unroll(embeddings, hidden, rows.pick(batch.positions) + step, mask, seen)
            settled = self.settle(hidden)
            chosen = rows.pick(valid[..., step]) & rows.real
            output = settled[chosen]
            weighted.add(
                step,
                partial(self._logits_of, target, output),
                self._confidence(output, embeddings[chosen]),
                self.other_parts(batch, step, valid[..., step], output),
            )
            hidden = self.feedback(hidden, settled)
        return weighted.loss()

    def _unroll(
        self,
        embeddings: Tensor,
        hidden: Tensor,
        positions: Tensor,
        mask: Tensor,
        seen: list[list[KeysValues]],
        supervised: SupervisedRows | None = None,
    ) -> Tensor:
        """One step of the layers; adds its keys and values to `seen`, by layer.

        At step 0 every row gives keys and values to all layers, but only the supervised ones leave the last:
        [B, T, H] → [B, n, H]. Later steps are those rows' alone.
        """
        stream, rotary = self.enter(embeddings, hidden), self.rotary(hidden, positions)
        for index, (layer, kept) in enumerate(zip(self.layers, seen, strict=True)):
            x = layer.read(stream, embeddings)
            kept.append(layer.self_attn.keys_values(x, rotary))
            if supervised is not None and index == len(seen) - 1:
                x, stream, mask = supervised.pick(x), supervised.pick(stream), supervised.pick(mask, dim=2)
                rotary = (supervised.pick(rotary[0]), supervised.pick(rotary[1]))
            stream = self.computed(_attended, layer, stream, x, rotary, mask, tuple(kept))
        return stream

    def _logits_of(self, target: TargetModel, settled: Tensor, rows: slice) -> Tensor:
        return self.logits(target, settled[rows])

    def _embed(self, target: TargetModel, tokens: Tensor) -> Tensor:
        return target.embed(tokens).to(self.dtype)

    def _confidence(self, settled: Tensor, embeddings: Tensor) -> Tensor | None:
        """Raw, from the hidden state and the token before the one in question. What it learns does not reach the
        layers, so that a draft proposes the same tokens with the head and without."""
        return None if self.confidence_head is None else self.confidence_head(settled.detach(), embeddings)

    # ------------------------------------------------------------------ decoding

    def begin(self, beginning: Beginning) -> RecursiveState:
        """The prompt's row pairs wait for the first `propose`."""
        kv = State(len(self.layers), beginning.max_rows, beginning.capacity)
        return RecursiveState(beginning.context, kv, Waiting.prompt(beginning))

    def join(self, state: RecursiveState | None, new: RecursiveState) -> RecursiveState:
        if state is None:
            return new
        state.kv.append(new.kv)
        state.waiting.join(new.waiting)
        return state

    def update(self, state: RecursiveState, committed: Committed) -> None:
        """Committed row pairs wait for the next `propose`."""
        state.waiting.append(committed)

    def select(self, state: RecursiveState, rows: Sequence[int]) -> None:
        state.kv.select(rows)
        state.waiting.select(rows)

    def propose(self, state: RecursiveState, control: Control) -> Proposal:
        """One pass over what was committed, then a chain, one row a token, or the tree that is asked for."""
        embeddings, hidden = self._catch_up(state)
        if control.tree is not None:
            return self._propose_tree(state, control, embeddings, hidden)
        committed = list(state.kv.lengths)
        drafted = ChainedTokens(control, self.target_ids)
        for step in range(control.max_tokens):
            settled = self.settle(hidden)
            confidence = self._confidence(settled[:, 0], embeddings[:, 0])
            token = drafted.draw(self.logits(state.context.target, settled[:, 0]), confidence)
            if token is None or step + 1 == control.max_tokens:
                break
            embeddings = self._embed(state.context.target, token[:, None])
            layout = chain(state.kv.lengths, 1, token.device)
            hidden = self._run(state.kv, layout, embeddings, self.feedback(hidden, settled))
            state.kv.keep([1] * state.kv.rows)
        state.kv.truncate(committed)
        return drafted.proposal()

    def _propose_tree(
        self, state: RecursiveState, control: Control, embeddings: Tensor, hidden: Tensor
    ) -> Proposal:
        """As a chain, but a level's nodes are run together and each sees its own ancestors only."""
        target = state.context.target
        settled = self.settle(hidden)
        fed_back = self.feedback(hidden, settled)  # [B, 1 + slots, H]: the pending token's, then every slot's

        def seen(settled: Tensor, embeddings: Tensor) -> Seen:
            logits = self.logits(target, settled.flatten(0, 1)).unflatten(0, settled.shape[:2])
            raw = self._confidence(settled, embeddings)
            return Seen(logits, None if raw is None else raw.sigmoid())

        def run(tokens: Tensor, parents: Tensor, layout: Layout) -> Seen:
            nonlocal fed_back
            embeddings = self._embed(target, tokens)
            above = fed_back.gather(1, (parents + 1)[..., None].expand(-1, -1, fed_back.shape[-1]))
            hidden = self._run(state.kv, layout, embeddings, above)
            settled = self.settle(hidden)
            fed_back = torch.cat([fed_back, self.feedback(hidden, settled)], 1)
            return seen(settled, embeddings)

        return grow(control, seen(settled, embeddings), run, state.kv.lengths, self.target_ids)

    def _catch_up(self, state: RecursiveState) -> tuple[Tensor, Tensor]:
        """Run the waiting row pairs; embedding and output of each row's last one, [B, 1, H], which predicts the
        first drafted token."""
        target, waiting = state.context.target, state.waiting
        embeddings = self._embed(target, waiting.tokens)
        layout = chain(state.kv.lengths, embeddings.shape[1], embeddings.device)
        hidden = self._run(state.kv, layout, embeddings, self.fuse(target, waiting.features))
        state.kv.keep(waiting.counts)
        last = waiting.last(embeddings), waiting.last(hidden)
        waiting.clear()
        return last

    def _run(self, kv: State, layout: Layout, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """The layers over new rows [B, M, H] behind the cached ones; `kv.keep` decides which stay."""
        kv.plan(layout)
        mask, rotary = additive_mask(layout, hidden.dtype), self.rotary(hidden, layout.positions)
        stream = self.enter(embeddings, hidden)
        for index, layer in enumerate(self.layers):
            attended = layer.self_attn.cached(layer.read(stream, embeddings), rotary, kv, index, mask)
            stream = layer.finish(stream, attended)
        return stream


def _attended(
    layer: DecoderLayer,
    stream: Tensor,
    x: Tensor,
    rotary: tuple[Tensor, Tensor],
    mask: Tensor,
    seen: Sequence[KeysValues],
) -> Tensor:
    """The layer behind its keys and values."""
    mixed = unrolled_attention(layer.self_attn.queries(x, rotary), seen[0], seen[1:], mask)
    return layer.finish(stream, layer.self_attn.output(mixed))


def working_dtype(like: Tensor) -> torch.dtype:
    device = like.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else like.dtype
