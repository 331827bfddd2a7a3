"""The drafts' hyper-parameters, in a file without torch: a configuration is read without waiting for it."""

from dataclasses import dataclass

from deepspec.errors import UserError


@dataclass
class Eagle3Options:
    algorithm: str = "eagle3"
    layers: int = 1
    ttt_steps: int = 5  # draft steps unrolled in training
    step_decay: float = 0.8  # weight of step s is step_decay^s
    vocab_size: int | None = 8192  # draft vocabulary; null = the target's
    capture_layers: list[int] | None = None  # target layers read; null = low, middle and high
    intermediate_size: int | None = None  # null = the target's
    norm_layers: bool = False  # EAGLE-3.1
    normalised_feedback: bool = False  # EAGLE-3.1
    start: str = "random"  # or "target": the first layer starts from the target's last one, where it fits

    def check(self) -> None:
        """`UserError` for a word that is none of the choices."""
        if self.start not in ("random", "target"):
            raise UserError(f"draft.start is {self.start!r}; it must be random or target.")
