"""Block drafts, what DFlash and DSpark share: one pass fills a whole block of slots behind the pending token.

From anchor a (the pending token is t_a) a block of S slots stands at positions a, a+1, …; the first holds t_a, the
others a mask. With f_j the target's captured layers at position j,

    C_j = norm_C(W_C f_j)                                               F → H, only j < a
    x   = layers([emb(t_a), mask, …]), attending to keys and values of C_{<a} and of the block's own slots
    h_k = norm(x) at the slot that predicts t_{a+k}                     k = 1..K
    q(t_{a+k} | ·) = softmax(head(h_k))                                 H → Vd

Embedding and head are the target's own (`head: trained`: a head of the draft's, started from the target's rows).
Slots of a block see each other in both directions, and no other block. C enters the key and value projections as it
is; each head's queries and keys are normalised (`head_norms`), then rotated to their positions. A block is filled whole
even where fewer tokens are drafted: its slots see each other, so a shorter one would not be what was trained.

In training the blocks of many anchors are filled at once. Loss: `default_loss` with w_k = exp(−(k−1)/γ).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig

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
from deepspec.drafts.eagle3 import default_layers
from deepspec.drafts.layers import DecoderLayer, Rotary, draft_shape, head_rows, repeat_heads
from deepspec.drafts.mask_token import MaskToken
from deepspec.drafts.slots import propose_from_slots
from deepspec.drafts.statistics import PARTS, WITHOUT_CONFIDENCE, StepStatistics
from deepspec.drafts.step_weights import WeightedSteps
from deepspec.drafts.unrolled import KeysValues, SupervisedRows, shift, supervised
from deepspec.drafts.waiting import Waiting
from deepspec.drafts.walk import keyed_uniforms
from deepspec.target.layout import Layout, additive_mask, chain
from deepspec.target.state import State

# Blocks, over all rows of a batch, whose attention weights exist at a time; with more, they are computed again in
# the backward pass.
BLOCKS_AT_ONCE = 256


class BlockConfig(PreTrainedConfig):
    def __init__(
        self,
        hidden_size: int = 64,
        vocab_size: int = 256,
        draft_vocab_size: int | None = None,
        capture_layers: Sequence[int] = (0,),
        num_layers: int = 1,
        block_tokens: int = 7,
        gamma: float = 4.0,
        step_weights: str = "decay",
        anchors: int | None = None,
        head: str = "frozen",
        mask_token: int | None = None,
        confidence: bool = False,
        confidence_bias: bool = False,
        **shape: Any,
    ) -> None:
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size
        self.draft_vocab_size = draft_vocab_size
        self.capture_layers = list(capture_layers)
        self.num_layers = num_layers
        self.block_tokens = block_tokens
        self.gamma = gamma
        self.step_weights = step_weights
        self.anchors = anchors
        self.head = head
        self.mask_token = mask_token
        self.confidence = confidence
        self.confidence_bias = confidence_bias
        super().__init__(**shape)


@dataclass
class BlockState:
    """kv: every layer's keys and values of C at the positions taken in. waiting: what was committed since."""

    context: DraftContext
    kv: State
    waiting: Waiting


