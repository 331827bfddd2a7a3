"""One evaluation from beginning to end: sweep over K, baselines, the main run, the numbers."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import psutil
import torch
from tqdm import tqdm

from deepspec.config.schema import Config, DecodeConfig
from deepspec.decoding import Engine
from deepspec.decoding.engine import calibration_key, sampling_of, schedule_of, tree_of
from deepspec.decoding.request import Request, Result
from deepspec.decoding.scheduler import Schedule
from deepspec.decoding.trees import longest_path, size_of
from deepspec.drafts.contract import Drafter
from deepspec.errors import UserError
from deepspec.evaluation.baselines import OURS, TRANSFORMERS, time_baselines, transformers_decode
from deepspec.evaluation.calibration import calibrate
from deepspec.evaluation.detail import acceptance_detail
from deepspec.evaluation.findings import Calibration, Resources
from deepspec.evaluation.journal import Decision, Journal
from deepspec.evaluation.machine import NoiseMeter, describe_machine, load_average
from deepspec.evaluation.main_run import MainRun
from deepspec.evaluation.measure import (
    FASTEST,
    PLAIN,
    SPECULATIVE,
    Decode,
    Hooks,
    Plan,
    decodings_of,
    measure,
    records,
)
from deepspec.evaluation.prompts import Prompt, choose
from deepspec.evaluation.quality.findings import Quality
from deepspec.evaluation.quality.score import QualityPlan, judge
from deepspec.evaluation.resources import measure_resources
from deepspec.evaluation.result import (
    SCHEMA_VERSION,
    Baseline,
    Conditions,
    EvaluationResult,
    PromptRecord,
    SweepPoint,
)
from deepspec.evaluation.statistics import null
from deepspec.evaluation.summary import seconds_a_token, summarise, summarise_result
from deepspec.evaluation.tasks.item import Check, Source
from deepspec.evaluation.turns import Following
from deepspec.target import Target

BASELINE_PROMPTS = 4  # enough, with so many tokens each, to tell which plain decoding is the fastest;
BASELINE_TOKENS = 32  # the main run then measures it properly
BASELINE_DTYPES = ("float32", "bfloat16")


@dataclass
class Subject:
    """What is evaluated. `load_as`: the same target's weights in another dtype, for the baselines. `following`: the
    prompt of a conversation's next turn."""

    target: Target
    draft: Drafter
    load_as: Callable[[str], Target]
    following: Following = lambda prompt, answer: None


@dataclass
class Papers:
    """What the result file says about where everything comes from."""

    command: str
    fingerprint: str
    settings: dict[str, Any]
    draft: dict[str, Any]
    training: list[dict[str, Any]]
    prompt_source: str
    excluded: dict[str, int]
    warnings: list[str]
    sources: list[Source] = field(default_factory=list)
    longest_row: int | None = None  # tokens of the longest row the draft was trained on
    load_draft_seconds: float | None = None
    checks: dict[str, Check] = field(default_factory=dict)  # of prompts by id: how an answer is judged


def evaluate(
    config: Config,
    subject: Subject,
    prompts: Sequence[Prompt],
    papers: Papers,
    journal: Journal,
    wait: Callable[[], None] = lambda: None,
) -> EvaluationResult | None:
    """Measure everything, or what of it the journal does not have yet; writes nothing else. Prints progress with
    the remaining time.

    wait: until all processes that share the journal have come here. The first of them gets the result, the
    others None.
    """
    return _Evaluation(config, subject, prompts, papers, journal, wait).result()


