"""The drafts' hyper-parameters, in a file without torch: a configuration is read without waiting for it."""

from collections.abc import Sequence
from dataclasses import dataclass

from deepspec.errors import UserError

STEP_WEIGHTS = ("decay", "survival", "dpace")


def check_choice(key: str, value: str, choices: Sequence[str]) -> None:
    """`UserError` for a word that is none of the choices."""
    if value not in choices:
        raise UserError(f"draft.{key} is {value!r}; it must be {', '.join(choices[:-1])} or {choices[-1]}.")


@dataclass
class RecursiveOptions:
    """Options of every family that runs its own output back in; the rest and other defaults are the family's."""

    algorithm: str
    layers: int = 1
    ttt_steps: int = 5  # draft steps unrolled in training
    ttt_ramp: float = (
        0.0  # part of the training over which they grow from 1 to ttt_steps; 0 = all from the start
    )
    step_weights: str = "decay"  # of the loss; or survival, dpace: by the acceptance reached so far
    step_decay: float = 0.8  # with decay: weight of step s is step_decay^s
    vocab_size: int | None = None  # draft vocabulary; null = the target's
    intermediate_size: int | None = None  # null = the target's
    confidence: bool = False  # a head that says how likely the next token is to be accepted
    init_from: str | None = None  # folder of a saved draft of the same shape to start from

    def check(self) -> None:
        check_choice("step_weights", self.step_weights, STEP_WEIGHTS)
        if not 0 <= self.ttt_ramp <= 1:
            raise UserError(f"draft.ttt_ramp is {self.ttt_ramp}; it is a part of the training, from 0 to 1.")


@dataclass
class Eagle3Options(RecursiveOptions):
    algorithm: str = "eagle3"
    vocab_size: int | None = 8192  # draft vocabulary; null = the target's
    capture_layers: list[int] | None = None  # target layers read; null = low, middle and high
    norm_layers: bool = False  # EAGLE-3.1
    normalised_feedback: bool = False  # EAGLE-3.1
    head: str = "trained"  # its own, from the target's rows; or "frozen": the target's
    start: str = "random"  # or "target": the first layer starts from the target's last one, where it fits

    def check(self) -> None:
        super().check()
        check_choice("head", self.head, ("trained", "frozen"))
        check_choice("start", self.start, ("random", "target"))


@dataclass
class EagleOptions(RecursiveOptions):
    algorithm: str = "eagle"
    ttt_steps: int = 1  # draft steps unrolled in training; 1 = as published
    noise: float = 0.1  # a of the feature noise U(−a, a)·512/T in training


@dataclass
class MtpOptions(RecursiveOptions):
    algorithm: str = "mtp"
    ttt_steps: int = 3
    norm_input: str = "before"  # the hidden state is read before the target's final norm, or after it

    def check(self) -> None:
        super().check()
        check_choice("norm_input", self.norm_input, ("before", "after"))


@dataclass
class PEagleOptions(Eagle3Options):
    algorithm: str = "peagle"
    ttt_steps: int = 7  # depths trained
    keep_rows: float = 0.7  # r: depth d of a training row is kept with probability r^d
    mask_token: int | None = None  # an embedding row that no text uses; null = a vector the draft learns

    def check(self) -> None:
        super().check()
        if self.normalised_feedback:
            raise UserError("draft.normalised_feedback has no meaning in P-EAGLE, which feeds nothing back.")


@dataclass
class BlockOptions:
    """Options of the families that fill a block of slots in one pass."""

    algorithm: str
    layers: int = 5
    block_tokens: int = 7  # K: tokens of a block; fixed at training, fewer can be drafted
    step_weights: str = "decay"  # of the loss; or survival, dpace: by the acceptance reached so far
    gamma: float = 4.0  # with decay: weight of step k is exp(−(k−1)/gamma)
    anchors: int | None = 128  # blocks trained in a packed row; null = one at every supervised token
    vocab_size: int | None = 8192  # draft vocabulary; null = the target's
    capture_layers: list[int] | None = None  # target layers read; null = low, middle and high
    intermediate_size: int | None = None  # null = the target's
    head: str = "frozen"  # the target's own; or "trained": the draft's, from the target's rows
    head_norms: bool = True  # normalise each attention head's queries and keys
    mask_token: int | None = None  # an embedding row that no text uses; null = a vector the draft learns
    confidence: bool = False  # a head that says how likely the next token is to be accepted
    init_from: str | None = None  # folder of a saved draft of the same shape to start from

    def check(self) -> None:
        check_choice("step_weights", self.step_weights, STEP_WEIGHTS)
        check_choice("head", self.head, ("frozen", "trained"))


@dataclass
class DFlashOptions(BlockOptions):
    algorithm: str = "dflash"


@dataclass
class DSparkOptions(BlockOptions):
    algorithm: str = "dspark"
    sequential: str = "markov"  # the head that looks at the token before; or "rnn": at all tokens before
    rank: int = 256  # width of that head; 0 = none
    confidence: bool = True

    def check(self) -> None:
        super().check()
        check_choice("sequential", self.sequential, ("markov", "rnn"))


@dataclass
class MedusaOptions:
    algorithm: str = "medusa"
    heads: int = 5  # K
    step_weights: str = "decay"  # of the loss; or survival, dpace: by the acceptance reached so far
    step_decay: float = 0.8  # with decay: weight of head k is step_decay^(k−1)
    vocab_size: int | None = 8192  # draft vocabulary; null = the target's
    head: str = "trained"  # each its own, from the target's rows; or "frozen": the target's, for all
    confidence: bool = False  # a head that says how likely the next token is to be accepted
    init_from: str | None = None  # folder of a saved draft of the same shape to start from

    def check(self) -> None:
        check_choice("step_weights", self.step_weights, STEP_WEIGHTS)
        check_choice("head", self.head, ("trained", "frozen"))


@dataclass
class StandaloneOptions:
    algorithm: str = "standalone"
    start: str = "target"  # its first layers; random; or a folder or hub name of a causal language model
    layers: int = 4  # not with a model of its own
    hidden_size: int | None = None  # of a random one; null = the target's
    intermediate_size: int | None = None  # of a random one; null = in proportion to hidden_size
    vocab_size: int | None = None  # draft vocabulary; null = the target's
    confidence: bool = False  # a head that says how likely the next token is to be accepted
    init_from: str | None = None  # folder of a saved draft of the same shape to start from


@dataclass
class NgramOptions:
    algorithm: str = "ngram"
    min_n: int = 2  # shortest suffix that counts
    max_n: int = 4  # longest suffix that is looked up

    def check(self) -> None:
        """`UserError` for lengths in the wrong order."""
        if not 1 <= self.min_n <= self.max_n:
            raise UserError(
                f"draft.min_n is {self.min_n} and draft.max_n {self.max_n}; 1 ≤ min_n ≤ max_n is needed."
            )
