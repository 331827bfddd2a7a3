"""The frozen target: one wrapper around any Hugging Face causal LM, with no class per family."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import FloatTensor, Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import MoeModelOutputWithPast

from deepspec.errors import UserError
from deepspec.target.attention import use_grouped_sdpa
from deepspec.target.compiled import Compiled
from deepspec.target.layout import Layout, additive_mask, document_mask
from deepspec.target.state import State

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass
class TargetOutput:
    """logits: [B, n, V] where asked. features: [B, T, layers·H] of the asked layers' outputs, or None."""

    logits: Tensor
    features: Tensor | None


@dataclass
class Captured:
    """features: [B, T, layers·H], the asked layers' outputs side by side. last_hidden: [B, T, H], before the
    final norm."""

    features: Tensor
    last_hidden: Tensor


class Target:
    """A causal LM whose weights never change.

    `layer i` is the output of decoder layer i, 0-based. Everything the family does around its decoder layers
    (embedding scale, soft-caps, logit scale, final norm) is the model's own code.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        name: str,
        identity: dict[str, Any] | None = None,
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        use_grouped_sdpa(model)
        self.tokenizer: Any = tokenizer
        self.name = name
        self.config = model.config.get_text_config(decoder=True)
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.max_positions: int = getattr(self.config, "max_position_embeddings", None) or 1 << 20
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.get_output_embeddings().weight.device
        self.decoder: nn.Module = model.get_decoder()
        self.layers = decoder_layers(self.decoder, self.config.num_hidden_layers)
        self.num_layers = len(self.layers)
        self._cache_argument = cache_argument(model)
        self._windows = attention_windows(self.config)
        self._final_norm, self._embedding_scale = _learn_edges(self)
        self._identity = identity or {}
        self._abilities: dict[str, str] | None = None
        self._compiled: dict[tuple[int, ...], Compiled] = {}
        self._gathered: tuple[Tensor, Tensor, Tensor | None] | None = None

    def identity(self) -> dict[str, Any]:
        """What decides this target's behaviour, for manifests and fingerprints (see `load_target`)."""
        return dict(self._identity)

    @property
    def eos(self) -> tuple[int, ...]:
        """Every token id that ends an answer."""
        ids: set[int] = set()
        for source in (getattr(self.model, "generation_config", None), self.config, self.tokenizer):
            found = getattr(source, "eos_token_id", None)
            ids.update(found if isinstance(found, list | tuple) else [] if found is None else [found])
        return tuple(sorted(ids))

    def new_state(self, max_rows: int, capacity: int, rows: int = 1) -> State:
        """An empty state for up to `max_rows` texts of up to `capacity` tokens (grown if need be)."""
        return State(self.num_layers, max_rows, capacity, rows)

    def check_layers(self, layers: Sequence[int]) -> None:
        """UserError unless every id names a decoder layer of this target."""
        for layer in layers:
            if not 0 <= layer < self.num_layers:
                raise UserError(
                    f"Layer {layer} does not exist: {self.name} has {self.num_layers} decoder layers, "
                    f"0 to {self.num_layers - 1}. Change draft.capture_layers."
                )

    def require(self, *abilities: str) -> None:
        """UserError if this target's state cannot do what is asked (chain, tree, ragged, features); tried once."""
        from deepspec.target.probe import probe

        if self._abilities is None:
            self._abilities = probe(self)
        for ability in abilities:
            if reason := self._abilities[ability]:
                raise UserError(
                    f"{self.name} ({type(self.model).__name__}) cannot be used for {ability}: {reason}."
                )

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        state: State,
        layout: Layout,
        logits_at: int | Tensor = 0,
        layers: Sequence[int] = (),
        compiled: bool = False,
    ) -> TargetOutput:
        """Run `tokens` [B, T] behind the state's cached ones and write them into it (`state.keep` decides
        afterwards which stay).

        logits_at: 0 = everywhere, n = the last n tokens, a tensor = those token indices. layers: whose outputs
        to capture. compiled: by `torch.compile`, anew for every shape; for layouts of a `least_width`.
        """
        state.plan(layout)
        precision = torch.float64 if layout.wide else self.dtype
        inputs = {
            "input_ids": tokens,
            "attention_mask": self._masks(lambda window: additive_mask(layout, precision, window)),
            "position_ids": layout.positions,
            "use_cache": True,
            "logits_to_keep": logits_at,
            self._cache_argument: state,
        }
        if compiled:
            logits, outputs = self._compiled_step(tuple(layers))(**inputs)
        else:
            with self._capturing(layers) as captured:
                logits = self._step(**inputs)
            outputs = [captured[layer].to(self.device) for layer in layers]
        return TargetOutput(logits, torch.cat(outputs, -1) if layers else None)

    def _step(self, **inputs: Any) -> Tensor:
        return self.model(**inputs).logits

    def _compiled_step(self, layers: tuple[int, ...]) -> Compiled:
        if layers not in self._compiled:
            self._compiled[layers] = Compiled(self._step, [self.layers[layer] for layer in layers])
        return self._compiled[layers]

    @torch.no_grad()
    def capture(
        self, tokens: Tensor, positions: Tensor, documents: Tensor, layers: Sequence[int]
    ) -> Captured:
        """Features of packed rows [B, T]; documents of a row never see each other. No logits are computed."""
        last = self.num_layers - 1
        with self._capturing([*layers, last]) as captured:
            self.decoder(
                input_ids=tokens,
                attention_mask=self._masks(lambda w: document_mask(documents, positions, self.dtype, w)),
                position_ids=positions,
                use_cache=False,
            )
        hidden = captured[last].to(self.device)
        features = (
            torch.cat([captured[layer].to(self.device) for layer in layers], -1)
            if layers
            else hidden[..., :0]
        )
        return Captured(features, hidden)

    def embed(self, tokens: Tensor) -> Tensor:
        """[...] int64 → [..., H]: what enters the first decoder layer, the family's embedding scale included."""
        rows = self.model.get_input_embeddings()(tokens).to(self.device)
        if self._embedding_scale is None:
            return rows
        return rows * torch.tensor(self._embedding_scale, dtype=rows.dtype, device=rows.device)

    def norm(self, hidden: Tensor) -> Tensor:
        """The final norm on [..., H]."""
        return hidden if self._final_norm is None else self._final_norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Last hidden *before* the final norm, [n, H] → logits [n, V]."""
        return self.head(self.norm(hidden))

    def head(self, normed: Tensor, rows: Tensor | None = None) -> Tensor:
        """Normed last hidden [n, H] → logits [n, V], by the model's own `ForCausalLM.forward` with the decoder
        replaced by `normed`: soft-caps and scales sit inline there in many families.

        rows: [Vd] token ids; only their logits are computed, [n, Vd].
        """
        normed = normed.to(self.dtype)[None]
        output = _DecoderOutput(last_hidden_state=cast(FloatTensor, normed))
        linear = self.model.get_output_embeddings()
        with ExitStack() as stack:
            stack.enter_context(_instead(self.decoder, lambda *_, **__: output))
            if rows is not None:
                weight, bias = self._head_rows(linear, rows)
                stack.enter_context(
                    _instead(linear, lambda hidden: nn.functional.linear(hidden, weight, bias))
                )
            return self.model(inputs_embeds=normed, use_cache=False).logits[0]

    def _head_rows(self, linear: Any, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """The head's weight and bias at `rows`, gathered once: a draft asks for the same ones all the time."""
        if self._gathered is None or self._gathered[0] is not rows:
            bias = getattr(linear, "bias", None)
            with torch.inference_mode(False), torch.no_grad():  # decoding may gather what training then uses
                self._gathered = (rows, linear.weight[rows], None if bias is None else bias[rows])
        return self._gathered[1], self._gathered[2]

    def _masks(self, build: Callable[[int | None], Tensor]) -> Tensor | dict[str, Tensor]:
        return family_masks(self._windows, build)

    @contextmanager
    def _capturing(self, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        captured: dict[int, Tensor] = {}

        def keep(layer: int) -> Callable[[nn.Module, Any, Any], None]:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                captured[layer] = output[0] if isinstance(output, tuple) else output

            return hook

        handles = [self.layers[layer].register_forward_hook(keep(layer)) for layer in dict.fromkeys(layers)]
        try:
            yield captured
        finally:
            for handle in handles:
                handle.remove()


@contextmanager
def _instead(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Another forward for a while; where accelerate has put one of its own over the class's, that comes back."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


def cache_argument(model: PreTrainedModel) -> str:
    """What the family's forward calls its cache (5.24 renames it)."""
    names = "past_key_values", "cache"
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in names if name in parameters), names[0])


