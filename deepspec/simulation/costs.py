"""Where a simulation's seconds come from: this machine, measured, or a described one, by its rates."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from deepspec.config.schema import HardwareConfig
from deepspec.decoding.cost import CostTable, Curve
from deepspec.errors import UserError
from deepspec.evaluation.result import EvaluationResult
from deepspec.simulation.engine import Costs

BYTES = 2  # of a parameter or a cached number on a described machine: bfloat16
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Sizes:
    """What a described machine has to move and to multiply. cached: bytes of keys and values that the target keeps
    of one token. passes: of the draft for k tokens, k or 1."""

    target_parameters: int
    draft_parameters: int
    cached: int
    passes: Callable[[int], int]


def check_described(hardware: HardwareConfig) -> None:
    """`UserError` for a machine that is described too little to say what a step takes."""
    if hardware.name != "here" and not (hardware.flops and hardware.bandwidth):
        raise UserError(
            f"hardware={hardware.name} lacks hardware.flops and hardware.bandwidth (operations and bytes a second)."
        )


def roofline(hardware: HardwareConfig, operations: float, moved: float) -> float:
    """Seconds of a step: what its multiplications or its memory traffic (bytes) take, whichever is longer, and a fixed
    time to start."""
    arithmetic = operations / (hardware.flops * hardware.efficiency * hardware.devices)
    return max(arithmetic, moved / (hardware.bandwidth * hardware.devices)) + hardware.launch_seconds


def described(hardware: HardwareConfig, sizes: Sizes, k: int, context: int) -> Costs:
    """By `roofline`. Attention's own multiplications, small beside the weights' at these contexts, are left out."""

    def forward(parameters: int, rows: int, tokens: int, cached: float) -> float:
        return roofline(
            hardware, 2 * parameters * rows * tokens, BYTES * parameters + rows * context * cached
        )

    def verify(rows: int, tokens: int) -> float:
        return forward(sizes.target_parameters, rows, tokens, sizes.cached)

    def draft(rows: int, tokens: int) -> float:
        passes = sizes.passes(tokens)
        return passes * forward(sizes.draft_parameters, rows, tokens // passes, 0)

    key = {"hardware": hardware.name, "context": context}
    widths, drafted = list(range(1, k + 2)), list(range(1, k + 1))
    table = CostTable(
        key,
        Curve(list(ROWS), widths, [[verify(rows, n) for n in widths] for rows in ROWS]),
        Curve(list(ROWS), drafted, [[draft(rows, n) for n in drafted] for rows in ROWS]),
    )
    return Costs(table, lambda prompt: forward(sizes.target_parameters, 1, prompt, 0), 0.0)


def measured(table: CostTable, result: EvaluationResult) -> Costs:
    """This machine: steps by its cost table, prefills and what the engine does beside both as the result recorded."""
    decodings = [(record.prompt_tokens, one) for record in result.records for one in record.speculative]
    rest = [r.rest_seconds for _, one in decodings for r in one.rounds]
    prefill = line([prompt for prompt, _ in decodings], [one.prefill_seconds for _, one in decodings])
    return Costs(table, prefill, statistics.median(rest))


def with_round_trip(costs: Costs, seconds: float) -> Costs:
    """The draft behind a network: every round that drafts waits for it once."""
    draft = costs.table.draft
    slower = Curve(draft.rows, draft.tokens, [[one + seconds for one in row] for row in draft.seconds])
    table = CostTable({**costs.table.key, "round_trip": seconds}, costs.table.verify, slower)
    return Costs(table, costs.prefill, costs.overhead)


def line(lengths: Sequence[int], seconds: Sequence[float]) -> Callable[[int], float]:
    """The least-squares line through (tokens, seconds), at least 0 and not falling; flat where all are as long."""
    if not lengths:
        raise UserError("There is no recorded prefill to learn a prompt's time from.")
    mean = statistics.fmean(seconds)
    if len(set(lengths)) < 2:
        return lambda tokens: mean
    slope, start = np.polyfit(lengths, seconds, 1)
    if slope < 0:
        return lambda tokens: mean
    if start < 0:
        slope, start = mean / statistics.fmean(lengths), 0.0
    return lambda tokens: float(start + slope * tokens)
