"""`python -m deepspec.evaluate +recipe=X tune=true`: what of `decode` is the fastest with this draft, here?"""

import os
import sys
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from tqdm import tqdm

from deepspec.artifacts import plain, without_name, write_json
from deepspec.config.app import command
from deepspec.config.schema import Config, DecodeConfig, ScheduleKind
from deepspec.decoding import Engine, Request
from deepspec.decoding.cost import cost_table
from deepspec.decoding.engine import sampling_of, schedule_of
from deepspec.errors import UserError
from deepspec.evaluation.fit import check_inputs
from deepspec.evaluation.machine import NoiseMeter, describe_machine, load_average
from deepspec.evaluation.measure import PLAIN, Plan
from deepspec.evaluation.prompts import Prompt, spread
from deepspec.evaluation.result import EvaluationResult, load_result
from deepspec.evaluation.sources import check_prompts, prompts_of, read_source
from deepspec.evaluation.tuning.candidates import Candidate, candidates, check_record
from deepspec.evaluation.tuning.findings import Tried, Tuned
from deepspec.evaluation.tuning.predict import Costs, table_costs
from deepspec.evaluation.tuning.trials import Decode, Timed, best_of, gain, take_turns
from deepspec.pair import Pair, find_draft, load_pair
from deepspec.reporting.tuning import lines, write_page, write_recipe
from deepspec.target import Target
from deepspec.training.parallel import world_size

WARMUP_TOKENS = 8
SAMPLING = ("top_k", "top_p", "min_p", "repetition_penalty", "rule")


def tune(config: Config) -> Path:
    """Try candidates against each other and the best of them against the default; writes tuning/ in `config.out`, the
    page's path.

    `UserError` where there is no evaluation of this very draft and sampling to start from.
    """
    if world_size(os.environ) > 1:
        raise UserError("tune=true measures one process; start it without a launcher.")
    check_prompts(config)
    found = find_draft(config)
    if found.ready is None:
        check_inputs(config, found.manifest, command("train"), command("prepare"))
    folder = "evaluation" if found.ready is None else f"evaluation_{config.draft.algorithm}"
    path = Path(config.out) / folder / "result.json"
    recorded = _recorded(config, path, found.manifest["fingerprint"])
    source = read_source(config, command("prepare"))
    pair = load_pair(config, found)
    _check_same(recorded, config, pair.target, path)
    if config.tuning.batch_size > 1:
        pair.target.require("ragged")
    prompts, _ = prompts_of(source, config, pair.target)
    tuned = _Tuning(config, pair, recorded, prompts, str(path)).result(found.manifest["fingerprint"])
    folder_out = Path(config.out) / "tuning"
    folder_out.mkdir(parents=True, exist_ok=True)
    write_json(folder_out / "tuning.json", asdict(tuned))
    recipe = write_recipe(tuned, folder_out)
    page = write_page(tuned, folder_out / "tuning.html")
    print("\n".join([*lines(tuned, recipe), f"page      {page}"]), flush=True)
    return page


def _recorded(config: Config, path: Path, fingerprint: str) -> EvaluationResult:
    if not path.is_file():
        raise UserError(
            f"{path} does not exist: tuning starts from a recorded run. Evaluate first: "
            f"{command('evaluate').replace(' tune=true', '')}"
        )
    result = load_result(path)
    made_for = (result.draft.get("manifest") or {}).get("fingerprint")
    if made_for != fingerprint:
        raise UserError(
            f"{path} is of another draft ({made_for}) than {config.out} has now. Evaluate again first."
        )
    if result.conditions.temperature != config.decode.temperature:
        raise UserError(
            f"{path} was decoded at temperature {result.conditions.temperature:g}, decode.temperature is "
            f"{config.decode.temperature:g}. Evaluate at that temperature first."
        )
    check_record(result, str(path))
    return result


def _check_same(recorded: EvaluationResult, config: Config, target: Target, path: Path) -> None:
    """UserError where the recorded run was of another target, sampling or machine than what is to be tuned."""
    machine, decode = describe_machine(target.device, load_average()), plain(config.decode)
    there, here = without_name(recorded.target), without_name(target.identity())
    compared = [(f"target's {name}", there.get(name), here.get(name)) for name in here]
    compared += [
        (name, getattr(recorded.conditions.machine, name), getattr(machine, name))
        for name in ("cpu", "device")
    ]
    recorded_decode = recorded.settings.get("decode", {})
    compared += [
        (f"decode.{name}", recorded_decode.get(name, decode[name]), decode[name]) for name in SAMPLING
    ]
    for what, then, now in compared:
        if then != now:
            raise UserError(
                f"{path} was recorded with another {what} ({then}, now {now}), and says nothing about this one. Evaluate "
                "again first."
            )


