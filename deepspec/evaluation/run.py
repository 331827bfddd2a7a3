"""One evaluation from beginning to end: sweep over K, baselines, the main run, the numbers."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import psutil
import torch
from tqdm import tqdm

from deepspec.config.schema import Config, DecodeConfig
from deepspec.decoding import Engine
from deepspec.decoding.engine import sampling_of, tree_of
from deepspec.decoding.request import Request, Result
from deepspec.decoding.steps import draft_steps, verify_steps
from deepspec.decoding.trees import longest_path, size_of
from deepspec.drafts.contract import Drafter
from deepspec.errors import UserError
from deepspec.evaluation.bare import logits_two_ways
from deepspec.evaluation.baselines import OURS, TRANSFORMERS, time_baselines, transformers_decode
from deepspec.evaluation.ideal import StepClock
from deepspec.evaluation.machine import NoiseMeter, describe_machine, load_average
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
from deepspec.target import Target

BASELINE_PROMPTS = 4  # enough, with so many tokens each, to tell which plain decoding is the fastest;
BASELINE_TOKENS = 32  # the main run then measures it properly
BASELINE_DTYPES = ("float32", "bfloat16")


@dataclass
class Subject:
    """What is evaluated. `load_as`: the same target's weights in another dtype, for the baselines."""

    target: Target
    draft: Drafter
    load_as: Callable[[str], Target]


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
    checks: dict[str, Check] = field(default_factory=dict)  # of prompts by id: how an answer is judged


def evaluate(config: Config, subject: Subject, prompts: Sequence[Prompt], papers: Papers) -> EvaluationResult:
    """Measure everything; writes nothing. Prints progress with the remaining time."""
    return _Evaluation(config, subject, prompts, papers).result()


class _Evaluation:
    def __init__(self, config: Config, subject: Subject, prompts: Sequence[Prompt], papers: Papers) -> None:
        self.config, self.target, self.draft, self.papers = config, subject.target, subject.draft, papers
        self.load_as = subject.load_as
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

    def result(self) -> EvaluationResult:
        with self._progress() as self.bar:
            sweep = self._sweep()
            baselines = self._baselines()
            self._free_memory()
            records = self._main()
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
            step_times=self.steps.result(),
            summary=summarise([], resamples=100),
            categories={},
            warnings=[*self.papers.warnings, *self._chains_for_trees(records)],
            training=self.papers.training,
            records=records,
            sources=self.papers.sources,
            quality=self._quality(records),
        )
        result.summary, result.categories = summarise_result(result)
        return result

    @contextmanager
    def _progress(self) -> Iterator[tqdm]:
        baseline_ways = 2 * len({self.dtype, *BASELINE_DTYPES}) if self.config.evaluate.baselines else 0
        total = decodings_of(len(self.sweep), len(self.ks) + 1, self.once) if self.ks else 0
        total += decodings_of(len(self._baseline_prompts()), baseline_ways, self.once)
        total += decodings_of(len(self.main), 3 if self.config.evaluate.baselines else 2, self.plan)
        with tqdm(total=total, unit="answer", smoothing=0.1, dynamic_ncols=True) as bar:
            yield bar

    def _hooks(self, words: str, metered: bool = False) -> Hooks:
        self.bar.set_description(words)
        hooks = Hooks(progress=lambda: _advance(self.bar))
        return replace(hooks, meter=self.meter) if metered else hooks

    def _speculative(self, k: int) -> Decode:
        return _decode(Engine.configured(self.target, self.draft, self.config.decode, k))

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

    def _baselines(self) -> list[Baseline]:
        """Find the fastest plain decoding; when it is not ours, it joins the main run as a third way."""
        if not self.config.evaluate.baselines:
            return [Baseline(OURS, self.dtype, null("evaluate.baselines=false"), chosen=True)]
        targets = {self.dtype: self.target}
        failed: dict[tuple[str, str], str] = {}
        for dtype in BASELINE_DTYPES:
            if dtype not in targets:
                if short := _too_little_memory(self.target, dtype):
                    failed |= dict.fromkeys([(OURS, dtype), (TRANSFORMERS, dtype)], short)
                    continue
                try:
                    targets[dtype] = self.load_as(dtype)
                except (UserError, MemoryError, torch.OutOfMemoryError) as error:
                    failed |= dict.fromkeys([(OURS, dtype), (TRANSFORMERS, dtype)], f"not timed: {error}")
        ways: dict[tuple[str, str], Decode] = {}
        for dtype, target in targets.items():
            ways[OURS, dtype] = _decode(Engine(target))
            ways[TRANSFORMERS, dtype] = transformers_decode(target)
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
        else:
            self.bar.total -= decodings_of(len(self.main), 1, self.plan)
        return found

    def _main(self) -> list[PromptRecord]:
        # With decode.exact it is this plain decoding whose text must come out, at the same shape of a forward.
        plain = Engine.configured(self.target, None, self.config.decode, self.k)
        arms = {PLAIN: _decode(plain), SPECULATIVE: self._speculative(self.k)}
        if self.fastest is not None:
            arms[FASTEST] = self.fastest
        read = self.k if self.tree is None else size_of(self.tree)
        self.steps = StepClock(read, len(self.main), whole=self.tree is not None)
        hooks = replace(self._hooks(f"measuring, K={self.k}", metered=True), after=self._time_steps)
        results = measure(self.main, arms, self.plan, hooks)
        greedy = self.plan.sampling.temperature == 0
        proof = logits_two_ways(self.target, read, self.plan.sampling.repetition_penalty) if greedy else None
        return records(self.main, results, self._text, proof)

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

    def _text(self, tokens: list[int]) -> str:
        if self.target.tokenizer is None:
            return ""
        kept = tokens[:-1] if tokens and tokens[-1] in self.target.eos else tokens
        return str(self.target.tokenizer.decode(kept))

    def _time_steps(self, number: int, results: Mapping[str, Result]) -> None:
        """Bare steps in the middle of the answer just decoded, for rounds like its own."""
        answer = results[SPECULATIVE]
        if not answer.rounds or not self.steps.wants(number):
            return
        prompt = self.main[number]
        text = [*prompt.tokens, *answer.tokens[: (len(answer.tokens) + 1) // 2]]
        committed = max(1, round(sum(r.committed for r in answer.rounds) / len(answer.rounds)))
        self.steps.take(
            verify_steps(self.target, text, self.steps.k + 1),
            draft_steps(
                self.target,
                self.draft,
                text,
                self.plan.request(prompt, 0),
                committed,
                tree=self.tree,
                sampled_children=self.config.decode.children.value == "sampled",
            ),
            context=len(text),
        )

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


def _decode(engine: Engine) -> Decode:
    def decode(request: Request) -> Result:
        return engine.generate([request])[0]

    return decode


def _advance(bar: tqdm) -> None:
    bar.update(1)
