"""What single pieces of work take on this machine: the real ones, each a few times, in some seconds."""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from deepspec.config.schema import Config, Parallel
from deepspec.decoding import Engine, Request
from deepspec.decoding.request import Result, Sampling
from deepspec.drafts.contract import Drafter, TrainableDraft
from deepspec.drafts.registry import new_draft, untrained_draft
from deepspec.planning.speeds import Decoding, Training, line_of
from deepspec.simulation.costs import line
from deepspec.target import Target
from deepspec.training.batches import Plan, Rows, windows
from deepspec.training.checkpoint import Checkpoints, Counters
from deepspec.training.launch import new_accelerator, precision_of, processes
from deepspec.training.optimiser import Micro, Stepper, loss_coefficients, new_optimiser
from deepspec.training.parallel import wrap
from deepspec.training.sources import Online, draft_batch

TOKENS = 24  # decoded of each prompt
ROUNDS = 10  # tokens decoded with a draft
REPEATS = 3  # of a training step, after one that is not counted


@dataclass
class Stopwatch:
    """Seconds of calls on a device."""

    device: torch.device

    def __call__(self, call: Callable[[], object]) -> float:
        self._wait()
        start = time.perf_counter()
        call()
        self._wait()
        return time.perf_counter() - start

    def median(self, call: Callable[[], object], repeats: int = REPEATS) -> float:
        """After once uncounted."""
        self(call)
        return statistics.median(self(call) for _ in range(repeats))

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def fresh_draft(config: Config, target: Target, target_ids: torch.Tensor | None) -> Drafter:
    """An untrained draft as decoding would have it; its speed is a trained one's."""
    ready = untrained_draft(config.draft)
    if ready is not None:
        return ready
    with torch.random.fork_rng(devices=[]):
        module: nn.Module = new_draft(config.draft, target, target_ids)
    return cast(Drafter, module.to(target.device, target.dtype).eval())


def decoding(
    target: Target, draft: Drafter, config: Config, prompts: Sequence[list[int]], ks: Sequence[int]
) -> Decoding:
    """prompts: as many as are answered together; ks: drafted tokens a round."""
    sampling = Sampling(temperature=config.data.temperature, top_p=config.data.top_p)

    def run(engine: Engine, texts: Sequence[list[int]], tokens: int) -> list[Result]:
        return engine.generate(
            [Request(text, tokens, sampling, seed=i, eos=target.eos) for i, text in enumerate(texts)]
        )

    plain = Engine(target)
    run(plain, prompts[:1], 4)
    alone = run(plain, prompts[:2], TOKENS)
    seen, steps = list(alone), {1: _round(alone)}
    if len(prompts) > 1 and config.data.answers.value != "given":
        together = run(Engine(target, max_batch_size=len(prompts)), prompts, TOKENS)
        seen += together
        steps[len(prompts)] = _round(together)
    rounds = {
        k: _round(run(Engine(target, draft, k=k), prompts[:1], ROUNDS + k))
        for k in sorted({min(ks), max(ks)})
    }
    lengths = [len(text) for text in (*prompts[:2], *(prompts if len(seen) > 2 else ()))]
    ended = sum(one.finish == "eos" for one in seen)
    return Decoding(
        prefill=line(lengths, [one.prefill_seconds for one in seen]),
        step=line_of(steps),
        round=line_of(rounds),
        hazard=ended / max(1, sum(len(one.tokens) for one in seen)),
    )


def _round(results: Sequence[Result]) -> float:
    """The median round's seconds; of answers that ended at once, what they took."""
    rounds = [r for one in results for r in one.rounds]
    if rounds:
        return statistics.median(r.draft_seconds + r.verify_seconds + r.rest_seconds for r in rounds)
    return statistics.median(one.decode_seconds / max(1, len(one.tokens) - 1) for one in results)


def training(target: Target, config: Config, rows: Rows, target_ids: torch.Tensor | None) -> Training:
    """One optimiser step of the configured size, with what goes before and after it."""
    train = replace(config.train, parallel=Parallel.single, global_batch=None)
    stopwatch = Stopwatch(target.device)
    with processes(config.target.device, Parallel.single) as joined:
        accelerator = new_accelerator(joined, train, lambda: precision_of(target.dtype))
        with torch.random.fork_rng(devices=[]):
            draft = new_draft(config.draft, target, target_ids)
        draft.to(accelerator.device).train()
        model, optimiser = wrap(draft, lambda: new_optimiser(draft, train), accelerator)
        coefficients = loss_coefficients(draft, train.loss)
        stepper = Stepper(model, optimiser, coefficients, train.clip, accelerator)
        source = Online(target, draft.capture_layers)
        (batch,) = next(windows(rows, Plan(train.batch_size, train.batch_size), 0, train.seed))
        (alone,) = next(windows(rows, Plan(1, 1), 0, train.seed))
        capture = stopwatch.median(lambda: source.captured([alone]), 2)
        batch.captured = source.captured([batch])[0]

        def micro(steps: int | None = None) -> Micro:
            made = draft_batch(batch, source, steps, tuple(coefficients))
            return Micro(made, batch.token_count, batch.counted, batch.ids)

        def take(count: int) -> float:
            window = [micro() for _ in range(count)]
            return stopwatch.median(lambda: stepper.take(window, lambda loss, one: None))

        forward = stopwatch.median(lambda: _without_gradients(model, micro(train.eval_steps)), 1)
        one = take(1)
        two = take(2) if train.accumulation > 1 or config.train.global_batch else one
        save = stopwatch(lambda: _save(draft, optimiser, accelerator))
    return Training(
        capture, lambda n: one if n == 1 else two + (n - 2) * max(two - one - forward, one), forward, save
    )


@torch.no_grad()
def _without_gradients(model: nn.Module, micro: Micro) -> None:
    model(micro.batch)


def _save(draft: TrainableDraft, optimiser: Any, accelerator: Any) -> None:
    with tempfile.TemporaryDirectory(prefix="deepspec-") as folder:
        Checkpoints(Path(folder), {}, 1, accelerator, "", lambda line: None).save(
            draft, optimiser, Counters()
        )
