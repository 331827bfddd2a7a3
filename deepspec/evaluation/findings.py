"""What an evaluation finds beside speed: acceptance in detail, memory, calibration. Parts of the result
file; every one can be absent."""

from dataclasses import dataclass

from deepspec.evaluation.metric import Metric


@dataclass
class Group:
    """Prompts or rounds that have something in common. kind: "task", "turn", "prompt length" or "context"."""

    kind: str
    name: str
    prompts: int
    rounds: int
    tau: Metric
    speedup: Metric | None = None  # against plain decoding by the same loop; null for parts of answers


@dataclass
class TokenGroup:
    """Acceptance of drafted tokens by what the target's token there was."""

    name: str
    tried: int
    acceptance: Metric  # given that the positions before were accepted


@dataclass
class Detail:
    """Acceptance in detail, all of it from the rounds.

    hit_rate: of the tokens that were verified, the share that was accepted. rejection_rate: of the rounds that
    verified something, the share in which the target rejected a token. accepted_histogram: rounds that accepted
    0, 1, … drafted tokens. frequency: by how often the target's token occurs in the plain answers, in tenths of
    all their tokens, the most frequent first. vocabulary: inside and outside a reduced draft vocabulary.
    """

    drafted: int
    verified: int
    accepted: int
    hit_rate: Metric
    rejection_rate: Metric
    accepted_histogram: list[int]
    groups: list[Group]
    frequency: list[TokenGroup]
    vocabulary: list[TokenGroup]


@dataclass
class Resources:
    """Memory and start. Peaks are those of one more decoding of the longest prompt each way, not timed."""

    kind: str  # "device" or "process": whose memory
    peak_plain: int | None  # bytes, the draft's weights subtracted
    peak_speculative: int | None
    draft_weights: int  # bytes
    load_draft_seconds: float | None  # cold start of the draft


@dataclass
class Reliability:
    """Calibration of the confidence at one position. bins: [mean confidence, share accepted, rounds] each."""

    position: int
    rounds: int
    accepted: float
    ece: float
    brier: float
    auroc: float | None  # null where all or none were accepted
    bins: list[list[float]]


@dataclass
class Calibration:
    """Confidences against what was accepted, before and after sequential temperature scaling.

    `before` and `after` are of the rounds of the prompts the temperatures were *not* fitted on.
    """

    key: str  # sampling settings and rule the temperatures belong to
    temperatures: list[float]
    fitted_rounds: int
    reported_rounds: int
    before: list[Reliability]
    after: list[Reliability]
