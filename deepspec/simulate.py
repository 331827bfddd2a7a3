"""`python -m deepspec.simulate +recipe=X`: a recorded run under load, on this machine or a described one."""

if __name__ == "__main__":
    from deepspec.config.app import start

    start("simulate")  # before the imports below, which take seconds

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from tqdm import tqdm

from deepspec.artifacts import write_json
from deepspec.config.app import command
from deepspec.config.schema import Config
from deepspec.decoding import Engine, Request
from deepspec.decoding.cost import cost_table
from deepspec.decoding.engine import sampling_of, schedule_of
from deepspec.decoding.scheduler import Scheduler
from deepspec.drafts.contract import TrainableDraft
from deepspec.errors import UserError
from deepspec.evaluation.result import EvaluationResult, load_result
from deepspec.evaluation.sources import prompts_of, read_source
from deepspec.pair import Pair, find_draft, load_pair
from deepspec.reporting.simulation import lines, write_page
from deepspec.simulation.costs import BYTES, Sizes, check_described, described, measured, with_round_trip
from deepspec.simulation.engine import Costs, SimulatedEngine
from deepspec.simulation.findings import Checked, Findings, Network
from deepspec.simulation.load import Point, all_at_once, arrivals, users
from deepspec.simulation.network import ANSWERS, Way, network_is_larger_up_to, sooner_from
from deepspec.simulation.trace import Trace, read_trace
from deepspec.target.outline import cached_bytes

POLICIES = ("plain", "fixed", "threshold", "hardware")


def run(config: Config) -> Path:
    """Simulate every policy at every load; writes simulation/ in `config.out`, the page's path.

    `UserError` for a recorded run that is missing or cannot be replayed, and for a machine that is described too
    little to say what a step takes.
    """
    _check(config)
    path = Path(config.simulate.result or Path(config.out) / "evaluation" / "result.json")
    result = load_result(path)
    trace = read_trace(result, str(path))
    k = config.simulate.k or trace.k
    if k > trace.k:
        raise UserError(
            f"simulate.k={k}, but {path} recorded rounds of {trace.k} drafted tokens: what a further one would have "
            f"come to is not known. Evaluate with decode.k={k} evaluate.sweep=[]."
        )
    pair = None
    if config.hardware.name == "here" or config.simulate.target_parameters is None:
        pair = load_pair(config, find_draft(config))
    costs, notes = _costs(config, pair, result, trace, k)
    if config.simulate.round_trip:
        costs = with_round_trip(costs, config.simulate.round_trip)
        notes.append(f"The draft answers over a network: {1e3 * config.simulate.round_trip:g} ms a round.")
    engine = _engines(config, trace, costs, k)
    points = _points(config, trace, engine)
    checked = _validated(config, pair, trace, costs, k) if pair is not None else []
    network, words = _network(config, result, points)
    findings = Findings(
        name=config.name,
        command=command("simulate"),
        recorded=str(path),
        hardware=config.hardware.name,
        costs=asdict(costs.table) | {"overhead": costs.overhead, "prefill_of_256": costs.prefill(256)},
        k=k,
        recorded_requests=len(trace.requests),
        recorded_rounds=sum(len(one.rounds) for one in trace.requests),
        points=points,
        largest_timed=config.simulate.measured_rows if config.hardware.name == "here" else None,
        checked=checked,
        network=network,
        network_words=words,
        notes=notes,
    )
    folder = Path(config.out) / "simulation"
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "simulation.json", asdict(findings))
    page = write_page(findings, folder / "simulation.html")
    print("\n".join([*lines(findings), f"page      {page}"]))
    return page


def _check(config: Config) -> None:
    chosen, hardware = config.simulate, config.hardware
    if unknown := [one for one in chosen.policies if one not in POLICIES]:
        raise UserError(f"simulate.policies: {unknown[0]!r} is none of {', '.join(POLICIES)}.")
    if not chosen.policies or not (chosen.users or chosen.rates):
        raise UserError("There is nothing to simulate: give simulate.policies and simulate.users (or rates).")
    check_described(hardware)
    if hardware.name != "here" and chosen.validate:
        raise UserError("simulate.validate runs the real engine on this machine: use hardware=here.")


