"""What a draft is, to the trainer (`TrainableDraft`) and to the decoding engine (`Drafter`).

Shapes: B rows (requests or packed rows), T positions, N drafted tokens, K steps, H target hidden size,
V target vocabulary, Vd draft vocabulary, F = captured layers × H.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.utils import ModelOutput


class TargetModel(Protocol):
    """The part of the target that a draft may use; `deepspec.target.Target` is one."""

    hidden_size: int
    vocab_size: int

    def embed(self, tokens: Tensor) -> Tensor:
        """[...] int64 → [..., H], with the family's own embedding scale."""

    def norm(self, hidden: Tensor) -> Tensor:
        """The final norm, on [..., H]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Last hidden before the final norm, [n, H] → the model's logits [n, V], soft-caps and scales included."""

    def head(self, normed: Tensor, rows: Tensor | None = None) -> Tensor:
        """The same from an already normed hidden, [n, H] → [n, V]; with rows [Vd], of those tokens only."""


@dataclass
class DraftContext:
    """What every draft reaches outside itself. A plain object: never a submodule of the draft, or FSDP shards
    the target and checkpoints copy it."""

    target: TargetModel


@dataclass
class Beginning:
    """One request after its prefill.

    tokens: [1, P+1] the prompt and the pending token. features: [1, P, F] captured at the prompt's positions.
    capacity: longest text (prompt + answer + drafted) the request may reach, for buffers.
    max_rows: rows that will ever be joined, for buffers.
    """

    context: DraftContext
    tokens: Tensor
    features: Tensor
    capacity: int
    max_rows: int = 1


@dataclass
class Committed:
    """What one round added, padded on the right: row b has `counts[b]` ≥ 1 new tokens, M at most.

    tokens: [B, M] the accepted drafted tokens, then the target's own. features: [B, M, F] captured at the
    position *before* each of them (the old pending token, then the accepted ones), so that features[b, j] and
    tokens[b, j] are EAGLE's row pair. values: the same tokens without the padding, as the host knows them: a draft
    that reads them here, or `counts`, does not wait for the device.
    """

    tokens: Tensor
    features: Tensor
    values: list[list[int]]

    @property
    def counts(self) -> list[int]:
        return [len(row) for row in self.values]


