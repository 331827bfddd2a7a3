"""From pieces of work to stages: how often each is done, by the code that does it."""

from dataclasses import dataclass, replace

import torch

from deepspec.config.schema import Config
from deepspec.evaluation.choosing import BASELINE_DTYPES, BASELINE_PROMPTS, BASELINE_TOKENS, THREAD_TOKENS
from deepspec.evaluation.ideal import LEAST_SAMPLES, MOST_PROMPTS, lengths
from deepspec.evaluation.run import WARMUP_TOKENS
from deepspec.evaluation.threads import ROUNDS, candidates
from deepspec.planning.speeds import Decoding, Speeds, Training
from deepspec.planning.workload import Batch, Workload, mean_length
from deepspec.training.launch import with_accumulation
from deepspec.training.loop import new_plan
from deepspec.training.memory import GIB, HELD_OUT_SHARE


@dataclass(frozen=True)
class TrainingTime:
    """step: seconds of an optimiser step without the target. captured: rows the target runs on each process."""

    steps: int
    step: float
    captured: float
    seconds: float


def batch_seconds(batch: Batch, speed: Decoding) -> float:
    """Prompts enter one by one, then all rows advance together, and those whose answer is done leave."""
    seconds, steps = sum(speed.prefill(prompt) for prompt in batch.prompts), 1
    left = sorted(batch.answers)
    while left:
        seconds += max(0, left[0] - steps) * speed.step(len(left))
        steps, left = max(steps, left[0]), left[1:]
    return seconds


def regeneration(workload: Workload, speed: Decoding) -> float:
    """The batches of training prompts stand for as many more; a sample's last, smaller ones with them."""
    return workload.scale * sum(batch_seconds(batch, speed) for batch in workload.batches)


def accumulated(config: Config, processes: int) -> Config:
    """With `train.global_batch` turned into an accumulation."""
    return replace(config, train=with_accumulation(config.train, processes))


def training(
    config: Config, workload: Workload, speed: Training, processes: int, *, online: bool, row_bytes: int
) -> TrainingTime:
    """config: with its accumulation. row_bytes: of a row's features in memory."""
    train, rows = config.train, workload.counts["rows"]
    plan = new_plan(train, rows, processes)
    step = speed.step(train.accumulation)
    seen = min(plan.stream, plan.steps * plan.rows_a_step) / processes
    evaluations = -(-plan.steps // train.eval_every) if train.eval_rows else 0
    held_out = min(train.eval_rows, workload.counts["held_out_rows"]) / processes
    captured = 0.0
    if online:
        memory = train.keep_features_gib * GIB
        first = min(seen, rows / processes)
        kept = min(1.0, memory * (1 - HELD_OUT_SHARE) / max(1.0, first * row_bytes)) / processes
        held = min(1.0, memory * HELD_OUT_SHARE / max(1.0, held_out * row_bytes))
        captured = first + (seen - first) * (1 - kept) + held_out * (1 + (evaluations - 1) * (1 - held))
    saves = -(-plan.steps // train.checkpoint_every) + evaluations / 3  # a best draft has no moments
    batches = -(-held_out // train.batch_size)
    seconds = (
        plan.steps * step
        + captured * speed.capture
        + evaluations * batches * speed.forward
        + saves * speed.save
    )
    return TrainingTime(plan.steps, step, captured, seconds)


def evaluation(
    config: Config, speeds: Speeds, prompt: int, prompts: int, acceptance: float, on_cpu: bool
) -> float:
    """Seconds. prompt: tokens of a typical one; prompts: that are measured. The fastest plain decoding is taken to be
    our own loop in the target's format, which then is not measured twice."""
    settings, decode, speed = config.evaluate, config.decode, speeds.decoding
    ks = settings.sweep or [decode.k]

    def plain(limit: int) -> float:
        return speed.prefill(prompt) + (mean_length(speed.hazard, limit) - 1) * speed.step(1)

    def speculative(limit: int, k: int) -> float:
        tau = sum(acceptance**position for position in range(k + 1))
        return speed.prefill(prompt) + (mean_length(speed.hazard, limit) - 1) / tau * speed.round(k)

    def both(limit: int, k: int) -> float:
        return plain(limit) + speculative(limit, k)

    k = min(ks, key=lambda one: speculative(decode.max_new_tokens, one))  # which the sweep would find
    longest, warm = decode.max_new_tokens, WARMUP_TOKENS if settings.warmup_prompts else 0
    seconds = prompts * settings.repeats * both(longest, k) + both(longest, k)  # and once for memory
    seconds += settings.warmup_prompts * both(warm, k) if warm else 0.0
    if settings.sweep:
        tried = [plain(longest), *(speculative(longest, one) for one in ks)]
        seconds += settings.sweep_prompts * sum(tried)
        seconds += (plain(warm) + sum(speculative(warm, one) for one in ks)) if warm else 0.0
    if settings.baselines:
        ways = 2 * len(BASELINE_DTYPES)
        count = min(settings.sweep_prompts if settings.sweep else prompts, BASELINE_PROMPTS)
        seconds += ways * (count * plain(BASELINE_TOKENS) + (plain(warm) if warm else 0.0)) + speeds.load
    if on_cpu and settings.threads == 0:
        numbers = candidates(torch.get_num_threads())
        seconds += (1 + ROUNDS) * len(numbers) * plain(THREAD_TOKENS) if len(numbers) > 1 else 0.0
    return seconds + _bare_steps(prompts, k, speed, prompt) + _batches(config, speed, prompt, prompts)


def _bare_steps(prompts: int, k: int, speed: Decoding, prompt: int) -> float:
    """`StepClock`: every width once uncounted and `samples` times, after some of the prompts."""
    places = len(range(0, prompts, max(1, -(-prompts // MOST_PROMPTS))))
    samples = max(1, -(-LEAST_SAMPLES // max(1, places)))
    each = sum(speed.round(n) for n in lengths(k)) + speed.step(1)
    return places * ((1 + samples) * each + 2 * speed.prefill(2 * prompt))


def _batches(config: Config, speed: Decoding, prompt: int, prompts: int) -> float:
    """Both ways at every batch size, speculation taken to be as fast as plain decoding."""
    tokens = mean_length(speed.hazard, config.decode.max_new_tokens)
    seconds = 0.0
    for size in config.evaluate.batch_sizes:
        rows = min(size, prompts)
        a_batch = rows * speed.prefill(prompt) + tokens * speed.step(rows)
        seconds += 2 * a_batch * (1 + config.evaluate.repeats * prompts / rows)
    return seconds
