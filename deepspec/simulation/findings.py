"""What a simulation found, as it is written to `simulation.json`."""

from dataclasses import dataclass, field
from typing import Any

from deepspec.simulation.load import Point


@dataclass
class Checked:
    """The real engine beside its simulation, on the same prompts in the same order, all there from the start."""

    policy: str
    rows: int
    prompts: int
    real_seconds: float
    simulated_seconds: float

    @property
    def error(self) -> float:
        """Simulated over real, less 1."""
        return self.simulated_seconds / self.real_seconds - 1


@dataclass
class Network:
    """One answer length. seconds and the network's share of them, by way."""

    tokens: int
    seconds: dict[str, float]
    shares: dict[str, float]


@dataclass
class Findings:
    """costs: where the seconds come from, in words. largest_timed: rows; larger batches' costs are extrapolated.
    notes: what a reader must know. network: empty unless an API was described."""

    name: str
    command: str
    recorded: str  # the result file
    hardware: str
    costs: dict[str, Any]
    k: int
    recorded_requests: int
    recorded_rounds: int
    points: list[Point]
    largest_timed: int | None = None
    checked: list[Checked] = field(default_factory=list)
    network: list[Network] = field(default_factory=list)
    network_words: str = ""
    notes: list[str] = field(default_factory=list)
