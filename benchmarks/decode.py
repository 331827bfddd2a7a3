"""Every way of decoding side by side, with a trained draft and evaluation sets or files of prompts.

    python -m benchmarks.decode --draft runs/smollm2_eagle3/draft --prompts gsm8k=FILE humaneval=FILE \\
        --dtypes float32 bfloat16 --threads 1 2 --batches 1 4 16 --temperature 0 --out results/decode

Number formats, thread counts and ways all take turns prompt by prompt in one run, so that a machine that warms up
or is disturbed meets them alike. Seconds are without the prefill. Run it on an idle machine: machine, load and
what disturbed it stand above the tables. Writes OUT.json and OUT.md, after each of its three parts. Two number formats
and two thread counts with six prompts took 20 minutes for the first part and as long for the others on two cores.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.decode_batches import measure_batches
from benchmarks.decode_parts import where_the_time_goes
from benchmarks.decode_tables import markdown
from deepspec.config.schema import DecodeConfig, Dtype, TargetConfig
from deepspec.data.conversation import BadRow
from deepspec.data.template import ChatTemplate
from deepspec.decoding import Engine, Request, Result, Sampling
from deepspec.decoding.scheduler import Schedule
from deepspec.decoding.steps import draft_steps, verify_steps
from deepspec.drafts.contract import Drafter, DynamicTree, StaticTree
from deepspec.drafts.ngram import NgramDraft
from deepspec.drafts.options import NgramOptions
from deepspec.errors import UserError
from deepspec.evaluation.baselines import transformers_decode
from deepspec.evaluation.ideal import StepClock, ideal_seconds
from deepspec.evaluation.machine import NoiseMeter, describe_machine, load_average
from deepspec.evaluation.measure import Decode, Hooks, Plan, measure
from deepspec.evaluation.prompts import Prompt, spread
from deepspec.evaluation.result import StepTimes
from deepspec.evaluation.tasks import read_tasks
from deepspec.target import Target, load_target
from deepspec.training.saved_draft import load_draft

PLAIN, GENERATE = "plain", "transformers generate"


@dataclass(frozen=True)
class Setting:
    dtype: str
    threads: int


@dataclass
class Side:
    """One way at one setting. engine: of ours; steps: its bare modules' times, where an ideal is wanted."""

    way: str
    setting: Setting
    decode: Decode
    engine: Engine | None = None
    steps: StepClock | None = None
    results: list[list[Result]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.way} | {self.setting.dtype} | {self.setting.threads}"


def main(arguments: Sequence[str] | None = None) -> None:
    options = _arguments(arguments)
    try:
        run(options)
    except UserError as error:
        raise SystemExit(f"error: {error}") from error


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure; writes `options.out`.json and .md and returns what the former holds."""
    load = load_average()
    targets = {dtype: _target(options.target, dtype) for dtype in options.dtypes}
    first = next(iter(targets.values()))
    prompts = spread(list(_prompts(options.prompts, first)), options.max_prompts)
    plan = Plan(
        options.new_tokens, first.eos, Sampling(options.temperature), repeats=options.repeats, warmup=1
    )
    sides = [
        side
        for dtype, target in targets.items()
        for threads in options.threads
        for side in _sides(options, target, Setting(dtype, threads), plan, len(prompts))
    ]
    for side in sides:  # every shape is compiled before anything is measured
        if side.engine is not None and side.engine.how.compile:
            for prompt in prompts:
                side.decode(plan.request(prompt, 0))
    meter = NoiseMeter()
    hooks = Hooks(meter=meter, after=partial(_time_steps, sides, prompts, plan))
    measured = measure(prompts, {side.name: side.decode for side in sides}, plan, hooks)
    for side in sides:
        side.results = measured[side.name]
    record: dict[str, Any] = {
        "target": first.name,
        "options": {key: str(value) for key, value in vars(options).items()},
        "prompts": {name: sum(p.category == name for p in prompts) for name in {p.category for p in prompts}},
        "machine": asdict(describe_machine(first.device, load)),
        "disturbances": meter.disturbances(),
        "ways": [_summary(side, sides, options.temperature > 0) for side in sides],
        "parts": [],
        "batches": [],
    }
    _write(record, options.out)
    for side in sides:
        if side.engine is not None:
            parts = _with_threads(side, partial(where_the_time_goes, side.engine, prompts[:2], plan))
            record["parts"] += [{"way": side.way, **asdict(side.setting), **parts}] if parts else []
    _write(record, options.out)
    for setting in {side.setting: None for side in sides}:
        alike = [side for side in sides if side.setting == setting]
        record["batches"] += [{**asdict(setting), **line} for line in _batches(options, alike, prompts, plan)]
        _write(record, options.out)
    print(markdown(record))
    return record


def _write(record: dict[str, Any], out: Path) -> None:
    """As far as it is measured: the whole takes the better part of an hour."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    out.with_suffix(".md").write_text(markdown(record), encoding="utf-8")


# ---------------------------------------------------------------- sides


