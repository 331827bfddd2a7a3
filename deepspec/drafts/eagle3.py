"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): a draft layer over fused target features, trained on its own outputs.

Row i pairs the target's features at position i with the token at i + 1 and predicts the token at i + 2:

    g_i = fc([f^low; f^mid; f^high]_i)                                  F → H
    h_i = layer([norm(emb(t_{i+1})); norm(g_i)]),  residual stream g_i  2H → H
    q(t_{i+2} | ·) = softmax(lm_head(norm(h_i)))                        H → Vd

Unrolled (training-time test): at step s the row's own h of step s − 1 stands in place of g, with the token
t_{i+1+s}; a query of step s sees step 0's keys up to row i and, of steps 1..s, only its own row's. Rotary
position i + s. Loss Σ_s decay^s · cross-entropy against the target's distribution (`soft_ce`).
EAGLE-3.1: `norm_layers` normalises each captured layer before `fc`, `normalised_feedback` feeds norm(h) back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

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
from deepspec.drafts.layers import MLP, Attention, Rotary, draft_shape
from deepspec.drafts.options import Eagle3Options
from deepspec.drafts.statistics import WITHOUT_CONFIDENCE, StepStatistics
from deepspec.drafts.unrolled import SupervisedRows, shift, supervised, unrolled_attention
from deepspec.drafts.warm_start import warm_start
from deepspec.target.layout import additive_mask, chain, document_mask
from deepspec.target.state import State


class Eagle3Config(PreTrainedConfig):
    model_type = "deepspec_eagle3"

    def __init__(
        self,
        hidden_size: int = 64,
        target_hidden_size: int = 64,
        vocab_size: int = 256,
        draft_vocab_size: int | None = None,
        capture_layers: Sequence[int] = (0,),
        num_layers: int = 1,
        ttt_steps: int = 5,
        step_decay: float = 0.8,
        norm_layers: bool = False,
        normalised_feedback: bool = False,
        **shape: Any,
    ) -> None:
        self.hidden_size = hidden_size
        self.target_hidden_size = target_hidden_size
        self.vocab_size = vocab_size
        self.draft_vocab_size = draft_vocab_size
        self.capture_layers = list(capture_layers)
        self.num_layers = num_layers
        self.ttt_steps = ttt_steps
        self.step_decay = step_decay
        self.norm_layers = norm_layers
        self.normalised_feedback = normalised_feedback
        super().__init__(**shape)


