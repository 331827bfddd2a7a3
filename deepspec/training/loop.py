"""The training loop: read it from `train` downwards."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from deepspec.config.schema import TrainConfig
from deepspec.drafts.contract import DraftLoss, TrainableDraft
from deepspec.errors import UserError
from deepspec.training.batches import (
    CapturingTarget,
    Plan,
    RowBatch,
    Rows,
    check_rows,
    draft_batch,
    windows,
)
from deepspec.training.checkpoint import Checkpoints, Counters
from deepspec.training.held_out import HeldOut, evaluate_held_out
from deepspec.training.history import History
from deepspec.training.interrupt import Interrupt
from deepspec.training.launch import check_gradients_agree
from deepspec.training.memory import FeatureMemory, split_budget
from deepspec.training.meters import Meter
from deepspec.training.optimiser import (
    Micro,
    Stepper,
    StepResult,
    learning_rate,
    loss_coefficients,
    new_optimiser,
)
from deepspec.training.progress import Progress
from deepspec.training.trackers import NoTracker, RunTracker, scalars

NOT_FINITE_LIMIT = 10


@dataclass
class Run:
    """What stays the same during a run.

    recipe: all that decides the result, compared when resuming. command: runs this stage again, for
    messages. temperature: at which the target wrote the held-out answers (0: greedily).
    """

    target: CapturingTarget
    config: TrainConfig
    accelerator: Accelerator
    out: Path
    tracker: RunTracker = field(default_factory=NoTracker)
    recipe: dict[str, Any] = field(default_factory=dict)
    command: str = "python -m deepspec.train"
    temperature: float = 0.0
    on_progress: Callable[[dict[str, Any]], None] | None = None


def train(draft: TrainableDraft, rows: Rows, held_out_rows: Rows, run: Run) -> Counters:
    """Train `draft` in place and return the final counters; every process calls this.

    Writes `checkpoints/` and `history.jsonl` below `run.out` and resumes from them. Ctrl-C or SIGTERM saves
    and raises `SystemExit` (130, 143). Errors for people: rows without supervision, a checkpoint of another
    recipe, a loss that stays not finite.
    """
    config, accelerator = run.config, run.accelerator
    check_rows(rows, "The training data")
    plan = new_plan(config, len(rows), accelerator.num_processes)
    coefficients = loss_coefficients(draft, config.loss)
    torch.manual_seed(config.seed + accelerator.process_index)
    draft.to(accelerator.device).train()
    model, optimiser = accelerator.prepare(draft, new_optimiser(draft, config))
    checkpoints = _checkpoints(run)
    counters = _start(checkpoints, draft, optimiser, config)
    progress = Progress(plan.steps, counters.step, accelerator.is_main_process)
    stepper = Stepper(model, optimiser, coefficients, config.clip, accelerator)
    memories = split_budget(config.keep_features_gib)
    state = _State(run, draft, stepper, checkpoints, counters, progress, *memories)
    try:
        with ExitStack() as stack:
            if accelerator.is_main_process:
                state.history = stack.enter_context(History(run.out / "history.jsonl", counters.step))
            interrupt = stack.enter_context(Interrupt())
            _steps(state, plan, rows, held_out_rows, interrupt)
    finally:
        progress.close()
    return counters


def new_plan(config: TrainConfig, rows: int, ranks: int) -> Plan:
    """The run's steps: the epochs, or `max_steps` if that is less."""
    plan = Plan(max(1, round(config.epochs * rows)), config.batch_size, config.accumulation, ranks)
    if config.max_steps is not None and config.max_steps < plan.steps:
        plan = Plan(config.max_steps * plan.rows_a_step, plan.batch_size, plan.accumulation, ranks)
    return plan


@dataclass
class _State:
    """What changes during a run, and what it changes through."""

    run: Run
    draft: TrainableDraft
    stepper: Stepper
    checkpoints: Checkpoints
    counters: Counters
    progress: Progress
    memory: FeatureMemory
    held_out_memory: FeatureMemory
    meter: Meter = field(default_factory=Meter)
    history: History | None = None

    def record(self, record: dict[str, Any]) -> None:
        """Show and keep one record (process 0)."""
        if self.history is not None:
            self.history.add(record)
            self.progress.show(record)
            name = "held_out" if "tau" in record else "train"
            self.run.tracker.log(record["step"], scalars(record, name))
            if self.run.on_progress is not None:
                self.run.on_progress(record)


