"""A measured number, with its uncertainty or the reason for having none."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One number with its 95% interval, or an explicit null with the reason."""

    value: float | None
    low: float | None  # end of the bootstrap interval over prompts, widened for few (`statistics`)
    high: float | None
    prompts: int  # how many prompts contribute
    reason: str | None = None  # why the value, or the interval, is null