class BlockDraft(TrainableDraft):
    one_pass = True
    config_class: Any
    base_model_prefix = "draft"
    inherited = (*TrainableDraft.inherited, "confidence_bias")
    first_slot: ClassVar[int]  # the one that predicts t_{a+1}
    layers: Any  # nn.ModuleList of DecoderLayer
    target_ids: (
        Tensor | None
    )  # [Vd] target id of each draft id, ascending; None = the target's own vocabulary

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.capture_layers) * hidden, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(hidden, eps=eps)
        rows = config.draft_vocab_size or config.vocab_size
        self.lm_head = nn.Linear(hidden, rows, bias=False) if config.head == "trained" else None
        self.mask = MaskToken(hidden, config.mask_token)
        self.confidence_head = (
            ConfidenceHead(hidden, self.previous_width, config.confidence_bias) if config.confidence else None
        )
        self.rotary = Rotary(config)
        ids = torch.arange(config.draft_vocab_size) if config.draft_vocab_size else None
        self.register_buffer("target_ids", ids)

    @classmethod
    def from_target(cls, options: Any, target: Any, target_ids: Tensor | None) -> Self:
        """A fresh draft for `target`, with its sizes, rope and norm."""
        shape = draft_shape(target.config)
        if options.intermediate_size:
            shape["intermediate_size"] = options.intermediate_size
        config = cls.config_class(
            vocab_size=target.vocab_size,
            draft_vocab_size=None if target_ids is None else len(target_ids),
            capture_layers=options.capture_layers or default_layers(target.num_layers),
            num_layers=options.layers,
            block_tokens=options.block_tokens,
            gamma=options.gamma,
            step_weights=options.step_weights,
            anchors=options.anchors,
            head=options.head,
            mask_token=options.mask_token,
            head_norms=options.head_norms,
            confidence=options.confidence,
            **cls.own_settings(options),
            **shape,
        )
        draft = cls(config)
        draft.mask.start(target)
        with torch.no_grad():
            if target_ids is not None and draft.target_ids is not None:
                draft.target_ids.copy_(target_ids)
            if draft.lm_head is not None:
                draft.lm_head.weight.copy_(head_rows(target, target_ids))
        return draft

    @classmethod
    def own_settings(cls, options: Any) -> dict[str, Any]:
        """A family's own part of the configuration."""
        return {}

    @property
    def loss_parts(self) -> tuple[str, ...]:
        return WITHOUT_CONFIDENCE if self.confidence_head is None else tuple(PARTS)

    # What depends on the token before a slot: nothing here but the confidence; DSpark adds more.

    @property
    def previous_width(self) -> int:
        """Of what the confidence head sees of the token before."""
        return self.config.hidden_size

    def follow(
        self, target: TargetModel, hidden: Tensor, previous: Tensor, memory: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """One slot, once the token before it is known.

        hidden: [..., H] of the slot. previous: [...] token ids. memory: what the slot before handed on. Returns what
        `bias` turns into an addition to the logits (None: nothing), the raw confidence [...] or None, and the memory.
        """
        if self.confidence_head is None:
            return None, None, None
        return None, self.confidence_head(hidden.detach(), target.embed(previous).to(hidden.dtype)), None

    def bias(self, latent: Tensor) -> Tensor:
        """[..., r] → [..., Vd]."""
        raise NotImplementedError

    # ------------------------------------------------------------------ training

    def forward(self, batch: DraftBatch) -> DraftLoss:
        """The blocks of all anchors that count. `batch.steps` beyond K are never supervised."""
        self.mask.check(batch)
        target, held = batch.context.target, self.config.block_tokens
        steps = batch.steps or held
        by_anchor = supervised(batch.loss_mask, batch.documents, steps)
        by_anchor[..., held:] = False
        if self.training and self.config.anchors is not None and batch.seeds is not None:
            by_anchor &= drawn_anchors(by_anchor[..., 0], self.config.anchors, batch.seeds)[..., None]
        parts = batch.loss_parts or tuple(self.default_loss)
        statistics = StepStatistics(batch, by_anchor, target, self.target_ids, parts)
        weighted = WeightedSteps(statistics, self.config.step_weights, math.exp(-1 / self.config.gamma))
        anchors = SupervisedRows(by_anchor[..., 0])
        hidden = self._all_blocks(batch, anchors)
        memory: Tensor | None = None
        for step in range(min(steps, held)):
            wanted = anchors.pick(by_anchor[..., step]) & anchors.real
            previous = anchors.pick(shift(batch.tokens, step))
            latent, confidence, memory = self.follow(target, hidden[:, :, step], previous, memory)
            logits = partial(
                self._logits_of,
                target,
                hidden[:, :, step][wanted],
                None if latent is None else latent[wanted],
            )
            weighted.add(step, logits, None if confidence is None else confidence[wanted])
        return weighted.loss()

    def _all_blocks(self, batch: DraftBatch, anchors: SupervisedRows) -> Tensor:
        """[B, n, K, H]: h of every predicting slot of the n anchors, a bounded number of blocks at a time."""
        context = self._context(batch.features)
        rotary = self.rotary(context, batch.positions)
        kept = [layer.self_attn.keys_values(context, rotary) for layer in self.layers]
        tokens, positions, documents = (
            anchors.pick(column) for column in (batch.tokens, batch.positions, batch.documents)
        )
        seen = documents[:, :, None] == batch.documents[:, None]
        seen &= batch.positions[:, None] < positions[:, :, None]
        slots = self._slots(batch.context.target, tokens)
        width = max(1, BLOCKS_AT_ONCE // tokens.shape[0])
        pieces = list(zip(*(x.split(width, 1) for x in (slots, positions, seen)), strict=True))
        if not torch.is_grad_enabled() or (len(pieces) == 1 and not self.gradient_checkpointing):
            done = [self._blocks(kept, *piece) for piece in pieces]
        else:
            done = [checkpoint(self._blocks, kept, *piece, use_reentrant=False) for piece in pieces]
        return torch.cat(done, 1)

    def _blocks(self, kept: list[KeysValues], slots: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        """slots [B, n, S, H] of anchors at positions [B, n] → h [B, n, K, H].

        kept: each layer's keys and values of C, [B, kv_heads, T, d]. seen: [B, n, T] bool, the anchor's context.
        """
        blocks, size = slots.shape[1:3]
        stream = slots.flatten(1, 2)
        places = positions[..., None] + torch.arange(size, device=positions.device)
        rotary = self.rotary(stream, places.flatten(1))
        for layer, context in zip(self.layers, kept, strict=True):
            x = layer.input_layernorm(stream)
            own = layer.self_attn.keys_values(x, rotary)
            mixed = block_attention(layer.self_attn.queries(x, rotary), context, own, seen)
            stream = layer.finish(stream, layer.self_attn.output(mixed))
        return self.norm(stream.unflatten(1, (blocks, size))[:, :, self.first_slot :])

    def _context(self, features: Tensor) -> Tensor:
        """[B, T, F] → C [B, T, H]."""
        return self.hidden_norm(self.fc(features.to(self.dtype)))

    def _slots(self, target: TargetModel, anchors: Tensor) -> Tensor:
        """Tokens [B, n] of anchors → what enters the first layer, [B, n, S, H]."""
        first = target.embed(anchors).to(self.dtype)[:, :, None]
        masks = self.first_slot + self.config.block_tokens - 1
        return torch.cat([first, self.mask(target, first).expand(*anchors.shape, masks, -1)], 2)

    def _logits_of(self, target: TargetModel, hidden: Tensor, latent: Tensor | None, rows: slice) -> Tensor:
        logits = self._logits(target, hidden[rows])
        return logits if latent is None else logits + self.bias(latent[rows])

    def _logits(self, target: TargetModel, hidden: Tensor) -> Tensor:
        """h [n, H] → [n, Vd]."""
        return target.head(hidden, self.target_ids) if self.lm_head is None else self.lm_head(hidden)

    # ------------------------------------------------------------------ decoding

    def begin(self, beginning: Beginning) -> BlockState:
        kv = State(len(self.layers), beginning.max_rows, beginning.capacity)
        return BlockState(beginning.context, kv, Waiting.prompt(beginning))

    def join(self, state: BlockState | None, new: BlockState) -> BlockState:
        if state is None:
            return new
        state.kv.append(new.kv)
        state.waiting.join(new.waiting)
        return state

    def propose(self, state: BlockState, control: Control) -> Proposal:
        """Take in what was committed, fill one block, then a chain or a tree of what its slots say."""
        target, count = state.context.target, min(control.max_tokens, self.config.block_tokens)
        pending = state.waiting.last(state.waiting.tokens)
        self._take_in(state)
        hidden = self._fill(state, pending)[:, :count]
        logits = self._logits(target, hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])

        def slot(
            index: int, previous: Tensor, memory: Tensor | None
        ) -> tuple[Tensor, Tensor | None, Tensor | None]:
            here, mine = (x[:, index, None].expand(-1, previous.shape[1], -1) for x in (hidden, logits))
            latent, confidence, memory = self.follow(target, here, previous, memory)
            return (mine if latent is None else mine + self.bias(latent)), confidence, memory

        return propose_from_slots(control, pending, count, slot, self.target_ids)

    def update(self, state: BlockState, committed: Committed) -> None:
        state.waiting.append(committed)

    def select(self, state: BlockState, rows: Sequence[int]) -> None:
        state.kv.select(rows)
        state.waiting.select(rows)

    def _take_in(self, state: BlockState) -> None:
        """Keys and values of C at the positions that wait; their features are not needed again."""
        context = self._context(state.waiting.features)
        layout = chain(state.kv.lengths, context.shape[1], context.device)
        state.kv.plan(layout)
        rotary = self.rotary(context, layout.positions)
        for index, layer in enumerate(self.layers):
            state.kv.update(*layer.self_attn.keys_values(context, rotary), index)
        state.kv.keep(state.waiting.counts)
        state.waiting.clear()

    def _fill(self, state: BlockState, pending: Tensor) -> Tensor:
        """pending [B, 1] → h [B, K, H]. The block's own keys and values are written and not kept."""
        stream = self._slots(state.context.target, pending)[:, 0]
        size, device = stream.shape[1], stream.device
        positions = chain(state.kv.lengths, size, device).positions
        layout = Layout(state.kv.lengths, positions, torch.ones(size, size, dtype=torch.bool, device=device))
        state.kv.plan(layout)
        mask, rotary = additive_mask(layout, stream.dtype), self.rotary(stream, positions)
        for index, layer in enumerate(self.layers):
            attended = layer.self_attn.cached(layer.input_layernorm(stream), rotary, state.kv, index, mask)
            stream = layer.finish(stream, attended)
        return self.norm(stream[:, self.first_slot :])


def drawn_anchors(candidates: Tensor, count: int, seeds: Tensor) -> Tensor:
    """At most `count` of a row's candidates [B, T] bool, by a hash of (the row's seed, position) alone."""
    keys = keyed_uniforms(0, seeds.tolist(), candidates.shape[1]).to(candidates.device)
    keys = torch.where(candidates, keys, 2.0)
    lowest = keys.topk(min(count, keys.shape[1]), dim=1, largest=False).indices
    return torch.zeros_like(candidates).scatter_(1, lowest, True) & candidates


def block_attention(query: Tensor, context: KeysValues, own: KeysValues, seen: Tensor) -> Tensor:
    """Attention of n blocks of S slots to a text that they share, each as far as it sees it, and to themselves.

    query: [B, heads, n·S, d]. context: keys and values [B, kv_heads, T, d]; own: [B, kv_heads, n·S, d]. seen:
    [B, n, T] bool. Returns [B, heads, n·S, d]. Nothing of the size (n·S)² exists.
    """
    heads, blocks = query.shape[1], seen.shape[1]
    keys, values = (repeat_heads(x, heads) for x in context)
    own_keys, own_values = (repeat_heads(x, heads).unflatten(2, (blocks, -1)) for x in own)
    outer = (query @ keys.transpose(-1, -2)).unflatten(2, (blocks, -1))
    # A slot always sees its own block, so that no row of scores is empty.
    outer = outer.masked_fill(~seen[:, None, :, None], -math.inf)
    inner = query.unflatten(2, (blocks, -1)) @ own_keys.transpose(-1, -2)
    scores = torch.cat([outer, inner], -1) * query.shape[-1] ** -0.5
    exact = torch.promote_types(query.dtype, torch.float32)
    weights = scores.softmax(-1, dtype=exact).to(values.dtype)
    count = keys.shape[2]
    mixed = weights[..., :count].flatten(2, 3) @ values
    return mixed + (weights[..., count:] @ own_values).flatten(2, 3)
