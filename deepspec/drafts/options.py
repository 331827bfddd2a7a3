"""The drafts' hyper-parameters, in a file without torch: a configuration is read without waiting for it.

A field's comment is its documentation, as in `deepspec.config.schema`; a class's docstring is that of `draft=NAME`.
"""

from dataclasses import dataclass, field, fields
from typing import Any

from deepspec.errors import UserError

STEP_WEIGHTS = ("decay", "survival", "dpace")


def one_of(default: str, *others: str) -> Any:
    """A field that takes one of these words."""
    return field(default=default, metadata={"choices": (default, *others)})


def check_choices(options: Any) -> None:
    """`UserError` for a word that is none of its field's choices."""
    for one in fields(options):
        value, choices = getattr(options, one.name), one.metadata.get("choices")
        if choices and value not in choices:
            words = f"{', '.join(choices[:-1])} or {choices[-1]}"
            raise UserError(f"draft.{one.name} is {value!r}; it must be {words}.")


@dataclass
class RecursiveOptions:
    """Options of every family that runs its own output back in; the rest and other defaults are the family's."""

    algorithm: str  # set by draft=NAME
    layers: int = 1  # decoder layers
    ttt_steps: int = 5  # draft steps unrolled in training
    # part of the training over which the steps grow from 1 to ttt_steps; 0 = all from the start
    ttt_ramp: float = 0.0
    # how a step's loss is weighed: decay by step_decay, or survival, dpace: by the acceptance reached so far
    step_weights: str = one_of(*STEP_WEIGHTS)
    step_decay: float = 0.8  # with step_weights=decay: weight of step s is step_decay^s
    # tokens that the draft can propose, the commonest; null = all of the target's
    vocab_size: int | None = None
    intermediate_size: int | None = None  # width of the feed-forward layer; null = the target's
    confidence: bool = False  # a head that says how likely the next token is to be accepted
    init_from: str | None = None  # folder of a saved draft of the same shape to start from


@dataclass
class Eagle3Options(RecursiveOptions):
    """EAGLE-3 and 3.1: a layer over fused features of several target layers, trained on its own outputs."""

    algorithm: str = "eagle3"
    vocab_size: int | None = 8192
    capture_layers: list[int] | None = None  # target layers read, from 0; null = low, middle and high
    norm_layers: bool = False  # EAGLE-3.1: normalise each captured layer
    normalised_feedback: bool = False  # EAGLE-3.1: what is fed back is normalised
    head: str = one_of("trained", "frozen")  # trained: its own, from the target's rows; frozen: the target's
    # how the first layer starts; target: as the target's last one, where it fits
    start: str = one_of("random", "target")

    def layers_copied(self, count: int) -> int:
        """How many of the target's `count` layers, from the first, a fresh draft looks at to start from."""
        return count if self.start == "target" else 1


@dataclass
class EagleOptions(RecursiveOptions):
    """EAGLE: a layer that predicts the target's next hidden state."""

    algorithm: str = "eagle"
    ttt_steps: int = 1  # draft steps unrolled in training; 1 = as published
    noise: float = 0.1  # a of the feature noise U(−a, a)·512/T in training


@dataclass
class MtpOptions(RecursiveOptions):
    """DeepSeek-V3's multi-token prediction, used recursively."""

    algorithm: str = "mtp"
    ttt_steps: int = 3
    # the hidden state is read before or after the final norm; auto: as held-out text is told better by the start
    norm_input: str = one_of("before", "after", "auto")
    # how it starts; target: from the module of this kind that the target's own checkpoint has, as far as it fits
    start: str = one_of("random", "target")


@dataclass
class PEagleOptions(Eagle3Options):
    """P-EAGLE: EAGLE-3's layer, all depths in one pass."""

    algorithm: str = "peagle"
    ttt_steps: int = 7  # depths trained
    keep_rows: float = 0.7  # r: depth d of a training row is kept with probability r^d
    mask_token: int | None = None  # an embedding row that no text uses; null = a vector the draft learns

    def check(self) -> None:
        """`UserError` for EAGLE-3.1's feedback."""
        if self.normalised_feedback:
            raise UserError("draft.normalised_feedback has no meaning in P-EAGLE, which feeds nothing back.")


