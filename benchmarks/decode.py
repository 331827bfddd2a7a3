"""Every way of decoding side by side, on a run's own target, draft and prompts.

    python benchmarks/decode.py +recipe=quickstart                    # the run in runs/quickstart
    python benchmarks/decode.py +recipe=quickstart decode.k=3 evaluate.max_prompts=12 evaluate.repeats=2

All ways take turns prompt by prompt in one run, so that a machine that warms up or is disturbed meets them alike.
Seconds without the prefill. Run it on an idle machine; machine, load and noise stand above the tables. Keys that
count: `decode.*`, and of `evaluate`: max_prompts, repeats, warmup_prompts, threads, prompts.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from deepspec.config.app import command, entry
from deepspec.config.schema import Config
from deepspec.decoding import Engine, Request, Result
from deepspec.decoding.batch import Batch
from deepspec.decoding.engine import sampling_of
from deepspec.decoding.scheduler import Schedule
from deepspec.decoding.steps import draft_steps, verify_steps
from deepspec.drafts.contract import Drafter, DynamicTree
from deepspec.drafts.ngram import NgramDraft
from deepspec.drafts.options import NgramOptions
from deepspec.errors import UserError
from deepspec.evaluation.baselines import transformers_decode
from deepspec.evaluation.ideal import StepClock, ideal_seconds
from deepspec.evaluation.machine import describe_machine, load_average
from deepspec.evaluation.measure import Decode, Plan, measure
from deepspec.evaluation.prompts import Prompt, spread
from deepspec.evaluation.result import StepTimes
from deepspec.evaluation.sources import prompts_of, read_source
from deepspec.pair import find_draft, load_pair
from deepspec.target import Target

BATCHES = (1, 4, 16)
PLAIN = "plain decoding"
LEVEL = {"fixed": "fixed K", "threshold": "confidence threshold", "hardware": "hardware-aware"}


def run(config: Config) -> None:
    """Measure and print; writes nothing but the cost tables in the cache."""
    if config.evaluate.threads:
        torch.set_num_threads(config.evaluate.threads)
    load = load_average()
    found = find_draft(config)
    source = read_source(config, command("prepare"))
    pair = load_pair(config, found)
    prompts, _ = prompts_of(source, config, pair.target)
    chosen = spread(prompts, config.evaluate.max_prompts)
    plan = Plan(
        config.decode.max_new_tokens,
        pair.target.eos,
        sampling_of(config.decode),
        config.decode.seed,
        config.evaluate.repeats,
        config.evaluate.warmup_prompts,
        tuple(config.decode.stop),
    )
    engines = engines_of(config, pair.target, pair.draft)
    arms: dict[str, Decode] = {name: alone(engine) for name, engine in engines.items()}
    arms |= baselines(config, pair.target, pair.draft, plan)
    wall, cpu = time.perf_counter(), time.process_time()
    results = measure(chosen, arms, plan)
    share = (time.process_time() - cpu) / (time.perf_counter() - wall)
    print(conditions(config, pair.target, load, share, len(chosen)))
    print(speeds(results, engines, step_times(config, pair.target, engines, chosen, plan)))
    print(where_the_time_goes(engines, chosen, plan))
    print(batches(config, pair.target, pair.draft, chosen, plan))


# ---------------------------------------------------------------- ways


def engines_of(config: Config, target: Target, draft: Drafter) -> dict[str, Engine]:
    """Each of our modes; those that this draft or target cannot do are left out, and named."""
    decode = config.decode
    k = decode.k

    def schedule(kind: str) -> Schedule:
        return Schedule(kind, decode.confidence_threshold, decode.max_candidates)

    makers: dict[str, Callable[[], Engine]] = {
        PLAIN: lambda: Engine(target),
        "n-gram": lambda: Engine(target, NgramDraft(NgramOptions()), k=k),
    }
    for kind, words in LEVEL.items():
        makers[words] = lambda kind=kind: Engine(target, draft, k=k, schedule=schedule(kind))
    makers["fallback"] = lambda: Engine(target, draft, k=k, schedule=Schedule(fallback=True))
    if decode.temperature > 0:
        makers["token rejection"] = lambda: Engine(target, draft, k=k, rule="token")
    shape = DynamicTree(decode.tree_depth, decode.tree_top_k, decode.tree_total_tokens)
    makers["dynamic tree"] = lambda: Engine(target, draft, tree=shape)
    engines = {}
    for name, make in makers.items():
        try:
            engines[name] = make()
        except UserError as error:
            print(f"left out: {name}: {error}", flush=True)
    return engines


def baselines(config: Config, target: Target, draft: Drafter, plan: Plan) -> dict[str, Decode]:
    """transformers' own decoders, batch 1; assisted decoding where the draft is a language model."""
    k = config.decode.k
    found = {
        "transformers generate": transformers_decode(target),
        "transformers prompt lookup": transformers_decode(target, prompt_lookup_num_tokens=k),
    }
    assistant = getattr(draft, "model", None)
    if hasattr(assistant, "generate") and not plan.stop:
        assistant.generation_config.num_assistant_tokens = k
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        found["transformers assisted"] = transformers_decode(target, assistant_model=assistant)
    else:
        print("left out: transformers assisted: it takes a whole language model as the draft", flush=True)
    return found