def family_masks(
    windows: dict[str, int | None], build: Callable[[int | None], Tensor]
) -> Tensor | dict[str, Tensor]:
    """The family's mask form: one tensor, or one per attention type where the types differ.

    windows: as from `attention_windows`; build: a window → its mask.
    """
    masks = {kind: build(window) for kind, window in windows.items()}
    return masks if len(masks) > 1 else next(iter(masks.values()))


def decoder_layers(decoder: nn.Module, count: int) -> nn.ModuleList:
    """The decoder's own list of its `count` layers; `UserError` for a family without one."""
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UserError(
        f"{type(decoder).__name__} has no list of {count} decoder layers: this family is not supported."
    )


def attention_windows(config: Any) -> dict[str, int | None]:
    """Sliding window by attention type (None = full). More than one entry: the family takes a dict of masks."""
    kinds = set(getattr(config, "layer_types", None) or [])
    window = getattr(config, "sliding_window", None)
    if unknown := kinds - {SLIDING, FULL}:
        raise UserError(
            f"This target has layers of type {', '.join(sorted(unknown))}, whose state cannot be rolled back here. "
            "Use a target with full or sliding-window attention."
        )
    if kinds == {SLIDING, FULL}:
        return {FULL: None, SLIDING: window}
    if kinds == {FULL}:
        return {FULL: None}
    return {FULL: window}  # one mask for all layers, limited where the config has a window