@dataclass
class BlockOptions:
    """Options of the families that fill a block of slots in one pass."""

    algorithm: str  # set by draft=NAME
    layers: int = 5  # decoder layers
    block_tokens: int = 7  # K: tokens of a block; fixed at training, fewer can be drafted
    # how a step's loss is weighed: decay by gamma, or survival, dpace: by the acceptance reached so far
    step_weights: str = one_of(*STEP_WEIGHTS)
    gamma: float = 4.0  # with step_weights=decay: weight of step k is exp(−(k−1)/gamma)
    anchors: int | None = 128  # blocks trained in a packed row; null = one at every supervised token
    # tokens that the draft can propose, the commonest; null = all of the target's
    vocab_size: int | None = 8192
    capture_layers: list[int] | None = None  # target layers read, from 0; null = low, middle and high
    intermediate_size: int | None = None  # width of the feed-forward layers; null = the target's
    head: str = one_of(
        "frozen", "trained"
    )  # frozen: the target's own; trained: its own, from the target's rows
    head_norms: bool = True  # normalise each attention head's queries and keys
    mask_token: int | None = None  # an embedding row that no text uses; null = a vector the draft learns
    confidence: bool = False  # a head that says how likely the next token is to be accepted
    init_from: str | None = None  # folder of a saved draft of the same shape to start from


@dataclass
class DFlashOptions(BlockOptions):
    """DFlash: a block of slots filled in one pass, each layer looking at the target's features."""

    algorithm: str = "dflash"


@dataclass
class DSparkOptions(BlockOptions):
    """DSpark: DFlash with a head that sees the token before, and a confidence."""

    algorithm: str = "dspark"
    # the head that looks at the token before, or (rnn) at all tokens before
    sequential: str = one_of("markov", "rnn")
    rank: int = 256  # width of the sequential head; 0 = none
    confidence: bool = True


@dataclass
class MedusaOptions:
    """Medusa: one head a position on the target's last hidden state."""

    algorithm: str = "medusa"  # set by draft=NAME
    heads: int = 5  # K: heads, one a drafted token
    # how a head's loss is weighed: decay by step_decay, or survival, dpace: by the acceptance reached so far
    step_weights: str = one_of(*STEP_WEIGHTS)
    step_decay: float = 0.8  # with step_weights=decay: weight of head k is step_decay^(k−1)
    # tokens that the draft can propose, the commonest; null = all of the target's
    vocab_size: int | None = 8192
    head: str = one_of(
        "trained", "frozen"
    )  # trained: each its own, from the target's rows; frozen: the target's
    confidence: bool = False  # a head that says how likely the next token is to be accepted
    init_from: str | None = None  # folder of a saved draft of the same shape to start from


@dataclass
class StandaloneOptions:
    """A small language model: the target's first layers, a fresh one, or one you name."""

    algorithm: str = "standalone"  # set by draft=NAME
    # target = its first layers; random; or a folder or hub name of a causal language model
    start: str = "target"
    layers: int = 4  # decoder layers; not with a model of its own
    hidden_size: int | None = None  # of a random one; null = the target's
    intermediate_size: int | None = None  # of a random one; null = in proportion to hidden_size
    # tokens that the draft can propose, the commonest; null = all of the target's
    vocab_size: int | None = None
    confidence: bool = False  # a head that says how likely the next token is to be accepted
    init_from: str | None = None  # folder of a saved draft of the same shape to start from

    def layers_copied(self, count: int) -> int:
        """How many of the target's `count` layers, from the first, a fresh draft starts from."""
        return min(self.layers, count) if self.start == "target" else 1


@dataclass
class NgramOptions:
    """Prompt lookup: the text's own words again; nothing to train."""

    algorithm: str = "ngram"  # set by draft=NAME
    min_n: int = 2  # shortest suffix that counts
    max_n: int = 4  # longest suffix that is looked up

    def check(self) -> None:
        """`UserError` for lengths in the wrong order."""
        if not 1 <= self.min_n <= self.max_n:
            raise UserError(
                f"draft.min_n is {self.min_n} and draft.max_n {self.max_n}; 1 ≤ min_n ≤ max_n is needed."
            )