def _costs(
    config: Config, pair: Pair | None, result: EvaluationResult, trace: Trace, k: int
) -> tuple[Costs, list[str]]:
    chosen = config.simulate
    if config.hardware.name == "here":
        assert pair is not None
        request = Request(
            [1] * max(1, trace.context - config.decode.max_new_tokens // 2),
            config.decode.max_new_tokens,
            sampling_of(config.decode),
        )
        print(f"Costs of up to {chosen.measured_rows} rows: measured once, then kept ...", flush=True)
        table = cost_table(pair.target, pair.draft, request, k=k, max_rows=chosen.measured_rows)
        loads = [*chosen.users, *([chosen.max_rows] if chosen.rates else [])]
        notes = []
        if max(loads, default=0) > chosen.measured_rows:
            notes.append(
                f"Batches above {chosen.measured_rows} rows were not timed: their costs lie on straight lines through "
                "the largest two that were (simulate.measured_rows times more)."
            )
        return measured(table, result), notes
    sizes = _sizes(config, pair)
    notes = [
        f"{config.hardware.name} was not measured: steps take what their multiplications or their memory traffic take "
        f"at {config.hardware.efficiency:.0%} and 100% of its data sheet, and {1e3 * config.hardware.launch_seconds:g} "
        "ms to start."
    ]
    return described(config.hardware, sizes, k, trace.context), notes


def _sizes(config: Config, pair: Pair | None) -> Sizes:
    chosen = config.simulate
    if pair is None:
        if chosen.draft_parameters is None or chosen.target_parameters is None or chosen.cached_bytes is None:
            raise UserError(
                "Give all of simulate.target_parameters, simulate.draft_parameters and simulate.cached_bytes, or none: "
                "then the models are loaded and counted."
            )
        return Sizes(chosen.target_parameters, chosen.draft_parameters, chosen.cached_bytes, lambda k: k)
    trained = pair.draft if isinstance(pair.draft, TrainableDraft) else None
    one_pass = trained is not None and trained.one_pass
    return Sizes(
        target_parameters=pair.target.model.num_parameters(),
        draft_parameters=trained.num_parameters() if trained is not None else 0,
        cached=cached_bytes(pair.target.config, BYTES),
        passes=lambda k: 1 if one_pass else k,
    )


def _engines(config: Config, trace: Trace, costs: Costs, k: int) -> Callable[[str], SimulatedEngine]:
    def new(policy: str) -> SimulatedEngine:
        if policy == "plain":
            return SimulatedEngine(costs, 0)
        schedule = replace(schedule_of(config.decode), kind=policy, utilization_threshold=None)
        if schedule.kind == "fixed" and not schedule.fallback:
            return SimulatedEngine(costs, k)
        return SimulatedEngine(costs, k, Scheduler(schedule, k, costs.table), trace.gives_confidence)

    return new


def _points(config: Config, trace: Trace, engine: Callable[[str], SimulatedEngine]) -> list[Point]:
    chosen, points = config.simulate, []
    loads = chosen.rates or chosen.users
    with tqdm(total=len(loads) * len(chosen.policies), unit="point", desc="simulate") as bar:
        for load in loads:
            for policy in chosen.policies:
                if chosen.rates:
                    rows, count = chosen.max_rows, chosen.requests
                    points.append(arrivals(engine(policy), trace, load, rows, policy, count, chosen.seed))
                else:
                    points.append(users(engine(policy), trace, int(load), policy, chosen.seed))
                bar.update()
    return points


def _validated(config: Config, pair: Pair, trace: Trace, costs: Costs, k: int) -> list[Checked]:
    """The recorded prompts decoded for real, plainly and with `k` drafted tokens, and by the simulation."""
    if not config.simulate.validate:
        return []
    prompts, _ = prompts_of(read_source(config, command("prepare")), config, pair.target)
    recorded = {one.id: one for one in trace.requests}
    longest, sampling = config.decode.max_new_tokens, sampling_of(config.decode)
    requests = [
        Request(list(one.tokens), longest, sampling, index, pair.target.eos, one.id)
        for index, one in enumerate(prompts)
        if one.id in recorded
    ]
    if not requests:
        raise UserError(
            "simulate.validate: none of the recorded run's prompts is among evaluate's prompts now."
        )
    found = []
    for rows in config.simulate.validate:
        for policy, draft in (("plain", None), ("fixed", pair.draft)):
            real = Engine(pair.target, draft, k=k, max_batch_size=rows)
            real.generate(requests[:1])
            started = time.perf_counter()
            results = real.generate(requests)
            seconds = time.perf_counter() - started
            replayed = [replace(recorded[one.id], answer=len(one.tokens)) for one in results]
            simulated = all_at_once(SimulatedEngine(costs, k if draft else 0), replayed, rows)
            found.append(Checked(policy, rows, len(requests), seconds, simulated))
    return found


def _network(config: Config, result: EvaluationResult, points: list[Point]) -> tuple[list[Network], str]:
    """An API against this node, for one user."""
    chosen = config.simulate
    if chosen.api_tpot is None or chosen.api_round_trip is None:
        return [], ""
    alone = [one for one in points if one.load == 1 and not chosen.rates]
    ways = [Way("api", chosen.api_ttft, chosen.api_tpot, chosen.api_round_trip)]
    ways += [Way(one.policy, one.ttft_p50, 1 / one.per_user) for one in alone]
    if len(ways) < 2:
        raise UserError("To compare with an API, simulate one user too: simulate.users=[1,...].")
    table = [
        Network(
            tokens,
            {way.name: way.seconds(tokens) for way in ways},
            {way.name: way.network_share(tokens) for way in ways},
        )
        for tokens in ANSWERS
    ]
    api, best = ways[0], min(ways[1:], key=lambda way: way.each)
    larger, sooner = network_is_larger_up_to(api), sooner_from(best, api)
    words = (
        f"Of the API's time the network is the larger part up to answers of {larger} tokens"
        if larger
        else "The network is never the larger part of the API's time"
    )
    words += (
        f"; {best.name} decoding here answers sooner than the API from {sooner} tokens on."
        if sooner is not None
        else f"; the API answers sooner than {best.name} decoding here, however long the answer."
    )
    return table, words