class _Tuning:
    def __init__(
        self, config: Config, pair: Pair, recorded: EvaluationResult, prompts: list[Prompt], where: str
    ) -> None:
        self.config, self.pair, self.recorded, self.where = config, pair, recorded, where
        settings, decode = config.tuning, config.decode
        self.size = settings.batch_size
        self.plan = Plan(
            decode.max_new_tokens, pair.target.eos, sampling_of(decode), decode.seed, stop=tuple(decode.stop)
        )
        self.trial, self.confirming = self._groups(prompts, settings.trials, settings.confirmations)
        self.meter = NoiseMeter()

    def result(self, fingerprint: str) -> Tuned:
        load = load_average()
        options = candidates(
            self.recorded, self.config.decode, self.size, self._costs(), self._temperatures()
        )
        default = options[0]
        by_words = {one.words: one for one in options}
        ways, left_out = self._ways(options)
        with tqdm(unit="group", desc="trying", disable=not sys.stderr.isatty()) as bar:
            best, times = best_of(
                ways,
                self.trial,
                lambda words, timed: self._proposes_chains(by_words[words], timed, left_out),
                always=[default.words],
                meter=self.meter,
                progress=lambda: _advance(bar),
            )
            bar.set_description("confirming")
            plain = self._engine(None, self.config.decode).generate
            finalists = {PLAIN: plain, default.words: ways[default.words], best: ways[best]}
            confirmed = take_turns(
                finalists, self.confirming, meter=self.meter, progress=lambda: _advance(bar)
            )
        compared = partial(gain, resamples=self.config.evaluate.bootstrap, seed=self.plan.seed)
        won = compared(confirmed[best], confirmed[default.words])
        worth = best != default.words and won.low is not None and won.low > 1
        chosen = by_words[best]
        answers = [
            (a.tokens, b.tokens)
            for one, other in zip(confirmed[best].results, confirmed[PLAIN].results, strict=True)
            for a, b in zip(one, other, strict=True)
        ]
        return Tuned(
            name=self.config.name,
            command=command("evaluate"),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            recorded=self.where,
            fingerprint=fingerprint,
            target=self.pair.target.name,
            batch_size=self.size,
            temperature=self.config.decode.temperature,
            max_new_tokens=self.config.decode.max_new_tokens,
            default=dict(default.settings),
            chosen=dict(chosen.settings),
            chosen_words=best,
            settings=dict((chosen if worth else default).settings),
            worth=worth,
            gain=won,
            over_plain=compared(confirmed[best], confirmed[PLAIN]),
            default_over_plain=compared(confirmed[default.words], confirmed[PLAIN]),
            groups=len(self.confirming),
            equal=sum(one == other for one, other in answers),
            answers=len(answers) if self.config.decode.temperature == 0 else 0,
            tried=[_tried(one, times.get(one.words), left_out.get(one.words)) for one in options],
            machine=describe_machine(self.pair.target.device, load),
            disturbances=self.meter.disturbances(),
        )

    def _costs(self) -> Costs | None:
        """Of a round at the batch size; for one request the recorded run has measured them."""
        if self.size == 1:
            return None
        longest, request = self.recorded.conditions.k, self.trial[0][0]
        table = cost_table(self.pair.target, self.pair.draft, request, k=longest, max_rows=self.size)
        return table_costs(table, self.size, longest)

    def _temperatures(self) -> tuple[float, ...]:
        """Of the draft's confidences, as a scheduled engine would use them."""
        scheduled = replace(self.config.decode, schedule=ScheduleKind.threshold)
        return schedule_of(scheduled, self.pair.draft).temperatures

    def _groups(
        self, prompts: list[Prompt], trials: int, confirmations: int
    ) -> tuple[list[list[Request]], list[list[Request]]]:
        """Requests by group; the confirming run has prompts of its own as far as there are enough."""
        size = self.size
        chosen = spread(prompts, size * (trials + confirmations))
        if len(chosen) < 2 * size:
            raise UserError(
                f"tuning.batch_size={size} needs {2 * size} prompts at least, {len(chosen)} are there. Lower it, or "
                "name more with evaluate.prompts or evaluate.tasks."
            )
        requests = [self.plan.request(prompt, 0) for prompt in chosen]
        whole = [requests[i : i + size] for i in range(0, len(requests) - size + 1, size)]
        few = max(1, min(trials, len(whole) // 3))
        return whole[:few], whole[few : few + confirmations]

    def _ways(self, options: list[Candidate]) -> tuple[dict[str, Decode], dict[str, str]]:
        """Those that this pair can do, warmed up, and why the others were left out."""
        ways: dict[str, Decode] = {}
        left_out: dict[str, str] = {}
        short = [replace(request, max_new_tokens=WARMUP_TOKENS) for request in self.trial[0]]
        for one in options:
            try:
                engine = self._engine(self.pair, one.applied(self.config.decode))
                engine.generate(short if not self.config.decode.compile else self.trial[0])
            except UserError as error:
                if one is options[0]:
                    raise
                left_out[one.words] = str(error)
                continue
            ways[one.words] = engine.generate
        return ways, left_out

    def _engine(self, pair: Pair | None, decode: DecodeConfig) -> Engine:
        draft = pair.draft if pair is not None else None
        return Engine.configured(self.pair.target, draft, decode, max_batch_size=self.size)

    def _proposes_chains(self, one: Candidate, timed: Timed, left_out: dict[str, str]) -> bool:
        """A draft that cannot branch takes no notice of a tree."""
        if one.settings["tree"] == "none":
            return False
        rounds = [r for results in timed.results for result in results for r in result.rounds if not r.cut]
        if any(r.scheduled != r.verified for r in rounds):
            return False
        left_out[one.words] = "this draft proposed chains"
        return True


def _tried(one: Candidate, timed: Timed | None, left_out: str | None) -> Tried:
    speed, groups = (timed.tokens_per_second, len(timed.tokens)) if timed is not None else (0.0, 0)
    return Tried(one.words, dict(one.settings), one.predicted, speed, groups, left_out)


def _advance(bar: tqdm) -> None:
    bar.update(1)