def _steps(state: _State, plan: Plan, rows: Rows, held_out_rows: Rows, interrupt: Interrupt) -> None:
    config, accelerator, counters = state.run.config, state.run.accelerator, state.counters
    state.meter = Meter(**counters.meter)
    if not accelerator.is_main_process:
        state.meter = state.meter.cleared()
    alone = accelerator.num_processes == 1
    first_step = counters.step
    clock = time.perf_counter()
    for window in windows(rows, plan, accelerator.process_index, config.seed, first_step):
        rate = learning_rate(counters.step, plan.steps, config)
        check = _gradient_check(state) if counters.step == first_step else None
        result = _one_step(state, window, rate, interrupt.signal is not None, check)
        counters.step += 1
        counters.rows = plan.rows_before(counters.step)
        _count_not_finite(state, result)
        state.progress.advance()
        counters.seconds += time.perf_counter() - clock
        last = counters.step == plan.steps
        if counters.step % config.log_every == 0 or last:
            _log(state, rate, result)
        if (counters.step % config.eval_every == 0 or last) and min(len(held_out_rows), config.eval_rows):
            _evaluate(state, held_out_rows)
        stop = interrupt.signal is not None if alone else result.stop
        if counters.step % config.checkpoint_every == 0 or last or stop:
            _save(state)
        if stop:
            _leave(state, interrupt)
        clock = time.perf_counter()


def _one_step(
    state: _State, window: list[RowBatch], rate: float, stop: bool, check: Callable[[], None] | None
) -> StepResult:
    run, layers = state.run, state.draft.capture_layers
    parts = tuple(state.stepper.coefficients)
    captured = [
        Micro(
            draft_batch(one, run.target, layers, memory=state.memory, loss_parts=parts),
            one.token_count,
            one.counted,
        )
        for one in window
    ]
    for group in state.stepper.optimiser.param_groups:
        group["lr"] = rate

    def on_loss(loss: DraftLoss, micro: Micro) -> None:
        state.meter.add(loss, micro.tokens, micro.counted)

    return state.stepper.take(captured, on_loss, check, stop)


def _gradient_check(state: _State) -> Callable[[], None]:
    return lambda: check_gradients_agree(state.stepper.model, state.run.accelerator)


def _count_not_finite(state: _State, result: StepResult) -> None:
    counters = state.counters
    counters.skipped += not result.finite
    counters.skipped_in_a_row = 0 if result.finite else counters.skipped_in_a_row + 1
    if counters.skipped_in_a_row >= NOT_FINITE_LIMIT:
        raise UserError(
            f"The loss or its gradient was not finite {NOT_FINITE_LIMIT} steps in a row (up to step "
            f"{counters.step}): lower train.learning_rate (now {state.run.config.learning_rate}) or set "
            "train.precision=no, and start over with train.resume=never."
        )


def _log(state: _State, rate: float, result: StepResult) -> None:
    counters = state.counters
    seen = state.meter.over_all(state.run.accelerator)
    state.meter = state.meter.cleared()
    counters.tokens += int(seen.tokens)
    seconds = counters.seconds - counters.logged_at
    counters.logged_at = counters.seconds
    state.record(
        {
            "step": counters.step,
            "rows": counters.rows,
            "tokens": counters.tokens,
            "seconds": counters.seconds,
            **seen.record(state.stepper.coefficients),
            "learning_rate": rate,
            "gradient_norm": result.gradient_norm,
            "skipped": counters.skipped,
            "tokens_per_second": seen.tokens / seconds if seconds > 0 else 0.0,
        }
    )


def _evaluate(state: _State, rows: Rows) -> None:
    run = state.run
    how = HeldOut(
        run.config.eval_rows, run.config.eval_steps, run.temperature, run.config.seed, run.config.batch_size
    )
    found = evaluate_held_out(
        state.stepper.model,
        rows,
        how,
        target=run.target,
        layers=state.draft.capture_layers,
        coefficients=state.stepper.coefficients,
        accelerator=run.accelerator,
        memory=state.held_out_memory,
    )
    state.counters.evaluation = found
    state.record({"step": state.counters.step, **found})


def _save(state: _State) -> None:
    """A checkpoint; the other processes' share of the next log moves to process 0, whose meter is kept."""
    seen, mine = state.meter.over_all(state.run.accelerator), state.meter.cleared()
    state.meter = seen if state.run.accelerator.is_main_process else mine
    state.counters.meter = asdict(seen)
    state.checkpoints.save(state.draft, state.stepper.optimiser, state.counters)


def _leave(state: _State, interrupt: Interrupt) -> None:
    state.progress.say(
        f"Interrupted; saved at step {state.counters.step}. To go on, run the command again that you gave, or "
        f"{state.run.command}"
    )
    raise SystemExit(interrupt.exit_code)


def _checkpoints(run: Run) -> Checkpoints:
    return Checkpoints(
        folder=run.out / "checkpoints",
        recipe=run.recipe,
        keep_last=run.config.keep_last,
        accelerator=run.accelerator,
        restart_hint=f"{run.command} train.resume=never",
        say=print if run.accelerator.is_main_process else lambda line: None,
    )


def _start(
    checkpoints: Checkpoints, draft: TrainableDraft, optimiser: AcceleratedOptimizer, config: TrainConfig
) -> Counters:
    checkpoints.remove_leftovers()
    if config.resume == "never":
        checkpoints.remove_all()
    return checkpoints.resume(draft, optimiser)
