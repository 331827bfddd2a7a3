"""The result file: what was measured, under which conditions, and the numbers made from it.

`result.json` is this file's `EvaluationResult` written out; each field's comment is its documentation. All
times are seconds, all sizes tokens unless said otherwise. Every number of a summary can be recomputed from
`records` and `settings` (`deepspec.evaluation.summary.summarise_result`).
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deepspec.decoding.request import Round
from deepspec.errors import UserError
from deepspec.evaluation.findings import Acceptance, Batched, Calibration, Detail, Resources
from deepspec.evaluation.metric import Metric
from deepspec.evaluation.quality.findings import Quality
from deepspec.evaluation.tasks.item import Source
from deepspec.evaluation.typed_json import build, write_compact

SCHEMA_VERSION = 3
READABLE = (1, 2, 3)  # older ones are migrated (`migrate`)


@dataclass
class Decoding:
    """One decoding of one prompt.

    `tokens` is the answer, end token included. Its first token comes from the prefill and belongs to no
    round, so `decode_seconds` produced `len(tokens) − 1` tokens. Plain decoding's rounds (one a token) are
    not kept, only their sums.
    """

    tokens: list[int]
    text: str
    finish: str  # "eos" or "length"
    prefill_seconds: float  # TTFT
    decode_seconds: float
    draft_seconds: float | None = None  # sums over the rounds; null where the decoder does not tell
    verify_seconds: float | None = None
    rest_seconds: float | None = None
    rounds: list[Round] = field(default_factory=list)
    # answer tokens (0-based) outside a reduced draft vocabulary; null: not known
    outside: list[int] | None = None
    scores: dict[str, float] = field(default_factory=dict)  # of this answer: metrics, solved, repetition


@dataclass(frozen=True)
class Tie:
    """The first difference of two greedy outputs, and whether rounding explains it.

    The logits were recomputed by forwards of both shapes. `margin` is how far the lower of the two tokens
    lies below the top in either vector (top-1 − top-2 where they are the top two); `max_delta` is the largest
    difference between the two vectors. Proven iff margin ≤ 2·max_delta.
    """

    position: int  # in the answer, 0-based
    plain_token: int | None
    speculative_token: int | None
    margin: float | None
    max_delta: float | None
    proven: bool
    reason: str | None = None  # why it could not be proven


@dataclass
class PromptRecord:
    """One prompt, decoded `repeats` times every way."""

    id: str
    category: str
    prompt: str  # as a person wrote it, before the chat template
    prompt_tokens: int
    plain: list[Decoding]  # by the speculative engine's own loop, same weights and dtype
    speculative: list[Decoding]
    fastest: list[Decoding]  # by the fastest plain decoding; empty where that is `plain`
    equal: bool | None  # every speculative answer is plain's, token for token; null when sampled
    tie: Tie | None  # the first difference, where there is one
    turn: int = 1  # of a conversation whose earlier answers are plain decoding's
    references: list[str] = field(default_factory=list)  # texts that the answers are compared with


@dataclass
class Baseline:
    """One way of decoding plainly, timed on a few prompts."""

    decoder: str  # "deepspec" or "transformers generate"
    dtype: str
    tokens_per_second: Metric  # decode only
    chosen: bool  # the fastest: the headline's denominator
    note: str | None = None  # why it was not timed
    # of those prompts, greedy answers that are not the same loop's in this dtype; null: sampled, or not compared
    differing: int | None = None


@dataclass
class SweepPoint:
    """One K of the sweep, on `conditions.sweep_prompts` prompts."""

    k: int
    tau: Metric
    speedup: Metric  # against plain decoding by the same loop
    chosen: bool


@dataclass
class StepTimes:
    """Median times of the bare modules outside the engine, batch 1, timed in turns with the main run's prompts.

    Beyond 8 lengths, only some are timed and the others lie on straight lines between them.
    verify[n−1]: the target reads n tokens on top of `context` cached ones. draft[k−1]: the draft proposes k
    tokens and takes in a round's features.
    """

    context: int  # mean over the prompts
    verify: list[float]
    draft: list[float]
    repeats: int  # timings of each


@dataclass
class Noise:
    """How undisturbed the measured decodings were."""

    cpu_per_wall: (
        float | None
    )  # the decoding thread's CPU time / wall time; below 1 it waited, if only for its helpers
    cores_used: float | None  # the whole process' CPU time / wall time
    spread: float | None  # (p90 − p10) / median of plain seconds per token over the prompts
    noisy: bool
    words: str
    others: float | None = None  # cores that other processes kept at work meanwhile
    steal: float | None = None  # cores that a virtual machine's host withheld


@dataclass
class Machine:
    """Where it ran."""

    system: str
    cpu: str
    cores: int | None  # physical
    logical_cores: int | None
    threads: int  # torch's
    memory_gib: float
    device: str  # what the target ran on
    load_before: list[float]  # 1, 5 and 15 minute load averages
    load_after: list[float]
    versions: dict[str, str]


@dataclass
class ThreadSpeed:
    """Plain decoding of one prompt with so many of torch's threads."""

    threads: int
    tokens_per_second: float | None
    chosen: bool


