"""One evaluation from beginning to end: what is decided first, the main run, the numbers."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import torch
from tqdm import tqdm

from deepspec.config.schema import Config
from deepspec.decoding.engine import calibration_key, sampling_of, schedule_of, tree_of
from deepspec.decoding.scheduler import Schedule
from deepspec.decoding.trees import longest_path
from deepspec.errors import UserError
from deepspec.evaluation.batches import measure_batches
from deepspec.evaluation.calibration import calibrate
from deepspec.evaluation.choosing import BASELINE_DTYPES, BASELINE_PROMPTS, Chooser
from deepspec.evaluation.conditions import conditions_of, judge_headline, warnings_of
from deepspec.evaluation.detail import acceptance_detail
from deepspec.evaluation.findings import Calibration, Resources
from deepspec.evaluation.journal import Decision, Journal
from deepspec.evaluation.machine import NoiseMeter, load_average
from deepspec.evaluation.main_run import MainRun
from deepspec.evaluation.measure import FASTEST, PLAIN, SPECULATIVE, Decode, Hooks, Plan, decodings_of
from deepspec.evaluation.prompts import Prompt, choose
from deepspec.evaluation.quality.findings import Quality
from deepspec.evaluation.quality.score import QualityPlan, judge
from deepspec.evaluation.resources import measure_resources
from deepspec.evaluation.result import SCHEMA_VERSION, EvaluationResult, PromptRecord
from deepspec.evaluation.subject import Papers, Subject
from deepspec.evaluation.summary import summaries
from deepspec.evaluation.threads import threads_as_they_were
from deepspec.evaluation.ways import configured_way, plain_way

WARMUP_TOKENS = 16


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
    with threads_as_they_were():
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
        if any(size > 1 for size in settings.batch_sizes):
            self.target.require("ragged")  # said now and not at the end
        self.main, self.sweep, self.overlap = choose(prompts, settings.max_prompts, settings.sweep_prompts)
        self.tree = tree_of(decode)
        # an answer's first token is the prefill's, and the round that ends it commits one of the target's own
        longest = max(1, decode.max_new_tokens - 2)
        chains = self.sweep and self.tree is None
        self.ks = sorted({min(k, longest) for k in settings.sweep}) if chains else []
        self.k = min(decode.k, longest) if self.tree is None else longest_path(self.tree)
        self.plan = Plan(
            max_new_tokens=decode.max_new_tokens,
            eos=self.target.eos,
            sampling=sampling_of(decode),
            seed=decode.seed,
            repeats=settings.repeats,
            warmup=settings.warmup_prompts,
            # what is compiled is compiled for the lengths of a whole answer
            warmup_tokens=None if decode.compile else WARMUP_TOKENS,
            stop=tuple(decode.stop),
        )
        self.once = replace(self.plan, repeats=1, warmup=min(1, settings.warmup_prompts))
        self.meter = NoiseMeter()
        self.load_before = load_average()

    def result(self) -> EvaluationResult | None:
        with self._progress() as self.bar:
            decision, fastest = self._decision()
            self._free_memory()
            records = self._main(fastest)
        if self.journal.rank:
            return None
        baselines, steps = decision.baselines, self.run.steps.result()
        judge_headline(records, baselines, self.subject.dtype)
        conditions = conditions_of(
            self.config,
            self.target,
            self.papers,
            next(baseline for baseline in baselines if baseline.chosen),
            self.meter.verdict(records),
            k=self.k,
            load_before=self.load_before,
            sweep=(len(self.sweep), self.overlap) if self.ks else (0, 0),
            processes=self.journal.processes,
            resumed=self.run.resumed,
            threads=decision.threads,
        )
        summary, categories = summaries(records, conditions, steps)
        asked = self.config.decode.tree.value
        return EvaluationResult(
            schema_version=SCHEMA_VERSION,
            name=self.config.name,
            command=self.papers.command,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            fingerprint=self.papers.fingerprint,
            settings=self._settings(),
            target=self.target.identity(),
            draft=self.papers.draft,
            conditions=conditions,
            baselines=baselines,
            sweep=decision.sweep,
            step_times=steps,
            summary=summary,
            categories=categories,
            warnings=[
                *self.papers.warnings,
                *warnings_of(records, self.papers.longest_row, self.tree, asked, self.k),
            ],
            training=self.papers.training,
            records=records,
            sources=self.papers.sources,
            quality=self._quality(records),
            detail=acceptance_detail(records, self.config.evaluate.bootstrap, self.plan.seed),
            resources=self._resources(),
            calibration=self._calibration(records),
            batches=measure_batches(
                self.target,
                self.draft,
                self.config.decode,
                self.k,
                self.main,
                self.plan,
                self.config.evaluate.batch_sizes,
            ),
        )

    @contextmanager
    def _progress(self) -> Iterator[tqdm]:
        baseline_ways = (
            2 * len({self.subject.dtype, *BASELINE_DTYPES}) if self.config.evaluate.baselines else 0
        )
        total = decodings_of(len(self.sweep), len(self.ks) + 1, self.once) if self.ks else 0
        total += decodings_of(len(self._baseline_prompts()), baseline_ways, self.once)
        total += decodings_of(len(self.main), 3 if self.config.evaluate.baselines else 2, self.plan)
        quiet = self.journal.rank > 0
        with tqdm(total=total, unit="answer", smoothing=0.1, dynamic_ncols=True, disable=quiet) as bar:
            yield bar

    def _hooks(self, words: str) -> Hooks:
        self.bar.set_description(words)
        return Hooks(progress=lambda: _advance(self.bar))

    def _baseline_prompts(self) -> list[Prompt]:
        return (self.sweep or self.main)[:BASELINE_PROMPTS]

    def _decision(self) -> tuple[Decision, Decode | None]:
        """K and the fastest plain decoding (None: our loop as it stands): found once, by the first process, and kept
        for whoever goes on."""
        decision, fastest = self.journal.decision(), None
        if decision is None and not self.journal.rank:
            chooser = Chooser(
                self.config,
                self.subject,
                self.k,
                self.ks,
                self.sweep,
                self._baseline_prompts(),
                self.once,
                self._hooks,
            )
            decision, fastest = chooser.decide()
            self.journal.decide(decision)
        self.wait()
        decision = decision or self.journal.decision()
        if decision is None:
            raise UserError(
                f"{self.journal.folder} is not shared by the processes of this evaluation: put `out` on a file system "
                "that all of them see."
            )
        self.k = decision.k
        for tried in decision.threads:
            if tried.chosen:
                torch.set_num_threads(tried.threads)
        if decision.fastest is None:
            self.bar.total -= decodings_of(len(self.main), 1, self.plan) * self.config.evaluate.baselines
        elif fastest is None:
            decoder, dtype = decision.fastest
            same = dtype == self.subject.dtype
            fastest = plain_way(self.target if same else self.subject.load_as(dtype), decoder)
        return decision, fastest

    def _main(self, fastest: Decode | None) -> list[PromptRecord]:
        arms = {
            # with decode.exact its text is what must come out, at the same shape of a forward
            PLAIN: configured_way(self.target, None, self.config.decode, self.k),
            SPECULATIVE: configured_way(self.target, self.draft, self.config.decode, self.k),
        }
        if fastest is not None:
            arms[FASTEST] = fastest
        self.run = MainRun(
            self.target, self.draft, arms, self.plan, self.k, self.tree, self.subject.following
        )
        hooks = replace(self._hooks(f"measuring, K={self.k}"), meter=self.meter)
        return self.run.records(self.main, self.journal, self.wait, hooks)

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

    def _free_memory(self) -> None:
        """Copies of the target that are not decoded with any more; models are cycles, which Python keeps a while."""
        gc.collect()
        if self.target.device.type == "cuda":
            torch.cuda.empty_cache()


def _advance(bar: tqdm) -> None:
    bar.update(1)