class Eagle3Layer(nn.Module):
    """One decoder layer. The first one also takes the token's embedding (`with_tokens`) beside the stream."""

    def __init__(self, config: Any, with_tokens: bool) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps) if with_tokens else None
        self.self_attn = Attention(
            hidden * (2 if with_tokens else 1),
            hidden,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.mlp = MLP(hidden, config.intermediate_size)

    def normed(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """What the attention reads: [norm(emb); norm(hidden)] in the first layer, norm(hidden) in the others."""
        if self.hidden_norm is None:
            return self.input_layernorm(hidden)
        return torch.cat([self.input_layernorm(embeddings), self.hidden_norm(hidden)], -1)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        hidden = hidden + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


@dataclass
class Eagle3State:
    """kv: the draft layers' keys and values of committed rows. tokens [B, M], features [B, M, F], counts: row
    pairs (features at i, token at i + 1) the layers have not seen yet, padded on the right."""

    context: DraftContext
    kv: State
    tokens: Tensor
    features: Tensor
    counts: list[int]


class Eagle3Draft(TrainableDraft):
    config_class = Eagle3Config
    base_model_prefix = "draft"
    loss_parts = WITHOUT_CONFIDENCE
    layers: Any  # nn.ModuleList of Eagle3Layer
    fc_norm: Any  # nn.ModuleList or None
    target_ids: Tensor | None

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        hidden, captured = config.hidden_size, len(config.capture_layers)
        norms = [nn.RMSNorm(config.target_hidden_size, eps=config.rms_norm_eps) for _ in range(captured)]
        self.fc_norm = nn.ModuleList(norms) if config.norm_layers else None
        self.fc = nn.Linear(captured * config.target_hidden_size, hidden, bias=False)
        self.layers = nn.ModuleList(Eagle3Layer(config, index == 0) for index in range(config.num_layers))
        self.norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size or config.vocab_size, bias=False)
        self.rotary = Rotary(config)
        ids = torch.arange(config.draft_vocab_size) if config.draft_vocab_size else None
        self.register_buffer("target_ids", ids)
        self.post_init()

    @classmethod
    def from_target(cls, options: Eagle3Options, target: Any, target_ids: Tensor | None) -> "Eagle3Draft":
        """A fresh draft for `target`: its sizes, rope and norm; the head starts from the target's own rows."""
        shape = draft_shape(target.config)
        if options.intermediate_size:
            shape["intermediate_size"] = options.intermediate_size
        config = Eagle3Config(
            target_hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=None if target_ids is None else len(target_ids),
            capture_layers=options.capture_layers or default_layers(target.num_layers),
            num_layers=options.layers,
            ttt_steps=options.ttt_steps,
            step_decay=options.step_decay,
            norm_layers=options.norm_layers,
            normalised_feedback=options.normalised_feedback,
            **shape,
        )
        draft = cls(config)
        rows = target.model.get_output_embeddings().weight.detach()
        with torch.no_grad():
            draft.lm_head.weight.copy_(rows if target_ids is None else rows[target_ids.to(rows.device)])
            if target_ids is not None and draft.target_ids is not None:
                draft.target_ids.copy_(target_ids)
        if options.start == "target":
            config.started_from = warm_start(draft, target)
        return draft

    @property
    def default_loss(self) -> dict[str, float]:
        return {"soft_ce": 1.0}

    @property
    def vocab(self) -> Tensor | None:
        """[Vd] target id of each draft id, ascending; None = the target's own vocabulary."""
        return self.target_ids

    # ------------------------------------------------------------------ training

    def forward(self, batch: DraftBatch) -> DraftLoss:
        """Unroll `batch.steps` draft steps on every row; see the module's docstring for formula and shapes."""
        target, steps = batch.context.target, batch.steps or self.config.ttt_steps
        by_anchor = supervised(batch.loss_mask, batch.documents, steps)
        parts = batch.loss_parts or tuple(self.default_loss)
        statistics = StepStatistics(batch, by_anchor, target, self.vocab, parts)
        valid = shift(by_anchor, 1)  # row i drafts from anchor i + 1
        rows = SupervisedRows(valid[..., 0])
        hidden = self._fuse(batch.features)
        dtype = torch.get_autocast_dtype(hidden.device.type) if _autocast(hidden) else hidden.dtype
        mask = document_mask(batch.documents, batch.positions, dtype)
        seen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.layers]
        hidden = self._first_step(target, batch, hidden, mask, seen, rows)
        mask = rows.pick(mask, dim=2)
        for step in range(steps):
            if step > 0:
                embeddings = self._embed(target, rows.pick(shift(batch.tokens, step + 1)))
                rotary = self.rotary(hidden, rows.pick(batch.positions) + step)
                for layer, kept in zip(self.layers, seen, strict=True):
                    x = layer.normed(embeddings, hidden)
                    kept.append(layer.self_attn.keys_values(x, rotary))
                    mixed = unrolled_attention(layer.self_attn.queries(x, rotary), kept[0], kept[1:], mask)
                    hidden = layer.finish(hidden, layer.self_attn.output(mixed))
            normed = self.norm(hidden)
            logits = self.lm_head(normed[rows.pick(valid[..., step]) & rows.real])
            statistics.add(step, logits, self.config.step_decay**step)
            hidden = normed if self.config.normalised_feedback else hidden
        return statistics.loss()

    def _first_step(
        self,
        target: TargetModel,
        batch: DraftBatch,
        hidden: Tensor,
        mask: Tensor,
        seen: list[list[tuple[Tensor, Tensor]]],
        rows: SupervisedRows,
    ) -> Tensor:
        """Step 0: every row gives keys and values to all layers, but only supervised rows leave the last one.

        Fills `seen`; returns the supervised rows' stream [B, n, H].
        """
        embeddings = self._embed(target, shift(batch.tokens, 1))
        rotary = self.rotary(hidden, batch.positions)
        for index, (layer, kept) in enumerate(zip(self.layers, seen, strict=True)):
            x = layer.normed(embeddings, hidden)
            kept.append(layer.self_attn.keys_values(x, rotary))
            if index == len(seen) - 1:
                x, hidden, mask = rows.pick(x), rows.pick(hidden), rows.pick(mask, dim=2)
                rotary = (rows.pick(rotary[0]), rows.pick(rotary[1]))
            mixed = unrolled_attention(layer.self_attn.queries(x, rotary), kept[0], [], mask)
            hidden = layer.finish(hidden, layer.self_attn.output(mixed))
        return hidden

    def _fuse(self, features: Tensor) -> Tensor:
        """[B, T, F] captured layers side by side → g [B, T, H]."""
        features = features.to(self.fc.weight.dtype)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(features)

    def _embed(self, target: TargetModel, tokens: Tensor) -> Tensor:
        return target.embed(tokens).to(self.fc.weight.dtype)

    # ------------------------------------------------------------------ decoding

    def begin(self, beginning: Beginning) -> Eagle3State:
        """The prompt's row pairs wait for the first `propose`."""
        kv = State(len(self.layers), beginning.max_rows, beginning.capacity)
        tokens = beginning.tokens[:, 1:]
        return Eagle3State(beginning.context, kv, tokens, beginning.features, [tokens.shape[1]])

    def join(self, state: Eagle3State | None, new: Eagle3State) -> Eagle3State:
        if state is None:
            return new
        state.kv.append(new.kv)
        state.tokens = _stack_ragged(state.tokens, new.tokens)
        state.features = _stack_ragged(state.features, new.features)
        state.counts = state.counts + new.counts
        return state

    def propose(self, state: Eagle3State, control: Control) -> Proposal:
        """A chain of `control.max_tokens`: one pass over what was committed, then one row a token."""
        hidden = self._catch_up(state)
        target, committed = state.context.target, list(state.kv.lengths)
        tokens: list[Tensor] = []
        distributions: list[Tensor] = []
        for step in range(control.max_tokens):
            normed = self.norm(hidden)
            token, q = control.draw(self.lm_head(normed)[:, 0], step - 1, self.vocab)
            tokens.append(token)
            if q is not None:
                distributions.append(q)
            if step + 1 < control.max_tokens:
                stream = normed if self.config.normalised_feedback else hidden
                hidden = self._run(state.kv, self._embed(target, token[:, None]), stream)
                state.kv.keep([1] * state.kv.rows)
        state.kv.truncate(committed)
        return Proposal(
            torch.stack(tokens, 1),
            [control.max_tokens] * len(committed),
            q=torch.stack(distributions, 1) if distributions else None,
            vocab=self.vocab,
        )

    def update(self, state: Eagle3State, committed: Committed) -> None:
        """Committed row pairs wait for the next `propose`."""
        waiting = [count + more for count, more in zip(state.counts, committed.counts, strict=True)]
        state.tokens = _append_ragged(state.tokens, state.counts, committed.tokens, committed.counts)
        state.features = _append_ragged(state.features, state.counts, committed.features, committed.counts)
        state.counts = waiting

    def select(self, state: Eagle3State, rows: Sequence[int]) -> None:
        state.kv.select(rows)
        state.tokens, state.features = state.tokens[list(rows)], state.features[list(rows)]
        state.counts = [state.counts[row] for row in rows]

    def _catch_up(self, state: Eagle3State) -> Tensor:
        """Run the waiting row pairs; [B, 1, H] the stream after each row's last one, which predicts the first
        drafted token."""
        embeddings = self._embed(state.context.target, state.tokens)
        hidden = self._run(state.kv, embeddings, self._fuse(state.features))
        state.kv.keep(state.counts)
        last = torch.tensor(state.counts, device=hidden.device) - 1
        state.tokens, state.features = state.tokens[:, :0], state.features[:, :0]
        hidden = hidden[torch.arange(len(last), device=hidden.device), last][:, None]
        state.counts = [0] * len(state.counts)
        return hidden

    def _run(self, kv: State, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """The layers over new rows [B, M, H] behind the cached ones; `kv.keep` decides which stay."""
        layout = chain(kv.lengths, hidden.shape[1], hidden.device)
        kv.plan(layout)
        mask, rotary = additive_mask(layout, hidden.dtype), self.rotary(hidden, layout.positions)
        for index, layer in enumerate(self.layers):
            attended = layer.self_attn.cached(layer.normed(embeddings, hidden), rotary, kv, index, mask)
            hidden = layer.finish(hidden, attended)
        return hidden


def default_layers(count: int) -> list[int]:
    """Low, middle and high of `count` target layers: [1, n//2−1, n−4], clamped to [0, n−2], unique, ascending."""
    wanted = [1, count // 2 - 1, count - 4]
    return sorted({min(max(layer, 0), max(count - 2, 0)) for layer in wanted})


def _autocast(like: Tensor) -> bool:
    return torch.is_autocast_enabled(like.device.type)


def _stack_ragged(rows: Tensor, row: Tensor) -> Tensor:
    """[B, M, ...] and [1, M', ...] → [B+1, max(M, M'), ...], zeros on the right."""
    width = max(rows.shape[1], row.shape[1])
    stacked = rows.new_zeros(rows.shape[0] + 1, width, *rows.shape[2:])
    stacked[:-1, : rows.shape[1]] = rows
    stacked[-1:, : row.shape[1]] = row
    return stacked


def _append_ragged(
    first: Tensor, first_counts: list[int], second: Tensor, second_counts: list[int]
) -> Tensor:
    """Each row's `first_counts` entries followed by its `second_counts` ones, zeros on the right."""
    if not any(first_counts):
        return second
    pairs = list(zip(first_counts, second_counts, strict=True))
    joined = first.new_zeros(len(pairs), max(a + b for a, b in pairs), *first.shape[2:])
    for row, (a, b) in enumerate(pairs):
        joined[row, :a], joined[row, a : a + b] = first[row, :a], second[row, :b]
    return joined