class _DecoderOutput(MoeModelOutputWithPast):
    """A decoder's output in which all is None but the hidden state, whatever a family asks of it."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Stop(Exception):
    """Ends the edge-learning forward once the last thing of interest has been seen."""


@torch.no_grad()
def _learn_edges(target: Target) -> tuple[nn.Module | None, float | None]:
    """Find the final norm and the embedding scale by watching one forward.

    The final norm is the decoder's child that receives the last layer's output. The scale is the constant
    between the embedding rows and what enters layer 0 (None: 1, or no constant, e.g. learned positions).
    """
    seen: dict[str, Any] = {}

    def last_output(module: nn.Module, inputs: Any, output: Any) -> None:
        seen["last"] = output[0] if isinstance(output, tuple) else output

    def first_input(module: nn.Module, inputs: Any, kwargs: Any) -> None:
        seen["first"] = inputs[0] if inputs else kwargs["hidden_states"]

    def child(module: nn.Module, inputs: Any) -> None:
        if "last" in seen and inputs and inputs[0] is seen["last"]:
            seen["norm"] = module
            raise _Stop

    handles = [
        target.layers[-1].register_forward_hook(last_output),
        target.layers[0].register_forward_pre_hook(first_input, with_kwargs=True),
        *(c.register_forward_pre_hook(child) for c in target.decoder.children() if c is not target.layers),
    ]
    tokens = torch.arange(8, device=target.device)[None] % target.vocab_size
    try:
        target.decoder(input_ids=tokens, use_cache=False)
    except _Stop:
        pass
    finally:
        for handle in handles:
            handle.remove()
    rows = target.model.get_input_embeddings()(tokens)
    return seen.get("norm"), _constant_ratio(seen["first"], rows)


def _constant_ratio(scaled: Tensor, rows: Tensor) -> float | None:
    index = rows.abs().float().argmax()
    ratio = (scaled.flatten()[index].double() / rows.flatten()[index].double()).item()
    again = rows * torch.tensor(ratio, dtype=rows.dtype, device=rows.device)
    close = torch.allclose(
        again.float(), scaled.to(again.device).float(), rtol=1e-2 if rows.dtype == torch.bfloat16 else 1e-5
    )
    return ratio if close and ratio != 1.0 else None
