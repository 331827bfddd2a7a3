"""A small language model with the target's tokenizer as the draft (Leviathan et al. 2023, arXiv 2211.17192).

    q(t_{j+1} | t_{≤j}) = softmax(model(t_{≤j}))

It reads no features of the target, so that decoding captures nothing. It is distilled on the target's distributions
of supervised text; every position counts once, for what a draft says at step k depends on the text before it only.
Where it comes from: the target's own first layers with its embedding, final norm and head; a fresh small model of the
target's family; or any causal language model with the target's tokenizer.
"""

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from deepspec.drafts.chained import ChainedTokens
from deepspec.drafts.confidence import ConfidenceHead
from deepspec.drafts.contract import (
    Beginning,
    Committed,
    Control,
    DraftBatch,
    DraftLoss,
    Proposal,
    TrainableDraft,
)
from deepspec.drafts.options import StandaloneOptions
from deepspec.drafts.statistics import PARTS, WITHOUT_CONFIDENCE, StepStatistics
from deepspec.drafts.tree import Seen, grow
from deepspec.drafts.unrolled import supervised
from deepspec.drafts.waiting import Waiting
from deepspec.errors import UserError
from deepspec.target.attention import NAME as GROUPED_SDPA
from deepspec.target.attention import use_grouped_sdpa
from deepspec.target.layout import Layout, additive_mask, chain, document_mask
from deepspec.target.model import attention_windows, cache_argument, family_masks
from deepspec.target.state import State


class StandaloneConfig(PreTrainedConfig):
    """lm: the language model's own configuration, as a dict. attention: sdpa, or eager where the family has no other."""

    model_type = "deepspec_standalone"

    def __init__(
        self,
        lm: dict[str, Any] | None = None,
        attention: str = "sdpa",
        draft_vocab_size: int | None = None,
        confidence: bool = False,
        **more: Any,
    ) -> None:
        self.lm = lm or {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 32, "vocab_size": 256}
        self.attention = attention
        self.draft_vocab_size = draft_vocab_size
        self.confidence = confidence
        self.capture_layers: list[int] = []
        more.pop("capture_layers", None)
        super().__init__(**more)


@dataclass
class StandaloneState:
    """kv: keys and values of committed tokens. waiting: those not run yet, the pending one last."""

    kv: State
    waiting: Waiting


