"""What a training step of any draft computes and keeps in memory, learnt from three narrow copies of it.

All widths of target and draft (hidden, feed-forward, heads, vocabularies, ranks) scaled by w, the lengths left as they
are: the multiplications of a step and its bytes at every moment of it are then a + b·w + c·w² (masks and indices;
activations, and attention between positions; whatever has a weight's shape). Three runs with w of a few hundredths give
a, b and c, and w = 1 the draft itself, for every family and without its weights.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode

from deepspec.drafts.contract import DraftBatch, DraftContext, TrainableDraft
from deepspec.drafts.layers import draft_shape
from deepspec.drafts.registry import new_draft
from deepspec.target import Target
from deepspec.training.optimiser import loss_coefficients

WIDTHS = ("vocab_size", "intermediate_size", "hidden_size", "rank")  # options that are widths
NARROW = (2, 4, 8)  # sizes of an attention head in the copies


@dataclass(frozen=True)
class TrainingWork:
    """Of one packed row, forward and backward. operations: two a multiplication and addition. bytes: most that is
    alive at once beside weights, gradients and features."""

    operations: float
    bytes: float


def training_work(
    options: Any,
    outline: Target,
    loss: dict[str, float],
    row: dict[str, Tensor],
    low: torch.dtype | None,
    checkpointing: bool = False,
) -> TrainingWork:
    """row: columns [1, T] of a packed row. low: autocast's dtype, None = float32 throughout. checkpointing: of gradients;
    what is then computed a second time is counted."""
    shape = draft_shape(outline.config)
    if options.algorithm == "standalone" and options.start not in ("target", "random"):
        whole = _narrow(outline, shape, 1.0, shape["head_dim"], 1)  # a model of its own, and small
        operations, alive = _measured(options, whole, loss, row, low, checkpointing)
        return TrainingWork(operations, max(alive))
    widths, counted, kept = [], [], []
    for head in NARROW:
        widths.append(head / shape["head_dim"])
        target = _narrow(outline, shape, widths[-1], head, outline.num_layers)
        options_there = _narrow_options(options, widths[-1])
        operations, alive = _measured(options_there, target, loss, row, low, checkpointing)
        counted.append(operations)
        kept.append(alive)
    if len({len(one) for one in kept}) > 1:
        kept = [[max(one)] for one in kept]
    # parabolas through three points each, at w = 1; the bytes' peak may come at another moment than in a narrow copy
    return TrainingWork(
        float(np.polyfit(widths, counted, 2).sum()), float(np.polyfit(widths, kept, 2).sum(0).max())
    )


def _narrow(outline: Target, shape: dict[str, Any], w: float, head: int, layers: int) -> Target:
    """A random Llama of the target's lengths and of w times its widths: a draft sees only its edges and its sizes."""
    config = transformers.LlamaConfig(
        vocab_size=_scaled(outline.vocab_size, w),
        hidden_size=_scaled(shape["hidden_size"], w),
        intermediate_size=_scaled(shape["intermediate_size"], w),
        num_hidden_layers=layers,
        num_attention_heads=shape["num_attention_heads"],
        num_key_value_heads=shape["num_key_value_heads"],
        head_dim=head,
        max_position_embeddings=shape["max_position_embeddings"],
        tie_word_embeddings=bool(getattr(outline.config, "tie_word_embeddings", False)),
    )
    return Target(transformers.LlamaForCausalLM(config), None, "narrow")


def _narrow_options(options: Any, w: float) -> Any:
    changed: dict[str, Any] = {}
    for one in fields(options):
        value = getattr(options, one.name)
        if one.name in WIDTHS and value:
            changed[one.name] = _scaled(value, w)
    if getattr(options, "mask_token", None) is not None:
        changed["mask_token"] = None  # a row beyond the narrow vocabulary
    if getattr(options, "init_from", None) is not None:
        changed["init_from"] = None
    return replace(options, **changed)


def _scaled(width: int, w: float) -> int:
    return max(2, round(width * w))


def _measured(
    options: Any,
    target: Target,
    loss: dict[str, float],
    row: dict[str, Tensor],
    low: torch.dtype | None,
    checkpointing: bool = False,
) -> tuple[float, list[int]]:
    """Operations of a forward and backward, on the CPU, and the bytes that are alive after each step of it."""
    size = getattr(options, "vocab_size", None)
    with _own_random():
        draft = new_draft(options, target, None if size is None else torch.arange(size)).train()
        batch = _batch(
            draft,
            target,
            {
                name: column % target.vocab_size if name == "tokens" else column
                for name, column in row.items()
            },
            low,
        )
    if checkpointing:
        draft.gradient_checkpointing_enable({"use_reentrant": False})
    coefficients = loss_coefficients(draft, loss)
    batch.loss_parts = tuple(coefficients)
    casts = torch.autocast("cpu", low) if low is not None else nullcontext()
    for one in draft.parameters():  # gradients are counted elsewhere: they must be there before
        one.grad = torch.zeros_like(one) if one.requires_grad else None
    with _own_random(), FlopCounterMode(display=False) as flops, Alive() as alive:
        with casts:
            said = draft(batch)
        sums = said.sums or {}
        total: Any = sum(coefficients[name] * sums[name] for name in coefficients)
        del said
        total.backward()
    return float(flops.get_total_flops()), alive.trace


def _batch(
    draft: TrainableDraft, target: Target, row: dict[str, Tensor], low: torch.dtype | None
) -> DraftBatch:
    dtype = low or torch.float32
    length, hidden = row["tokens"].shape[1], target.hidden_size
    target.model.to(dtype)
    target.dtype = dtype
    return DraftBatch(
        context=DraftContext(target),
        tokens=row["tokens"],
        loss_mask=row["loss_mask"].bool(),
        documents=row["documents"],
        positions=row["positions"],
        features=torch.randn(1, length, len(draft.capture_layers) * hidden, dtype=dtype),
        last_hidden=torch.randn(1, length, hidden, dtype=dtype),
        seeds=torch.zeros(1, dtype=torch.int64),
    )


class Alive(TorchDispatchMode):
    """Bytes of the storages that operations inside have made and nobody has let go of yet; `most`: their peak; trace:
    after each operation, its own temporaries not among them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.trace: list[int] = []
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {id(one.untyped_storage()) for one in tree_iter((args, kwargs)) if isinstance(one, Tensor)}
        for one in tree_iter(made):
            if isinstance(one, Tensor):
                self._count(one.untyped_storage(), given)
        self.trace.append(self.now)
        return made

    def _count(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        key = storage._cdata
        if key in self._known or id(storage) in given:
            return
        size = storage.nbytes()
        self._known.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


@contextmanager
def _own_random() -> Iterator[None]:
    """Leaves torch's random stream as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
