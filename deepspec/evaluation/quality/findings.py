"""What is found about answers; a part of the result file."""

from dataclasses import dataclass, field

from deepspec.evaluation.metric import Metric
from deepspec.evaluation.quality.two_sample import TwoSample


@dataclass
class QualityRow:
    """One metric over one set of prompts: the mean over prompts (of the mean over an answer's repeats)."""

    metric: str
    task: str  # "all prompts", or a category
    plain: Metric
    speculative: Metric
    difference: Metric  # speculative − plain, prompt by prompt
    corpus_plain: float | None = None  # the metric of all answers at once
    corpus_speculative: float | None = None


@dataclass
class Quality:
    """What the answers are worth, both ways."""

    rows: list[QualityRow]
    identical: int  # prompts whose answers are the same text both ways
    compared: int
    timeouts: int = 0  # programs stopped for running too long; they count as failed
    isolation: str | None = None  # how programs were confined; null: none were run
    two_sample: TwoSample | None = None  # for sampled answers
    notes: list[str] = field(default_factory=list)