def _sides(
    options: argparse.Namespace, target: Target, setting: Setting, plan: Plan, prompts: int
) -> Iterator[Side]:
    """Each way at one setting; those that this draft or target cannot do are left out, and named."""
    for way, make in _engines(options, target).items():
        try:
            engine = make()
        except UserError as error:
            print(f"left out: {way}, {setting.dtype}: {error}", flush=True)
            continue
        side = Side(way, setting, partial(_alone, engine, setting.threads), engine)
        if engine.draft is not None and not _fixed(engine):  # those fill every forward up
            side.steps = StepClock(engine.how.most, prompts, whole=engine.how.tree is not None)
        yield side
    theirs: dict[str, dict[str, Any]] = {
        GENERATE: {},
        "transformers prompt lookup": {"prompt_lookup_num_tokens": options.lookup},
    }
    if options.assistant is not None and not plan.stop:
        assistant = cast(Any, _draft(options.assistant, target)).model
        assistant.generation_config.num_assistant_tokens = options.k
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        theirs["transformers assisted"] = {"assistant_model": assistant}
    for way, more in theirs.items():
        decode = transformers_decode(target, **more)
        yield Side(way, setting, partial(_threaded, decode, setting.threads))


def _engines(options: argparse.Namespace, target: Target) -> dict[str, Callable[[], Engine]]:
    draft, k = _draft(options.draft, target), options.k
    static, dynamic = StaticTree(tuple(options.tree_parents)), DynamicTree(*options.tree)
    found: dict[str, Callable[[], Engine]] = {
        PLAIN: lambda: Engine(target),
        "chain": lambda: Engine(target, draft, k=k),
        "static tree": lambda: Engine(target, draft, tree=static),
        "dynamic tree": lambda: Engine(target, draft, tree=dynamic),
        "n-gram": lambda: Engine(target, NgramDraft(NgramOptions()), k=options.lookup),
    }
    if options.assistant is not None:
        found["standalone chain"] = lambda: Engine(target, _draft(options.assistant, target), k=k)
    if options.temperature > 0:
        found["chain, token rejection"] = lambda: Engine(target, draft, k=k, rule="token")
    if options.schedules:
        found["chain, threshold"] = lambda: Engine(target, draft, k=k, schedule=Schedule("threshold"))
        found["chain, hardware"] = lambda: Engine(target, draft, k=k, schedule=Schedule("hardware"))
        found["chain, fallback"] = lambda: Engine(target, draft, k=k, schedule=Schedule(fallback=True))
    if options.exact:
        found["plain, exact"] = lambda: Engine(target, k=k, exact=True)
        found["chain, exact"] = lambda: Engine(target, draft, k=k, exact=True)
        found["plain, exact as a tree"] = lambda: Engine(target, tree=static, exact=True)
        found["static tree, exact"] = lambda: Engine(target, draft, tree=static, exact=True)
    if options.compile:
        found["plain, compiled"] = lambda: Engine(target, compile=True)
        found["chain, compiled"] = lambda: Engine(target, draft, k=k, compile=True)
    return found


def _fixed(engine: Engine) -> bool:
    return engine.how.exact or engine.how.compile


def _alone(engine: Engine, threads: int, request: Request) -> Result:
    return _threaded(lambda one: engine.generate([one])[0], threads, request)


def _threaded(decode: Decode, threads: int, request: Request) -> Result:
    with _threads(threads):
        return decode(request)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _with_threads(side: Side, call: Callable[[], Any]) -> Any:
    with _threads(side.setting.threads):
        return call()


def _batches(
    options: argparse.Namespace, sides: Sequence[Side], prompts: Sequence[Prompt], plan: Plan
) -> list[dict[str, Any]]:
    engines = {side.way: side.engine for side in sides if side.engine is not None and "exact" not in side.way}
    sizes = [rows for rows in options.batches if 1 < rows <= len(prompts)]
    with _threads(sides[0].setting.threads):
        return [line for rows in sizes for line in measure_batches(engines, rows, prompts, plan)]


# ---------------------------------------------------------------- numbers