class StandaloneDraft(TrainableDraft):
    config_class = StandaloneConfig
    base_model_prefix = "draft"
    needs_features = False
    target_ids: Tensor | None

    def __init__(self, config: StandaloneConfig) -> None:
        super().__init__(config)
        settings = AutoConfig.for_model(**config.lm)
        self.model: Any = AutoModelForCausalLM.from_config(
            settings, attn_implementation=config.attention, dtype=torch.get_default_dtype()
        )
        use_grouped_sdpa(self.model)
        self.windows = attention_windows(settings)
        self.cache_argument = cache_argument(self.model)
        width = settings.hidden_size
        self.confidence_head = ConfidenceHead(width, width) if config.confidence else None
        ids = torch.arange(config.draft_vocab_size) if config.draft_vocab_size else None
        self.register_buffer("target_ids", ids)
        self.post_init()

    @classmethod
    def from_target(
        cls, options: StandaloneOptions, target: Any, target_ids: Tensor | None
    ) -> "StandaloneDraft":
        """A draft for `target`, as `options.start` says."""
        attention = "sdpa" if target.model.config._attn_implementation == GROUPED_SDPA else "eager"
        given = _given(options, target) if options.start not in ("target", "random") else None
        settings = given.config if given is not None else _smaller(options, target)
        config = StandaloneConfig(
            lm=_as_json(settings),
            attention=attention,
            draft_vocab_size=None if target_ids is None else len(target_ids),
            confidence=options.confidence,
        )
        draft = cls(config)
        if target_ids is not None and draft.target_ids is not None:
            draft.target_ids.copy_(target_ids)
        if given is not None:
            draft.model.load_state_dict(given.state_dict())
        elif options.start == "target":
            _copy_first_layers(draft.model, target)
        return draft

    @property
    def default_loss(self) -> dict[str, float]:
        return {"soft_ce": 1.0, "confidence": 1.0} if self.confidence_head is not None else {"soft_ce": 1.0}

    @property
    def loss_parts(self) -> tuple[str, ...]:
        return tuple(PARTS) if self.confidence_head is not None else WITHOUT_CONFIDENCE

    # ------------------------------------------------------------------ training

    def forward(self, batch: DraftBatch) -> DraftLoss:
        """One pass over the rows. Step k from anchor a is what the model says behind t_{a+k−1}."""
        steps = batch.steps or 1
        valid = supervised(batch.loss_mask, batch.documents, steps)
        parts = batch.loss_parts or tuple(self.default_loss)
        statistics = StepStatistics(batch, valid, batch.context.target, self.target_ids, parts)
        needed = valid[..., 0].any(0)  # columns that some row needs
        if not bool(needed.any()):
            needed[0] = True
        columns = needed.nonzero()[:, 0]
        place = needed.cumsum(0) - 1
        said = self._run(
            batch.tokens,
            lambda window, dtype: document_mask(batch.documents, batch.positions, dtype, window),
            batch.positions,
            columns,
        )
        for step in range(steps):
            rows, anchors = valid[..., step].nonzero(as_tuple=True)
            at = rows, place[anchors + step]
            confidence = None if said.confidence is None else said.confidence[at]
            logits = partial(_picked, said.logits, at)
            # Every supervised position is some anchor's first step: the later ones are measured only.
            statistics.add(step, logits, 1.0 if step == 0 else 0.0, confidence)
        return statistics.loss()

    def _run(
        self,
        tokens: Tensor,
        mask: Callable[[int | None, torch.dtype], Tensor],
        positions: Tensor,
        columns: Tensor | int = 0,
        kv: State | None = None,
    ) -> Seen:
        """What the model says behind `columns` of tokens [B, T] (0: all); confidence is raw here."""
        read: list[Tensor] = []
        handle = self.model.get_output_embeddings().register_forward_pre_hook(
            lambda module, inputs: read.append(inputs[0])
        )
        try:
            logits = self.model(
                input_ids=tokens,
                attention_mask=family_masks(self.windows, lambda window: mask(window, self._working_dtype())),
                position_ids=positions,
                use_cache=kv is not None,
                logits_to_keep=columns,
                **({self.cache_argument: kv} if kv is not None else {}),
            ).logits
        finally:
            handle.remove()
        logits = logits if self.target_ids is None else logits[..., self.target_ids]
        if self.confidence_head is None:
            return Seen(logits)
        before = tokens if isinstance(columns, int) else tokens[:, columns]
        embeddings = self.model.get_input_embeddings()(before)
        return Seen(logits, self.confidence_head(read[0].detach(), embeddings.detach()))

    def _working_dtype(self) -> torch.dtype:
        device = self.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.dtype

    # ------------------------------------------------------------------ decoding

    def begin(self, beginning: Beginning) -> StandaloneState:
        """The prompt and the pending token wait for the first `propose`."""
        layers = self.model.config.num_hidden_layers
        kv = State(layers, beginning.max_rows, beginning.capacity)
        tokens = beginning.tokens
        waiting = Waiting(tokens, tokens.new_empty(*tokens.shape, 0), [tokens.shape[1]])
        return StandaloneState(kv, waiting)

    def join(self, state: StandaloneState | None, new: StandaloneState) -> StandaloneState:
        if state is None:
            return new
        state.kv.append(new.kv)
        state.waiting.join(new.waiting)
        return state

    def update(self, state: StandaloneState, committed: Committed) -> None:
        """Committed tokens wait for the next `propose`."""
        state.waiting.append(committed)

    def select(self, state: StandaloneState, rows: Sequence[int]) -> None:
        state.kv.select(rows)
        state.waiting.select(rows)

    def propose(self, state: StandaloneState, control: Control) -> Proposal:
        """One pass over what was committed, then a chain, one token a pass, or the tree that is asked for."""
        said, kv = self._catch_up(state), state.kv
        if control.tree is not None:

            def run(tokens: Tensor, parents: Tensor, layout: Layout) -> Seen:
                return _certain(self._behind(kv, tokens, layout))

            return grow(control, _certain(said), run, kv.lengths, self.target_ids)
        committed = list(kv.lengths)
        drafted = ChainedTokens(control, self.target_ids)
        for step in range(control.max_tokens):
            confidence = None if said.confidence is None else said.confidence[:, 0]
            token = drafted.draw(said.logits[:, 0], confidence)
            if token is None or step + 1 == control.max_tokens:
                break
            said = self._behind(kv, token[:, None], chain(kv.lengths, 1, token.device))
            kv.keep([1] * kv.rows)
        kv.truncate(committed)
        return drafted.proposal()

    def _catch_up(self, state: StandaloneState) -> Seen:
        """Run the waiting tokens; what the model says behind each row's last one (W = 1)."""
        kv, waiting = state.kv, state.waiting
        layout = chain(kv.lengths, waiting.tokens.shape[1], waiting.tokens.device)
        ends = sorted({count - 1 for count in waiting.counts})
        said = self._behind(kv, waiting.tokens, layout, torch.tensor(ends, device=waiting.tokens.device))
        kv.keep(waiting.counts)
        rows = torch.arange(kv.rows, device=waiting.tokens.device)
        at = torch.tensor([ends.index(count - 1) for count in waiting.counts], device=rows.device)
        waiting.clear()
        confidence = None if said.confidence is None else said.confidence[rows, at][:, None]
        return Seen(said.logits[rows, at][:, None], confidence)

    def _behind(self, kv: State, tokens: Tensor, layout: Layout, columns: Tensor | int = 0) -> Seen:
        kv.plan(layout)
        return self._run(
            tokens,
            lambda window, dtype: additive_mask(layout, dtype, window),
            layout.positions,
            columns,
            kv,
        )


