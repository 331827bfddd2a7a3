"""The drafts' hyper-parameters, in a file without torch: a configuration is read without waiting for it."""

from collections.abc import Sequence
from dataclasses import dataclass

from deepspec.errors import UserError


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
    step_weights: str = "decay"  # of the loss; or survival, dpace: by the acceptance reached so far
    step_decay: float = 0.8  # with decay: weight of step s is step_decay^s
    vocab_size: int | None = None  # draft vocabulary; null = the target's
    intermediate_size: int | None = None  # null = the target's
    confidence: bool = False  # a head that says how likely the next token is to be accepted
    init_from: str | None = None  # folder of a saved draft of the same shape to start from

    def check(self) -> None:
        check_choice("step_weights", self.step_weights, ("decay", "survival", "dpace"))


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