def _time_steps(
    sides: Sequence[Side],
    prompts: Sequence[Prompt],
    plan: Plan,
    number: int,
    results: Mapping[str, Result],
) -> None:
    """Bare steps in the middle of each answer just decoded, for rounds like its own."""
    for side in sides:
        answer = results[side.name]
        engine = side.engine
        if side.steps is None or engine is None or engine.draft is None or not answer.rounds:
            continue
        text = [*prompts[number].tokens, *answer.tokens[: (len(answer.tokens) + 1) // 2]]
        committed = max(1, round(sum(r.committed for r in answer.rounds) / len(answer.rounds)))
        request = plan.request(prompts[number], 0)
        with _threads(side.setting.threads):
            side.steps.take(
                verify_steps(engine.target, text, side.steps.k + 1),
                draft_steps(engine.target, engine.draft, text, request, committed, tree=engine.how.tree),
                len(text),
            )


def _summary(side: Side, sides: Sequence[Side], sampled: bool) -> dict[str, Any]:
    plain = {(one.way, one.setting): one for one in sides}
    seconds = _seconds_a_token(side)
    same = _seconds_a_token(plain[PLAIN, side.setting])
    fastest = min(_seconds_a_token(one) for one in sides if one.way in (PLAIN, GENERATE))
    rounds = [r for results in side.results for result in results for r in result.rounds]
    told = bool(rounds) and side.engine is not None and side.engine.draft is not None
    times = None if side.steps is None else side.steps.result()
    return {
        "way": side.way,
        **asdict(side.setting),
        "tokens_per_second": _by_prompt(side),
        "seconds_per_token": seconds,
        "speedup_same": same / seconds,
        "speedup_fastest": fastest / seconds,
        "tau": sum(r.committed for r in rounds) / len(rounds) if told else None,
        "verified": sum(r.scheduled or 0 for r in rounds) / len(rounds) if told else None,
        **_ideal(rounds, times, same / seconds),
        "equal_to": None if sampled else _equal(side, plain),
        "steps": None if times is None else asdict(times),
    }


def _ideal(rounds: Sequence[Any], times: StepTimes | None, speedup: float) -> dict[str, float | None]:
    if times is None or not rounds:
        return {"ideal": None, "efficiency": None}
    plain, best = ideal_seconds(rounds, times)
    return {"ideal": plain / best, "efficiency": speedup * best / plain}


def _equal(side: Side, others: Mapping[tuple[str, Setting], Side]) -> dict[str, Any]:
    """Of how many greedy answers the text is plain decoding's; of an exact way, plain decoding's at its shape."""
    whose = PLAIN
    if "exact" in side.way:
        whose = "plain, exact as a tree" if "tree" in side.way else "plain, exact"
    mates = others[whose, side.setting].results
    pairs = [
        (a.tokens, b.tokens)
        for x, y in zip(side.results, mates, strict=True)
        for a, b in zip(x, y, strict=True)
    ]
    return {"way": whose, "equal": sum(a == b for a, b in pairs), "of": len(pairs)}


def _by_prompt(side: Side) -> list[float]:
    return [
        sum(len(r.tokens) - 1 for r in results) / seconds
        for results in side.results
        if (seconds := sum(r.decode_seconds for r in results))
    ]


def _seconds_a_token(side: Side) -> float:
    results = [result for each in side.results for result in each]
    return sum(r.decode_seconds for r in results) / max(1, sum(len(r.tokens) - 1 for r in results))


# ---------------------------------------------------------------- what is measured


def _target(path: str, dtype: str) -> Target:
    name = "SmolLM2-135M-Instruct, Q4_1 weights dequantised" if path.startswith("builtin:") else path
    return load_target(TargetConfig(name=name, path=path, dtype=Dtype(dtype)))


def _draft(folder: Path, target: Target) -> Drafter:
    module: Any = load_draft(folder)
    return cast(Drafter, module.to(target.device, target.dtype))


def _prompts(sources: Sequence[str], target: Target) -> Iterator[Prompt]:
    """The first turns. A source is an evaluation set (gsm8k, humaneval, mtbench, ...), SET=FILE, or a file."""
    template = ChatTemplate(target.tokenizer, target.eos)
    files = dict(one.split("=", 1) for one in sources if "=" in one)
    for source in sources:
        name = source.split("=", 1)[0]
        items, _ = read_tasks([name], files)
        for item in items:
            try:
                tokens = template.prompt([{"role": "user", "content": item.turns[0]}])
            except BadRow as error:
                raise UserError(f"{source}: the chat template does not take a prompt: {error}.") from error
            yield Prompt(item.id, Path(name).name, item.turns[0], tuple(tokens))


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = DecodeConfig()
    parser.add_argument("--target", default="builtin:smollm2_135m", help="a folder or hub name")
    parser.add_argument("--draft", type=Path, required=True, help="the folder that deepspec.train wrote")
    parser.add_argument("--assistant", type=Path, help="a standalone draft's, for assisted decoding")
    parser.add_argument(
        "--prompts",
        nargs="+",
        required=True,
        metavar="SET|SET=FILE|FILE",
        help="gsm8k=cases.jsonl, mine.jsonl",
    )
    parser.add_argument("--max-prompts", type=int, default=12, help="spread evenly over the files")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--batches", type=int, nargs="*", default=[4, 16], help="rows, beside one alone")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--k", type=int, default=3, help="drafted tokens of a chain")
    parser.add_argument("--lookup", type=int, default=8, help="proposals of n-gram and of prompt lookup")
    parser.add_argument("--tree-parents", type=int, nargs="+", default=default.tree_parents)
    parser.add_argument(
        "--tree",
        type=int,
        nargs=3,
        metavar=("DEPTH", "TOP_K", "TOTAL"),
        default=[default.tree_depth, default.tree_top_k, default.tree_total_tokens],
    )
    parser.add_argument("--schedules", action="store_true", help="also threshold, hardware and fallback")
    parser.add_argument("--exact", action="store_true", help="also decode.exact, and what it costs")
    parser.add_argument(
        "--compile", action="store_true", help="also decode.compile; minutes before the start"
    )
    parser.add_argument("--out", type=Path, required=True, help="without suffix")
    return parser.parse_args(given)


if __name__ == "__main__":
    main()