class _Evaluation:
    def __init__(
        self,
        config: Config,
        subject: Subject,
        prompts: Sequence[Prompt],
        papers: Papers,
        journal: Journal,
        wait: Callable[[], None],
    ) -> None:
        self.config, self.target, self.draft, self.papers = config, subject.target, subject.draft, papers
        self.subject, self.journal, self.wait = subject, journal, wait
        settings, decode = config.evaluate, config.decode
        if settings.threads > 0:
            torch.set_num_threads(settings.threads)
        self.main, self.sweep, self.overlap = choose(prompts, settings.max_prompts, settings.sweep_prompts)
        self.tree = tree_of(decode)
        # an answer's first token is the prefill's, and the round that ends it commits one of the target's own
        longest = max(1, decode.max_new_tokens - 2)
        chains = self.sweep and self.tree is None
        self.ks = sorted({min(k, longest) for k in settings.sweep}) if chains else []
        self.k = min(decode.k, longest) if self.tree is None else longest_path(self.tree)
        self.dtype = str(self.target.dtype).removeprefix("torch.")
        self.plan = Plan(
            max_new_tokens=decode.max_new_tokens,
            eos=self.target.eos,
            sampling=sampling_of(decode),
            seed=decode.seed,
            repeats=settings.repeats,
            warmup=settings.warmup_prompts,
            stop=tuple(decode.stop),
        )
        self.once = replace(self.plan, repeats=1, warmup=min(1, settings.warmup_prompts))
        self.meter = NoiseMeter()
        self.load_before = load_average()
        self.fastest: Decode | None = None

    def result(self) -> EvaluationResult | None:
        with self._progress() as self.bar:
            decision = self._decision()
            self._free_memory()
            records = self._main()
        if self.journal.rank:
            return None
        sweep, baselines = decision.sweep, decision.baselines
        self._judge_headline(records, baselines)
        result = EvaluationResult(
            schema_version=SCHEMA_VERSION,
            name=self.config.name,
            command=self.papers.command,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            fingerprint=self.papers.fingerprint,
            settings=self._settings(),
            target=self.target.identity(),
            draft=self.papers.draft,
            conditions=self._conditions(records, baselines),
            baselines=baselines,
            sweep=sweep,
            step_times=self.run.steps.result(),
            summary=summarise([], resamples=100),
            categories={},
            warnings=[*self.papers.warnings, *self._warnings(records)],
            training=self.papers.training,
            records=records,
            sources=self.papers.sources,
            quality=self._quality(records),
            detail=acceptance_detail(records, self.config.evaluate.bootstrap, self.plan.seed),
            resources=self._resources(),
            calibration=self._calibration(records),
        )
        result.summary, result.categories = summarise_result(result)
        return result

    @contextmanager
    def _progress(self) -> Iterator[tqdm]:
        baseline_ways = 2 * len({self.dtype, *BASELINE_DTYPES}) if self.config.evaluate.baselines else 0
        total = decodings_of(len(self.sweep), len(self.ks) + 1, self.once) if self.ks else 0
        total += decodings_of(len(self._baseline_prompts()), baseline_ways, self.once)
        total += decodings_of(len(self.main), 3 if self.config.evaluate.baselines else 2, self.plan)
        quiet = self.journal.rank > 0
        with tqdm(total=total, unit="answer", smoothing=0.1, dynamic_ncols=True, disable=quiet) as bar:
            yield bar

    def _hooks(self, words: str, metered: bool = False) -> Hooks:
        self.bar.set_description(words)
        hooks = Hooks(progress=lambda: _advance(self.bar))
        return replace(hooks, meter=self.meter) if metered else hooks

    def _speculative(self, k: int) -> Decode:
        return _decode(Engine.configured(self.target, self.draft, self.config.decode, k))

    def _decision(self) -> Decision:
        """K and the fastest plain decoding: found once, by the first process, and kept for whoever goes on."""
        decision = self.journal.decision()
        if decision is None and not self.journal.rank:
            sweep = self._sweep()
            baselines, fastest = self._baselines()
            decision = Decision(self.k, sweep, baselines, fastest)
            self.journal.decide(decision)
        self.wait()
        decision = decision or self.journal.decision()
        if decision is None:
            raise UserError(
                f"{self.journal.folder} is not shared by the processes of this evaluation: put `out` on a file system "
                "that all of them see."
            )
        self.k = decision.k
        if decision.fastest is not None and self.fastest is None:
            decoder, dtype = decision.fastest
            self.fastest = _way(decoder, self.target if dtype == self.dtype else self.subject.load_as(dtype))
        return decision

    def _sweep(self) -> list[SweepPoint]:
        """Try every K on a few prompts, all interleaved with plain decoding; keep the fastest."""
        if not self.ks:
            return []
        arms = {PLAIN: _decode(Engine(self.target)), **{str(k): self._speculative(k) for k in self.ks}}
        results = measure(self.sweep, arms, self.once, self._hooks("choosing K"))
        points = []
        for k in self.ks:
            pair = {PLAIN: results[PLAIN], SPECULATIVE: results[str(k)]}
            summary = summarise(
                records(self.sweep, pair, lambda _: "", None),
                resamples=self.config.evaluate.bootstrap,
                seed=self.plan.seed,
            )
            points.append(SweepPoint(k, summary.tau, summary.speedup_same_loop, chosen=False))
        best = max(points, key=lambda point: point.speedup.value or 0.0)
        best.chosen = True
        self.k = best.k
        return points

    def _baseline_prompts(self) -> list[Prompt]:
        return (self.sweep or self.main)[:BASELINE_PROMPTS]

    def _baselines(self) -> tuple[list[Baseline], list[str] | None]:
        """Find the fastest plain decoding; when it is not ours, it (decoder, dtype) joins the main run as a third
        way."""
        if not self.config.evaluate.baselines:
            return [Baseline(OURS, self.dtype, null("evaluate.baselines=false"), chosen=True)], None
        targets = {self.dtype: self.target}
        failed: dict[tuple[str, str], str] = {}
        for dtype in BASELINE_DTYPES:
            if dtype not in targets:
                if short := _too_little_memory(self.target, dtype):
                    failed |= dict.fromkeys([(OURS, dtype), (TRANSFORMERS, dtype)], short)
                    continue
                try:
                    targets[dtype] = self.subject.load_as(dtype)
                except (UserError, MemoryError, torch.OutOfMemoryError) as error:
                    failed |= dict.fromkeys([(OURS, dtype), (TRANSFORMERS, dtype)], f"not timed: {error}")
        ways: dict[tuple[str, str], Decode] = {}
        for dtype, target in targets.items():
            for decoder in (OURS, TRANSFORMERS):
                ways[decoder, dtype] = _way(decoder, target)
        found = time_baselines(
            ways,
            self._baseline_prompts(),
            replace(self.once, max_new_tokens=min(self.once.max_new_tokens, BASELINE_TOKENS)),
            resamples=self.config.evaluate.bootstrap,
            failed=failed,
            hooks=self._hooks("plain decoding"),
        )
        chosen = next(baseline for baseline in found if baseline.chosen)
        if (chosen.decoder, chosen.dtype) != (OURS, self.dtype) or self.config.decode.exact:
            self.fastest = ways[chosen.decoder, chosen.dtype]
            return found, [chosen.decoder, chosen.dtype]
        self.bar.total -= decodings_of(len(self.main), 1, self.plan)
        return found, None

    def _main(self) -> list[PromptRecord]:
        # With decode.exact it is this plain decoding whose text must come out, at the same shape of a forward.
        plain = Engine.configured(self.target, None, self.config.decode, self.k)
        arms = {PLAIN: _decode(plain), SPECULATIVE: self._speculative(self.k)}
        if self.fastest is not None:
            arms[FASTEST] = self.fastest
        self.run = MainRun(
            self.target,
            self.draft,
            arms,
            self.plan,
            self.k,
            self.tree,
            self.subject.following,
        )
        hooks = self._hooks(f"measuring, K={self.k}", metered=True)
        return self.run.records(self.main, self.journal, self.wait, hooks)

    def _warnings(self, records: list[PromptRecord]) -> list[str]:
        return [*self._chains_for_trees(records), *self._beyond_training(records)]

    def _beyond_training(self, records: list[PromptRecord]) -> list[str]:
        """Texts longer than any row the draft was trained on."""
        longest = self.papers.longest_row
        if longest is None:
            return []
        lengths = [r.prompt_tokens + max(len(d.tokens) for d in r.speculative) for r in records]
        longer = sum(length > longest for length in lengths)
        if not longer:
            return []
        return [
            f"{longer} of {len(records)} prompts with their answers are longer than the longest row the draft was "
            f"trained on ({longest} tokens, data.max_length): see the acceptance by context length."
        ]

    def _chains_for_trees(self, records: list[PromptRecord]) -> list[str]:
        """A draft that cannot branch takes no notice of `decode.tree`; whoever reads the result should."""
        rounds = [r for record in records for d in record.speculative for r in d.rounds if not r.cut]
        if (
            self.tree is None
            or size_of(self.tree) == longest_path(self.tree)
            or any(r.scheduled != r.verified for r in rounds)
        ):
            return []
        asked = self.config.decode.tree.value
        return [
            f"decode.tree={asked} was asked for, and this draft proposed chains of up to {self.k} tokens."
        ]

    def _quality(self, records: list[PromptRecord]) -> Quality:
        settings = self.config.evaluate
        plan = QualityPlan(
            settings.metrics,
            settings.allow_code_execution,
            settings.code_seconds,
            settings.bootstrap,
            self.plan.seed,
        )
        return judge(records, self.papers.checks, plan, sampled=self.plan.sampling.temperature > 0)

    def _resources(self) -> Resources:
        longest = self.plan.request(max(self.main, key=lambda prompt: len(prompt.tokens)), 0)
        return measure_resources(
            self.target.device,
            self.draft,
            lambda: self.run.arms[PLAIN](longest),
            lambda: self.run.arms[SPECULATIVE](longest),
            self.papers.load_draft_seconds,
        )

    def _calibration(self, records: list[PromptRecord]) -> Calibration | None:
        """Only of rounds whose length no confidence decided."""
        if self.tree is not None or schedule_of(self.config.decode) != Schedule():
            return None
        return calibrate(records, calibration_key(self.config.decode))

    def _settings(self) -> dict[str, Any]:
        """The configuration, with the K that was measured."""
        settings = self.papers.settings
        return {**settings, "decode": {**settings.get("decode", {}), "k": self.k}}

    def _judge_headline(self, records: list[PromptRecord], baselines: list[Baseline]) -> None:
        """The headline is against the plain decoding that was fastest on all prompts, not on the first few."""
        ours = seconds_a_token([d for record in records for d in record.plain])
        theirs = seconds_a_token([d for record in records for d in record.fastest])
        if ours is None or theirs is None or theirs <= ours:
            return
        for baseline in baselines:
            if baseline.chosen:
                baseline.note = (
                    f"on all prompts {1 / theirs:.2f} tokens a second, the same loop {1 / ours:.2f}"
                )
            baseline.chosen = (baseline.decoder, baseline.dtype) == (OURS, self.dtype)
        for record in records:
            record.fastest = []

    def _free_memory(self) -> None:
        """Copies of the target that are not decoded with any more; models are cycles, which Python keeps a while."""
        gc.collect()
        if self.target.device.type == "cuda":
            torch.cuda.empty_cache()

    def _conditions(self, records: list[PromptRecord], baselines: list[Baseline]) -> Conditions:
        settings, decode = self.config.evaluate, self.config.decode
        chosen = next(baseline for baseline in baselines if baseline.chosen)
        return Conditions(
            dtype=self.dtype,
            attention=str(getattr(self.target.model.config, "_attn_implementation", "unknown")),
            k=self.k,
            rule=_rule(decode),
            batch_size=1,
            temperature=decode.temperature,
            max_new_tokens=decode.max_new_tokens,
            prompt_source=self.papers.prompt_source,
            sweep_prompts=len(self.sweep) if self.ks else 0,
            sweep_overlap=self.overlap if self.ks else 0,
            excluded=self.papers.excluded,
            repeats=settings.repeats,
            resamples=settings.bootstrap,
            seed=decode.seed,
            price_per_hour=settings.price_per_hour,
            fastest_plain=fastest_words(chosen, settings.baselines),
            machine=describe_machine(self.target.device, self.load_before),
            noise=self.meter.verdict(records),
            processes=self.journal.processes,
            resumed=self.run.resumed,
        )