def _certain(said: Seen) -> Seen:
    return Seen(said.logits, None if said.confidence is None else said.confidence.sigmoid())


def _as_json(settings: PreTrainedConfig) -> dict[str, Any]:
    """A configuration as a file has it, without what says nothing about the model."""
    words = json.loads(settings.to_json_string(use_diff=False))
    for name in ("_name_or_path", "architectures", "dtype", "id2label", "label2id", "transformers_version"):
        words.pop(name, None)
    return words


def _smaller(options: StandaloneOptions, target: Any) -> PreTrainedConfig:
    """The target's configuration with fewer layers and, where asked for, narrower ones."""
    if options.start == "target" and (options.hidden_size or options.intermediate_size):
        raise UserError(
            "draft.start=target copies the target's layers, whose sizes draft.hidden_size and draft.intermediate_size "
            "would change. Leave them out, or use draft.start=random."
        )
    settings = copy.deepcopy(target.config)
    before, layers = settings.num_hidden_layers, min(options.layers, settings.num_hidden_layers)
    settings.num_hidden_layers = layers
    for name, value in vars(settings).items():  # what there is one of a layer (layer_types and the like)
        if isinstance(value, list) and len(value) == before and name != "architectures":
            setattr(settings, name, value[:layers])
    share = (options.hidden_size or settings.hidden_size) / settings.hidden_size
    if share != 1:
        heads = max(1, round(settings.num_attention_heads * share))
        groups = max(1, round((getattr(settings, "num_key_value_heads", None) or heads) * share))
        if getattr(settings, "head_dim", None) is None:
            settings.head_dim = settings.hidden_size // settings.num_attention_heads
        settings.num_attention_heads = heads
        settings.num_key_value_heads = max(count for count in range(1, groups + 1) if heads % count == 0)
        settings.hidden_size = options.hidden_size
    if options.intermediate_size or share != 1:
        settings.intermediate_size = options.intermediate_size or max(
            1, round(settings.intermediate_size * share)
        )
    return settings


def _picked(logits: Tensor, at: tuple[Tensor, Tensor], rows: slice) -> Tensor:
    return logits[at[0][rows], at[1][rows]]


def _given(options: StandaloneOptions, target: Any) -> PreTrainedModel:
    """The causal language model that `start` names, if it has the target's tokens."""
    try:
        model = AutoModelForCausalLM.from_pretrained(options.start, dtype=torch.float32)
        words = None if target.tokenizer is None else AutoTokenizer.from_pretrained(options.start).get_vocab()
    except (OSError, ValueError) as error:
        raise UserError(
            f"draft.start={options.start}: {' '.join(str(error).split())[:200]} It is target, random, or the folder or "
            "hub name of a causal language model."
        ) from error
    size = model.get_output_embeddings().weight.shape[0]
    if size != target.vocab_size or (words is not None and words != target.tokenizer.get_vocab()):
        raise UserError(
            f"draft.start={options.start} ({size} tokens) has another tokenizer than the target ({target.vocab_size} "
            "tokens), which a draft must share."
        )
    return model


@torch.no_grad()
def _copy_first_layers(model: Any, target: Any) -> None:
    """The target's embedding, first layers, final norm and head."""
    pairs: list[tuple[nn.Module, nn.Module]] = [
        (model.get_decoder(), target.decoder),
        (model.get_output_embeddings(), target.model.get_output_embeddings()),
    ]
    for mine, theirs in pairs:
        wanted, there = mine.state_dict(), theirs.state_dict()
        if missing := sorted(wanted.keys() - there.keys()):
            raise UserError(
                f"draft.start=target: a shorter {type(model).__name__} has tensors that the target lacks "
                f"({', '.join(missing[:3])}). Use draft.start=random."
            )
        mine.load_state_dict({name: there[name] for name in wanted})
