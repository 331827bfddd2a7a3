"""What single pieces of work take on a described machine; `measure` finds the same on this one."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from deepspec.config.schema import Config, HardwareConfig
from deepspec.decoding.cost import Curve
from deepspec.planning.sizes import DraftSizes, TargetSizes
from deepspec.planning.training_work import TrainingWork
from deepspec.simulation.costs import roofline

DISK = 1e9  # bytes a second that a described machine writes and checks
MOVED = (
    28  # bytes a parameter that AdamW reads and writes: weight, gradient and two moments in, all but one out
)


@dataclass(frozen=True)
class Decoding:
    """Seconds. prefill: of a prompt of so many tokens, alone. step: of a plain step of so many rows. round: of a
    speculative round of one row that drafts so many tokens. hazard: chance that a token ends an answer."""

    prefill: Callable[[int], float]
    step: Callable[[int], float]
    round: Callable[[int], float]
    hazard: float = 0.0


@dataclass(frozen=True)
class Training:
    """Seconds on one device. capture: of one packed row by the target. step: of an optimiser step of so many
    micro-batches. forward: of a micro-batch without gradients. save: of a checkpoint."""

    capture: float
    step: Callable[[int], float]
    forward: float
    save: float


@dataclass(frozen=True)
class Speeds:
    """load: seconds until a stage has its target ready."""

    load: float
    decoding: Decoding
    training: Training | None


def described(
    hardware: HardwareConfig,
    config: Config,
    target: TargetSizes,
    draft: DraftSizes | None,
    work: TrainingWork | None,
    *,
    context: int,
    hazard: float,
    checkpoint: int,
) -> Speeds:
    """By the roofline of one device: prepare and evaluate use one, capture and training one a process.

    context: tokens of a text that is being decoded. checkpoint: bytes of one.
    """
    one = replace(hardware, devices=1)
    active = target.parameters.active
    per_weight = target.weights / target.parameters.total

    def forward(rows: int, tokens: int) -> float:
        """A mixture's rows meet more experts together than each alone."""
        weights = min(target.weights, active * per_weight * rows * tokens)
        return roofline(one, 2 * active * rows * tokens, weights + rows * context * target.cached)

    def drafted(k: int) -> float:
        if draft is None:
            return 0.0
        passes, size = (1, k) if draft.one_pass else (k, 1)
        read = (draft.parameters + target.parameters.head) * target.itemsize
        return passes * roofline(one, 2 * draft.parameters * size, read)

    decoding = Decoding(
        prefill=lambda tokens: forward(1, tokens),
        step=lambda rows: forward(rows, 1),
        round=lambda k: drafted(k) + forward(1, k + 1),
        hazard=hazard,
    )
    if draft is None or work is None:
        return Speeds(0.0, decoding, None)
    length, rows = config.data.max_length, config.train.batch_size
    operations = (
        2 * (active - target.parameters.head) * length + 2 * length**2 * target.attended * target.layers
    )
    micro = roofline(one, rows * work.operations, 12 * draft.parameters + 2 * rows * work.bytes)
    update = roofline(one, 0, MOVED * draft.trained)
    training = Training(
        capture=roofline(one, operations, active * per_weight),
        step=lambda count: (
            update + (micro if count == 1 else count * micro * 4 / 3)
        ),  # a forward more for the weights
        forward=micro / 3,
        save=checkpoint / DISK,
    )
    return Speeds(0.0, decoding, training)


def line_of(points: dict[int, float]) -> Callable[[int], float]:
    """Straight lines through what was measured."""
    at = sorted(points)
    curve = Curve([1], at, [[points[x] for x in at]])
    return lambda x: curve.at(1, x)