def alone(engine: Engine) -> Decode:
    def decode(request: Request) -> Result:
        return engine.generate([request])[0]

    return decode


# ---------------------------------------------------------------- tables


def conditions(config: Config, target: Target, load: Sequence[float], share: float, prompts: int) -> str:
    machine, decode = describe_machine(target.device, load), config.decode
    return (
        f"\n{target.name}, {str(target.dtype).removeprefix('torch.')}; {config.draft.algorithm}, K = {decode.k}, "
        f"temperature {decode.temperature}; {prompts} prompts of up to {decode.max_new_tokens} new tokens, "
        f"{config.evaluate.repeats} times\n{machine.cpu}, {machine.device}, {machine.threads} threads of "
        f"{machine.logical_cores}; load before {machine.load_before}, after {machine.load_after}; CPU time "
        f"{share:.2f} of wall time\n{machine.system}; {machine.versions}\n"
    )


def speeds(
    results: Mapping[str, list[list[Result]]], engines: Mapping[str, Engine], steps: Mapping[str, StepTimes]
) -> str:
    """Median tokens a second over prompts with its spread, speedups from totals, and what was ideal."""
    plain = seconds_a_token(results[PLAIN])
    fastest = min(plain, seconds_a_token(results["transformers generate"]))
    lines = [
        "| way | tokens/s (p10–p90) | ms/token | against plain | against the fastest plain | τ | drafted | verified "
        "| ideal | efficiency |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in results.items():
        each = [
            sum(len(r.tokens) - 1 for r in rs) / s for rs in runs if (s := sum(r.decode_seconds for r in rs))
        ]
        low, high = percentile(each, 10), percentile(each, 90)
        seconds = seconds_a_token(runs)
        cells = [
            name,
            f"{statistics.median(each):.1f} ({low:.1f}–{high:.1f})",
            f"{1000 * seconds:.1f}",
            f"{plain / seconds:.2f}",
            f"{fastest / seconds:.2f}",
            *round_cells(runs, name in engines and name != PLAIN),
            *ideal_cells(runs, steps.get(name), plain / seconds),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def round_cells(runs: list[list[Result]], told: bool) -> list[str]:
    rounds = [r for results in runs for result in results for r in result.rounds]
    if not told or not rounds:
        return ["–"] * 3
    count = len(rounds)
    return [
        f"{sum(r.committed for r in rounds) / count:.2f}",
        f"{sum(r.drafted for r in rounds) / count:.2f}",
        f"{sum(r.scheduled or 0 for r in rounds) / count:.2f}",
    ]


def ideal_cells(runs: list[list[Result]], steps: StepTimes | None, speedup: float) -> list[str]:
    rounds = [r for results in runs for result in results for r in result.rounds]
    if steps is None or not rounds:
        return ["–", "–"]
    plain, best = ideal_seconds(rounds, steps)
    return [f"{plain / best:.2f}", f"{speedup / (plain / best):.2f}"]


def step_times(
    config: Config, target: Target, engines: Mapping[str, Engine], prompts: Sequence[Prompt], plan: Plan
) -> dict[str, StepTimes]:
    """Bare steps for every draft that proposes chains, in the middle of a typical answer."""
    k, prompt = config.decode.k, sorted(prompts, key=lambda p: len(p.tokens))[len(prompts) // 2]
    request = plan.request(prompt, 0)
    answer = engines[PLAIN].generate([request])[0].tokens
    text = [*prompt.tokens, *answer[: (len(answer) + 1) // 2]]
    times: dict[int, StepTimes] = {}
    found = {}
    for name, engine in engines.items():
        if engine.draft is None or engine.how.tree is not None:
            continue
        key = id(engine.draft)
        if key not in times or name == "n-gram":
            drafted = draft_steps(target, engine.draft, text, request, 2)
            clock = StepClock(k, 1)
            clock.take(verify_steps(target, text, k + 1), drafted, len(text))
            times[key] = clock.result()
        if (timed := times[key]) is not None:
            found[name] = timed
    return found


def where_the_time_goes(engines: Mapping[str, Engine], prompts: Sequence[Prompt], plan: Plan) -> str:
    """Shares of a round, in a run of its own: the clocks inside cost a little themselves."""
    lines = ["| way | ms a round | draft | verify | rule | cache | Python |", "|---|---|---|---|---|---|---|"]
    for name, engine in engines.items():
        with parts(engine) as seconds:
            rounds = sum(len(engine.generate([plan.request(p, 0)])[0].rounds) for p in prompts[:4])
        if not rounds:
            continue
        whole = seconds.pop("step")
        named = [seconds[part] for part in ("draft", "verify", "rule", "cache")]
        shares = [f"{value / whole:.1%}" for value in [*named, max(whole - sum(named), 0.0)]]
        lines.append(f"| {name} | {1000 * whole / rounds:.1f} | {' | '.join(shares)} |")
    return "\n".join(lines) + "\n"


@contextmanager
def parts(engine: Engine) -> Iterator[dict[str, float]]:
    """Seconds inside the engine's own steps meanwhile, the device waited for at each."""
    seconds: dict[str, float] = defaultdict(float)
    device = engine.target.device

    def timed(owner: Any, name: str, part: str) -> Callable[[], None]:
        original = getattr(owner, name)
        own = name in vars(owner)

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = original(*args, **kwargs)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds[part] += time.perf_counter() - start
            return result

        setattr(owner, name, call)
        return lambda: setattr(owner, name, original) if own else delattr(owner, name)

    undo = [
        timed(Batch, name, part)
        for name, part in (
            ("_propose", "draft"),
            ("_judge", "rule"),
            ("_remember", "cache"),
            ("step", "step"),
        )
    ]
    prefills: dict[str, float] = {}
    undo.append(timed(engine.target, "forward", "verify"))
    admit = Batch.admit

    def outside(self: Batch, *args: Any) -> Any:
        """A prefill is no part of a round."""
        prefills.update(seconds)
        row = admit(self, *args)
        seconds["verify"] = prefills.get("verify", 0.0)
        return row

    Batch.admit = outside  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        Batch.admit = admit  # type: ignore[method-assign]
        for restore in reversed(undo):
            restore()


def batches(config: Config, target: Target, draft: Drafter, prompts: Sequence[Prompt], plan: Plan) -> str:
    """Tokens a second of all rows together, end to end, with continuous batching over all prompts."""
    lines = ["| rows | plain tokens/s | with the draft | ratio | τ |", "|---|---|---|---|---|"]
    requests = [plan.request(prompt, 0) for prompt in prompts]
    for rows in BATCHES:
        if rows > len(requests):
            break
        taken: dict[bool, list[float]] = {True: [], False: []}
        tau = 0.0
        for turn in range(max(2, plan.repeats)):
            for speculative in (True, False) if turn % 2 else (False, True):
                engine = (
                    Engine.configured(target, draft, config.decode, max_batch_size=rows)
                    if speculative
                    else Engine(target, max_batch_size=rows)
                )
                start = time.perf_counter()
                results = engine.generate(requests)
                seconds = time.perf_counter() - start
                taken[speculative].append(sum(len(r.tokens) for r in results) / seconds)
                rounds = [r for result in results for r in result.rounds]
                tau = sum(r.committed for r in rounds) / len(rounds) if speculative and rounds else tau
        plain, ours = statistics.median(taken[False]), statistics.median(taken[True])
        lines.append(f"| {rows} | {plain:.1f} | {ours:.1f} | {ours / plain:.2f} | {tau:.2f} |")
    return "\n".join(lines) + "\n"


def seconds_a_token(runs: list[list[Result]]) -> float:
    results = [result for each in runs for result in each]
    return sum(r.decode_seconds for r in results) / max(1, sum(len(r.tokens) - 1 for r in results))


def percentile(values: Sequence[float], q: float) -> float:
    return float(torch.quantile(torch.tensor(values, dtype=torch.float64), q / 100))


main = entry("decode", run)

if __name__ == "__main__":
    main()