@dataclass
class Conditions:
    """What a reader needs beside every number."""

    dtype: str
    attention: str
    k: int  # drafted tokens a round in the main run
    rule: str
    batch_size: int
    temperature: float
    max_new_tokens: int
    prompt_source: str  # "held-out prompts of the data" or the file's name
    sweep_prompts: int
    sweep_overlap: int  # how many of them are also in the main run
    excluded: dict[str, int]  # prompts left out, by reason
    repeats: int
    resamples: int  # of the bootstrap
    seed: int
    price_per_hour: float | None
    fastest_plain: str  # what `speedup` is against, in words
    machine: Machine
    noise: Noise
    processes: int = 1  # that shared the prompts; noise is the first one's
    threads: list[ThreadSpeed] = field(default_factory=list)  # that were tried first; [] = none
    resumed: int = 0  # prompts whose records an earlier, interrupted run had finished


@dataclass
class Latency:
    """Seconds over prompts (mean of a prompt's repeats), at the median, 90th, 95th and 99th percentile."""

    p50: Metric
    p90: Metric
    p95: Metric
    p99: Metric


@dataclass
class Speed:
    """One way of decoding: totals over prompts."""

    tokens_per_second: Metric  # decode only
    tokens_per_second_end_to_end: Metric  # prefill included
    ttft: Latency
    tpot: Latency  # decode seconds a token after the first
    end_to_end: Latency  # of the whole answer
    draft_seconds: Metric  # per decoded token
    verify_seconds: Metric  # per decoded token: the target's forward
    rest_seconds: Metric  # per decoded token: everything else
    cost_per_million: Metric  # output tokens, prefill included, in `price_per_hour`'s currency


@dataclass
class Equality:
    """Greedy outputs compared with plain decoding, by prompt. All zero when sampled."""

    compared: int
    equal: int
    proven_ties: int
    unproven: int


@dataclass
class Summary:
    """All numbers of one group of prompts."""

    prompts: int
    rounds: int
    round_tokens: int  # committed in rounds
    cut_rounds: int  # ended by an end token within; counted with what was kept
    tau: Metric  # round_tokens / rounds
    speedup: Metric  # decode only, against `conditions.fastest_plain`: the headline
    speedup_end_to_end: Metric  # the same with prefill
    speedup_same_loop: Metric  # decode only, against plain decoding by the same loop and dtype
    speedup_same_loop_end_to_end: Metric
    ideal_speedup: Metric  # by the bare modules' step times
    efficiency: Metric  # speedup_same_loop / ideal_speedup
    acceptance: list[Acceptance]
    committed_histogram: list[int]  # rounds that committed 1, 2, … K+1 tokens
    plain: Speed
    speculative: Speed
    fastest: Speed  # the fastest plain decoding; `plain` again where that is it
    equality: Equality


@dataclass
class EvaluationResult:
    """The whole result file."""

    schema_version: int
    name: str  # of the experiment
    command: str  # the exact command
    created: str  # UTC, ISO 8601
    fingerprint: str  # of draft, prompts and settings
    settings: dict[str, Any]  # the resolved configuration
    target: dict[str, Any]  # the target's identity: name, weights, tokenizer, sizes
    draft: dict[str, Any]  # algorithm, parameters, manifest
    conditions: Conditions
    baselines: list[Baseline]
    sweep: list[SweepPoint]
    step_times: StepTimes | None
    summary: Summary
    categories: dict[str, Summary]
    warnings: list[str]
    training: list[dict[str, Any]]  # the training's history (thinned), for the curves
    records: list[PromptRecord]
    sources: list[Source] = field(default_factory=list)  # of the prompts, where sets were asked for by name
    quality: Quality | None = None
    detail: Detail | None = None
    resources: Resources | None = None
    calibration: Calibration | None = None
    batches: list[Batched] = field(default_factory=list)  # several requests at once, where that was asked for


def save_result(result: EvaluationResult, path: Path) -> None:
    """Write the result file under a temporary name and rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_compact(path, asdict(result))


def check_records(result: EvaluationResult) -> None:
    """ValueError naming the first place where nothing was measured: every number of a result needs records."""
    if not result.records:
        raise ValueError("records is empty")
    if result.conditions.resamples < 1:
        raise ValueError(f"conditions.resamples is {result.conditions.resamples}")
    for number, record in enumerate(result.records):
        for way in ("plain", "speculative"):
            if not getattr(record, way):
                raise ValueError(f"records[{number}].{way} is empty")


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of a result")


def load_result(path: Path) -> EvaluationResult:
    """Read a result file; UserError names the file and what is wrong with it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist; `python -m deepspec.evaluate` writes it.") from error
    except (OSError, ValueError, RecursionError) as error:  # not UTF-8, not JSON, nested without end
        raise UserError(f"{path} is damaged or unreadable ({error}); evaluate again.") from error
    if not isinstance(content, dict) or "schema_version" not in content:
        raise UserError(f"{path} is not a result file of deepspec.evaluate: it has no `schema_version`.")
    version = content["schema_version"]
    if version not in READABLE:
        raise UserError(
            f"{path} has schema version {version!r}, this deepspec reads versions {READABLE[0]} to "
            f"{SCHEMA_VERSION}: "
            "read it with the deepspec that wrote it, or evaluate again."
        )
    try:
        if version < SCHEMA_VERSION:
            from deepspec.evaluation.migrate import migrated

            return migrated(content)
        result = build(EvaluationResult, content)
        check_records(result)
        return result
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}; evaluate again.") from error