@dataclass(frozen=True)
class StaticTree:
    """A tree of a shape fixed before any draw. parents: a node's parent, −1 = child of the pending token, in
    topological order; a node's children are tried in the order in which they stand here."""

    parents: tuple[int, ...]


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2 (Li et al. 2024b): a tree that follows the draft's probabilities; its children are deterministic.

    Each of `depth` levels keeps the `top_k` nodes of the highest product of draft probabilities and gives each
    `top_k` children; of all nodes ever made the `total_tokens` best are proposed, ancestors before descendants.
    """

    depth: int
    top_k: int
    total_tokens: int


class Control(Protocol):
    """Given by the engine to `propose`: how much to draft, and how a token is drawn."""

    max_tokens: int  # K this round, ≥ 1: the longest path
    tree: (
        StaticTree | DynamicTree | None
    )  # how to branch; None = a chain. A draft that cannot branch ignores it

    def draw(self, logits: Tensor, parent: int, vocab: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Draw each row's next drafted token.

        logits: [B, Vd] of the draft, raw; the request's processors are applied here, in float32, on the path
        that ends in node `parent` (−1: the pending token; for a chain, the previous draw's index). vocab: [Vd]
        target id of each draft id, None = the target's own. Returns target-vocabulary tokens [B] and q [B, Vd]
        (None when every row is greedy: the draw is deterministic).
        """

    def draw_children(
        self, logits: Tensor, parent: int, count: int, vocab: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Draw `count` different children of node `parent` (−1: the pending token), in the order they are tried.

        logits: [B, Vd], raw. Returns target-vocabulary tokens [B, count] and q [B, Vd], the distribution they
        were drawn from *without replacement*, or None when they are deterministic: the `count` most probable.
        """

    def go_on(self, confidence: Tensor) -> Tensor:
        """Asked before each draw: [B] probability that the *next* token will be accepted given that those
        before it are → bool [B], draw it. Where False the row's proposal ends (`Proposal.length`); the draft
        stops when no row goes on.

        The probability may come from the hidden state that gives the token's distribution and from the tokens
        before it, never from the token itself: the output would no longer be the target's.
        """


@dataclass
class Proposal:
    """Drafted tokens, always a tree (a chain is a path).

    tokens: [B, N] target ids in topological order. parents: [B, N], −1 = child of the pending token, or None
    for a chain (node i's parent is i−1). q: [B, M, Vd] the distributions the tokens were drawn from, or None
    where the draw was deterministic. q_row: [B, N] the row of q each node was drawn from (siblings share it);
    None = row i for node i. vocab: [Vd] target id of each draft id; None = the target's own vocabulary.
    confidence: [B, N] accepted given its parent was, or None. length: nodes that count, a Python int a row.
    """

    tokens: Tensor
    length: list[int]
    parents: Tensor | None = None
    q: Tensor | None = None
    q_row: Tensor | None = None
    vocab: Tensor | None = None
    confidence: Tensor | None = None


class Drafter(Protocol):
    """What the engine sees. State belongs to the drafter; the engine only hands it back."""

    needs_features: bool
    capture_layers: Sequence[int]  # of the target, read where `needs_features`

    def begin(self, beginning: Beginning) -> Any:
        """State of one new request."""

    def join(self, state: Any, new: Any) -> Any:
        """Add one request's fresh state as the last row (`state` None: the first)."""

    def propose(self, state: Any, control: Control) -> Proposal:
        """Draft up to `control.max_tokens` a row."""

    def update(self, state: Any, committed: Committed) -> None:
        """Take in what the round committed; drafted state past it is forgotten."""

    def select(self, state: Any, rows: Sequence[int]) -> None:
        """Keep these rows (ascending); the others' requests have ended."""


@dataclass
class DraftBatch:
    """Packed training rows with the target's features.

    tokens [B, T] int64; loss_mask [B, T] bool, the assistant generated this token; documents [B, T] int64,
    which document of the row (−1: padding); positions [B, T] int64 within the document; features [B, T, F];
    last_hidden [B, T, H] *before* the final norm; steps: how many draft steps to unroll (None: the draft's
    own training number); loss_parts: names of the parts of the loss that are wanted (None: the draft's
    `default_loss`); seeds [B] int64, one a row and pass over the data, for whatever the draft draws.
    """

    context: DraftContext
    tokens: Tensor
    loss_mask: Tensor
    documents: Tensor
    positions: Tensor
    features: Tensor
    last_hidden: Tensor
    steps: int | None = None
    loss_parts: Sequence[str] | None = None
    seeds: Tensor | None = None


@dataclass
class DraftLoss(ModelOutput):
    """float32 sums and weights, never a mean: the training loop alone divides (over ranks and micro-batches).

    sums, weights: one scalar tensor per loss part; a part's loss is sum/weight. Per-position statistics, for
    step k = 1..K (index k−1) of a draft start at anchor a (the pending token is t_a; 0 ≤ a < T):
    valid [B, T, K] bool, that step is supervised; hits [B, T, K] bool, the draft's argmax is t_{a+k};
    match [B, T, K] bool, it is the teacher's argmax; overlap [B, T, K] float32, Σ_v min(p, q);
    q_text, p_text [B, T, K] float32, the probabilities of t_{a+k} under draft and target.
    """

    sums: dict[str, Tensor] | None = None
    weights: dict[str, Tensor] | None = None
    valid: Tensor | None = None
    hits: Tensor | None = None
    match: Tensor | None = None
    overlap: Tensor | None = None
    q_text: Tensor | None = None
    p_text: Tensor | None = None


class TrainableDraft(PreTrainedModel):
    """A draft with parameters: a `PreTrainedModel` that is also a `Drafter`.

    Training goes through `forward` only: DDP, FSDP and DeepSpeed act nowhere else.
    """

    needs_features = True
    supports_gradient_checkpointing = True
    gradient_checkpointing = False  # set on every module that has it by `gradient_checkpointing_enable`
    one_pass: ClassVar[bool] = False  # drafts all tokens of a chain in one forward; else one in each
    # How many positions before its anchor a draft reads features of, in training; None: all of its document.
    feature_reach: ClassVar[int | None] = None
    # Drafts of other families that this one may start from: model_type → prefixes of the tensors they lack.
    init_conversions: ClassVar[dict[str, tuple[str, ...]]] = {}
    # Settings that no option says: a fresh draft has its target's, or none, and one that starts from a saved draft
    # (`draft.init_from`) takes that draft's.
    inherited: ClassVar[tuple[str, ...]] = (
        *("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"),
        *("rope_parameters", "max_position_embeddings"),
    )

    @property
    @abstractmethod
    def default_loss(self) -> dict[str, float]:
        """Weight of each part of the loss that is computed when nothing else is asked for."""

    @property
    @abstractmethod
    def loss_parts(self) -> tuple[str, ...]:
        """Every part of the loss that can be asked for (`DraftBatch.loss_parts`)."""

    @property
    def capture_layers(self) -> list[int]:
        """Target layers whose outputs are the features, 0-based, ascending."""
        return list(self.config.capture_layers)

    def steps_at(self, progress: float) -> int | None:
        """How many draft steps to unroll (`DraftBatch.steps`) when so much of the training, 0 … 1, is done."""
        return None

    def computed(self, part: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """part(*inputs); with gradient checkpointing nothing inside is kept, and the backward pass computes it again.
        inputs: whatever it reads that may change in the meantime."""
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            return checkpoint(part, *inputs, use_reentrant=False)
        return part(*inputs)

    @abstractmethod
    def forward(self, batch: DraftBatch) -> DraftLoss:
        """Loss sums, weights and per-position statistics of one batch of packed rows."""

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Drafts initialise themselves in `__init__`; loading must not overwrite that."""