def fastest_words(chosen: Baseline, compared: bool) -> str:
    """What the headline is against, in words that follow "than"."""
    name = "the same loop without a draft" if chosen.decoder == OURS else chosen.decoder
    if compared:
        return f"the fastest plain decoding tried ({name}, {chosen.dtype})"
    return f"plain decoding by {name} ({chosen.dtype}; no other was tried)"


def _too_little_memory(target: Target, dtype: str) -> str | None:
    """Why the target's weights do not fit a second time, in another dtype; None if they do.

    A quarter more than the weights is asked for, as loading and decoding need some too.
    """
    width = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    needed = 1.25 * width * sum(p.numel() for p in target.model.parameters())
    free = psutil.virtual_memory().available
    if target.device.type == "cuda":
        free = min(free, torch.cuda.mem_get_info(target.device)[0])
    if needed <= free:
        return None
    return f"not timed: a copy in {dtype} needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"


def _rule(decode: DecodeConfig) -> str:
    """The rule that `auto` means, for the shape that is asked for."""
    if decode.tree.value != "none":
        kind = "greedy" if decode.temperature == 0 else f"{decode.children.value}-children"
        return f"{kind} {decode.tree.value}-tree"
    if decode.rule.value != "auto":
        return decode.rule.value
    return "greedy" if decode.temperature == 0 else "block"


def _way(decoder: str, target: Target) -> Decode:
    """Plain decoding by this project's loop, or by transformers."""
    return _decode(Engine(target)) if decoder == OURS else transformers_decode(target)


def _decode(engine: Engine) -> Decode:
    def decode(request: Request) -> Result:
        return engine.generate([request])[0]

    return decode


def _advance(bar: tqdm) -> None:
    bar.update(1)
