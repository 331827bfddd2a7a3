"""The training loop: read it from `train` downwards."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor

from deepspec.config.schema import TrainConfig
from deepspec.drafts.contract import DraftLoss, TrainableDraft
from deepspec.training.averaging import Average
from deepspec.training.batches import (
    CapturingTarget,
    Plan,
    RowBatch,
    Rows,
    check_rows,
    windows,
)
from deepspec.training.checkpoint import Checkpoints, Counters
from deepspec.training.clock import Clock, profiler
from deepspec.training.health import count_not_finite, explained, memory_gib, row_ids, spike
from deepspec.training.held_out import HeldOut, evaluate_held_out
from deepspec.training.history import History
from deepspec.training.interrupt import Interrupt
from deepspec.training.meters import Meter
from deepspec.training.optimiser import (
    Micro,
    Stepper,
    StepResult,
    learning_rate,
    loss_coefficients,
    new_optimiser,
)
from deepspec.training.parallel import check_gradients_agree, describe_wrapping, wrap
from deepspec.training.progress import Progress
from deepspec.training.selection import take_in
from deepspec.training.sources import Sources, draft_batch, fetched_ahead, online
from deepspec.training.trackers import NoTracker, RunTracker, scalars
from deepspec.training.whole import whole_weights


@dataclass
class Run:
    """What stays the same during a run.

    recipe: all that decides the result, compared when resuming. command: runs this stage again, for
    messages. temperature: at which the target wrote the held-out answers (0: greedily). decode: decodes held-out
    prompts with a copy of the draft (on the CPU, its own to move) and tells `decoded_tau` and what it is made
    of; called by process 0 alone, every `train.decode_every` steps. full_speed: tokens a second with which the draft
    would learn if all devices did nothing but its operations, at their data sheet's rate; None: not known.
    """

    target: CapturingTarget
    config: TrainConfig
    accelerator: Accelerator
    out: Path
    tracker: RunTracker = field(default_factory=NoTracker)
    recipe: dict[str, Any] = field(default_factory=dict)
    command: str = "python -m deepspec.train"
    temperature: float = 0.0
    decode: Callable[[TrainableDraft], dict[str, Any]] | None = None
    on_progress: Callable[[dict[str, Any]], None] | None = None
    sources: Sources | None = None
    full_speed: float | None = None


@dataclass
class Trained:
    """weights: the state dict of the draft to export, whole, on process 0 (empty on the others): the best one
    that was evaluated, if one was to be kept, else the last."""

    counters: Counters
    weights: dict[str, Tensor]


def train(draft: TrainableDraft, rows: Rows, held_out_rows: Rows, run: Run) -> Trained:
    """Train `draft` in place (it may end sharded over the processes); every process calls this.

    Writes `checkpoints/` and `history.jsonl` below `run.out` and resumes from them. Ctrl-C or SIGTERM saves
    and raises `SystemExit` (130, 143). Errors for people: rows without supervision, a checkpoint of another
    recipe, a loss that stays not finite, a GPU too small.
    """
    config, accelerator = run.config, run.accelerator
    check_rows(rows, "The training data")
    plan = new_plan(config, len(rows), accelerator.num_processes)
    coefficients = loss_coefficients(draft, config.loss)
    torch.manual_seed(config.seed + accelerator.process_index)
    checkpoints = _checkpoints(run)
    found = checkpoints.newest()
    if found is not None:
        found.load_weights(draft)
    draft.to(accelerator.device).train()
    if config.gradient_checkpointing:
        draft.gradient_checkpointing_enable({"use_reentrant": False})
    if config.compile:
        draft.compile()
    model, optimiser = wrap(draft, lambda: new_optimiser(draft, config), accelerator)
    average = Average(draft, config.ema, accelerator) if config.ema else None
    if found is not None:
        found.load_states(draft, optimiser, accelerator, average)
    checkpoints.say(describe_wrapping(model, accelerator))
    counters = found.counters if found is not None else Counters()
    progress = Progress(plan.steps, counters.step, accelerator.is_main_process)
    stepper = Stepper(model, optimiser, coefficients, config.clip, accelerator)
    sources = run.sources or online(run.target, draft.capture_layers, config.keep_features_gib)
    state = _State(run, draft, stepper, checkpoints, counters, progress, sources, average=average)
    try:
        with ExitStack() as stack:
            if accelerator.is_main_process:
                state.history = stack.enter_context(History(run.out / "history.jsonl", counters.step))
            interrupt = stack.enter_context(Interrupt(speaks=accelerator.is_main_process))
            trace = profiler(config.profile, run.out / "profile", accelerator.process_index)
            state.profile = stack.enter_context(trace)
            order = windows(rows, plan, accelerator.process_index, config.seed, counters.step)
            source = stack.enter_context(closing(fetched_ahead(order, sources.train)))
            if counters.stopped is None:
                _steps(state, plan, source, held_out_rows, interrupt)
    finally:
        progress.close()
    if counters.stopped is not None:
        checkpoints.say(_ended_early(counters))
    return Trained(counters, _exported(state))


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
    sources: Sources
    average: Average | None = None
    meter: Meter = field(default_factory=Meter)
    history: History | None = None
    profile: torch.profiler.profile | None = None
    clock: Clock = field(init=False)

    def __post_init__(self) -> None:
        self.clock = Clock(self.run.accelerator.device)

    def record(self, record: dict[str, Any]) -> None:
        """Show and keep one record (process 0)."""
        if self.history is not None:
            self.history.add(record)
            self.progress.show(record)
            name = "held_out" if "tau" in record else "train"
            self.run.tracker.log(record["step"], scalars(record, name))
            if self.run.on_progress is not None:
                self.run.on_progress(record)


def _steps(
    state: _State, plan: Plan, source: Iterator[list[RowBatch]], held_out_rows: Rows, interrupt: Interrupt
) -> None:
    config, accelerator, counters = state.run.config, state.run.accelerator, state.counters
    state.meter = Meter(**counters.meter)
    if not accelerator.is_main_process:
        state.meter = state.meter.cleared()
    alone = accelerator.num_processes == 1
    first_step = counters.step
    clock = time.perf_counter()
    for window in _waited_for(source, state.clock):
        rate = learning_rate(counters.step, plan.steps, config)
        check = _gradient_check(state) if counters.step == first_step else None
        with explained([row for one in window for row in one.ids], counters.step, config):
            unrolled = state.draft.steps_at(counters.step / plan.steps)
            captured = _captured(state, window, unrolled)
            result = _one_step(state, captured, rate, interrupt.signal is not None, check)
        counters.rows = plan.rows_before(counters.step)
        state.progress.advance()
        counters.seconds += time.perf_counter() - clock
        last = counters.step == plan.steps
        logged = counters.step % config.log_every == 0 or last
        if logged:
            _log(state, rate, result)
        if (counters.step % config.eval_every == 0 or last) and min(len(held_out_rows), config.eval_rows):
            _evaluate(state, held_out_rows, last)
        if counters.stopped is not None and not logged:
            _log(state, rate, result)
        stop = interrupt.signal is not None if alone else result.stop
        done = last or counters.stopped is not None
        if counters.step % config.checkpoint_every == 0 or done or stop:
            _save(state)
        if stop:
            _leave(state, interrupt)
        if done:
            return
        clock = time.perf_counter()


def _waited_for(source: Iterator[list[RowBatch]], clock: Clock) -> Iterator[list[RowBatch]]:
    while True:
        with clock.span("data_wait", on_device=False):
            window = next(source, None)
        if window is None:
            return
        yield window


def _one_step(
    state: _State, captured: list[Micro], rate: float, stop: bool, check: Callable[[], None] | None
) -> StepResult:
    run, counters = state.run, state.counters
    for group in state.stepper.optimiser.param_groups:
        group["lr"] = rate

    def on_loss(loss: DraftLoss, micro: Micro) -> None:
        state.meter.add(loss, micro.tokens, micro.counted)

    result = state.stepper.take(captured, on_loss, check, stop)
    if result.finite and state.average is not None:
        state.average.update(counters.step)
    counters.step += 1
    if (expected := spike(counters, result.loss)) is not None:
        ids = row_ids(captured, run.accelerator.num_processes)
        found = {"loss": result.loss, "expected": expected, "rows": ids}
        state.record({"step": counters.step, "spike": found})
    if state.profile is not None:
        state.profile.step()
    rank = run.accelerator.process_index
    count_not_finite(counters, result.finite, captured, run.config, run.out / "not_finite", rank)
    return result


def _captured(state: _State, window: list[RowBatch], steps: int | None) -> list[Micro]:
    """The target's features for each micro-batch. steps: draft steps to unroll on it, None = the draft's number."""
    parts = tuple(state.stepper.coefficients)
    with state.clock.span("capture"):
        return [
            Micro(
                draft_batch(one, state.sources.train, steps, parts),
                one.token_count,
                one.counted,
                one.ids,
            )
            for one in window
        ]


def _gradient_check(state: _State) -> Callable[[], None]:
    return lambda: check_gradients_agree(state.stepper.model, state.run.accelerator)


def _log(state: _State, rate: float, result: StepResult) -> None:
    counters = state.counters
    seen = state.meter.over_all(state.run.accelerator)
    state.meter = state.meter.cleared()
    counters.tokens += int(seen.tokens)
    seconds = counters.seconds - counters.logged_at
    counters.logged_at = counters.seconds
    supervised = seen.valid[0] if seen.valid else 0.0
    speed = seen.tokens / seconds if seconds > 0 else 0.0
    full = state.run.full_speed
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
            "tokens_per_second": speed,
            **({"mfu": speed / full} if full is not None else {}),
            "supervised_per_second": supervised / seconds if seconds > 0 else 0.0,
            "time": state.clock.shares(seconds),
            **memory_gib(),
        }
    )


def _evaluate(state: _State, rows: Rows, last: bool) -> None:
    """On the weights that would be exported; keeps the draft if it is the best one so far."""
    run, counters = state.run, state.counters
    config = run.config
    how = HeldOut(config.eval_rows, config.eval_steps, run.temperature, config.seed, config.batch_size)
    with state.average.in_place() if state.average is not None else nullcontext():
        found = evaluate_held_out(
            state.stepper.model,
            rows,
            how,
            source=state.sources.held_out,
            coefficients=state.stepper.coefficients,
            accelerator=run.accelerator,
        )
    due = bool(config.decode_every) and (counters.step % config.decode_every == 0 or last)
    if run.decode is not None and due:
        found |= _decode(state, run.decode)
    if take_in(found, counters, config):
        weights = _weights(state)
        if run.accelerator.is_main_process:
            state.checkpoints.save_best(state.draft, weights, counters)
    state.record({"step": counters.step, **found})


def _decode(state: _State, decode: Callable[[TrainableDraft], dict[str, Any]]) -> dict[str, Any]:
    """Process 0 decodes with a whole copy of the draft; all processes learn what it found."""
    accelerator, weights = state.run.accelerator, _weights(state)
    answer: list[dict[str, Any]] = [{}]
    if accelerator.is_main_process:
        plain = next(kind for kind in type(state.draft).__mro__ if not kind.__name__.startswith("FSDP"))
        random = torch.get_rng_state()
        copy = plain(state.draft.config)
        copy.load_state_dict(weights)
        answer = [decode(copy.eval())]
        torch.set_rng_state(random)
    return broadcast_object_list(answer)[0] if accelerator.num_processes > 1 else answer[0]


def _weights(state: _State) -> dict[str, Tensor]:
    """What would be exported now; collective, process 0 gets it."""
    mean = state.average.mean if state.average is not None else None
    return whole_weights(state.draft, state.run.accelerator, mean)


def _exported(state: _State) -> dict[str, Tensor]:
    best = state.counters.best
    if best is None:
        return _weights(state)
    return state.checkpoints.best_weights(best["step"]) if state.run.accelerator.is_main_process else {}


def _save(state: _State) -> None:
    """A checkpoint; the other processes' share of the next log moves to process 0, whose meter is kept."""
    seen, mine = state.meter.over_all(state.run.accelerator), state.meter.cleared()
    state.meter = seen if state.run.accelerator.is_main_process else mine
    state.counters.meter = asdict(seen)
    state.checkpoints.save(state.draft, state.stepper.optimiser, state.counters, state.average)


def _leave(state: _State, interrupt: Interrupt) -> None:
    state.progress.say(
        f"Interrupted; saved at step {state.counters.step}. To go on, run the command again that you gave, or "
        f"{state.run.command}"
    )
    raise SystemExit(interrupt.exit_code)


def _ended_early(counters: Counters) -> str:
    return (
        f"Training ended at step {counters.step}, after {counters.seconds:.0f} s and {counters.tokens} tokens: "
        f"{counters.stopped}."
    )


def _checkpoints(run: Run) -> Checkpoints:
    """Cleared of what a killed process left, and of everything with `train.resume=never`."""
    checkpoints = Checkpoints(
        folder=run.out / "checkpoints",
        recipe=run.recipe,
        keep_last=run.config.keep_last,
        accelerator=run.accelerator,
        restart_hint=f"{run.command} train.resume=never",
        say=print if run.accelerator.is_main_process else lambda line: None,
    )
    checkpoints.remove_leftovers()
    if run.config.resume == "never":
        checkpoints.remove_all()
    return checkpoints
