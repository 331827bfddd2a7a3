"""What is decided before the main run, on a few prompts: K, and which plain decoding is the fastest here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import psutil
import torch

from deepspec.config.schema import Config
from deepspec.errors import UserError
from deepspec.evaluation.baselines import OURS, TRANSFORMERS, time_baselines
from deepspec.evaluation.journal import Decision
from deepspec.evaluation.measure import PLAIN, SPECULATIVE, Decode, Hooks, Plan, measure, records
from deepspec.evaluation.prompts import Prompt
from deepspec.evaluation.result import Baseline, SweepPoint, ThreadSpeed
from deepspec.evaluation.statistics import null
from deepspec.evaluation.subject import Subject
from deepspec.evaluation.summary import summarise
from deepspec.evaluation.threads import candidates, try_threads
from deepspec.evaluation.ways import configured_way, plain_way
from deepspec.target import Target

BASELINE_PROMPTS = 4  # enough, with so many tokens each, to tell which plain decoding is the fastest;
BASELINE_TOKENS = 32  # the main run then measures it properly
THREAD_TOKENS = 12
TIE = 0.02  # of the fastest K's speed, within which a shorter draft is taken
BASELINE_DTYPES = ("float32", "bfloat16")

Way = tuple[str, str]  # decoder, dtype


@dataclass
class Chooser:
    """ks: values of K to try on the sweep's prompts, none = `k` stands. prompts: of the baselines, the first few of
    which are decoded. plan: once each. hooks: what goes on around the decodings, by what they are for."""

    config: Config
    subject: Subject
    k: int
    ks: Sequence[int]
    sweep_prompts: Sequence[Prompt]
    baseline_prompts: Sequence[Prompt]
    plan: Plan
    hooks: Callable[[str], Hooks]

    def decide(self) -> tuple[Decision, Decode | None]:
        """What the main run needs to know; with it the fastest plain decoding, where that is not our loop as it
        stands (to be loaded anew by whoever goes on from the decision alone)."""
        threads = self._threads()
        sweep, k = self._sweep()
        baselines, ways = self._baselines()
        chosen = next(baseline for baseline in baselines if baseline.chosen)
        # with decode.exact the main run's plain decoding is another, and slower, than this one
        ours = (chosen.decoder, chosen.dtype) == (OURS, self.subject.dtype) and not self.config.decode.exact
        if ours or not ways:
            return Decision(k, sweep, baselines, None, threads), None
        return (
            Decision(k, sweep, baselines, [chosen.decoder, chosen.dtype], threads),
            ways[chosen.decoder, chosen.dtype],
        )

    def _threads(self) -> list[ThreadSpeed]:
        """The number of threads for everything that follows, by plain decoding: the headline's other side."""
        if self.config.evaluate.threads or self.subject.target.device.type != "cpu":
            return []
        few = replace(self.plan, max_new_tokens=min(self.plan.max_new_tokens, THREAD_TOKENS))
        request = few.request(self.baseline_prompts[0], 0)
        return try_threads(plain_way(self.subject.target), request, candidates(torch.get_num_threads()))

    def _sweep(self) -> tuple[list[SweepPoint], int]:
        """Try every K on a few prompts, all interleaved with plain decoding; keep the fastest."""
        if not self.ks:
            return [], self.k
        target, draft, decode = self.subject.target, self.subject.draft, self.config.decode
        arms = {PLAIN: plain_way(target)} | {
            str(k): configured_way(target, draft, decode, k) for k in self.ks
        }
        results = measure(self.sweep_prompts, arms, self.plan, self.hooks("choosing K"))
        points = []
        for k in self.ks:
            pair = {PLAIN: results[PLAIN], SPECULATIVE: results[str(k)]}
            summary = summarise(
                records(self.sweep_prompts, pair, lambda _: "", None),
                resamples=self.config.evaluate.bootstrap,
                seed=self.plan.seed,
            )
            points.append(SweepPoint(k, summary.tau, summary.speedup_same_loop, chosen=False))
        fastest = max(point.speedup.value or 0.0 for point in points)
        # a few prompts do not tell so little apart, and the shorter draft wastes less where it is wrong
        best = min(
            (point for point in points if (point.speedup.value or 0.0) >= (1 - TIE) * fastest),
            key=lambda point: point.k,
        )
        best.chosen = True
        return points, best.k

    def _baselines(self) -> tuple[list[Baseline], dict[Way, Decode]]:
        """Every plain decoding that can be had, timed, and the ways themselves."""
        if not self.config.evaluate.baselines:
            return [Baseline(OURS, self.subject.dtype, null("evaluate.baselines=false"), chosen=True)], {}
        targets, failed = self._targets()
        ways = {
            (decoder, dtype): plain_way(target, decoder)
            for dtype, target in targets.items()
            for decoder in (OURS, TRANSFORMERS)
        }
        found = time_baselines(
            ways,
            self.baseline_prompts[:BASELINE_PROMPTS],
            replace(self.plan, max_new_tokens=min(self.plan.max_new_tokens, BASELINE_TOKENS)),
            resamples=self.config.evaluate.bootstrap,
            failed=failed,
            hooks=self.hooks("plain decoding"),
        )
        return found, ways

    def _targets(self) -> tuple[dict[str, Target], dict[Way, str]]:
        """The target in every dtype that fits into memory, and why the others do not."""
        targets = {self.subject.dtype: self.subject.target}
        failed: dict[Way, str] = {}
        for dtype in BASELINE_DTYPES:
            if dtype in targets:
                continue
            why = too_little_memory(self.subject.target, dtype)
            if why is None:
                try:
                    targets[dtype] = self.subject.load_as(dtype)
                except (UserError, MemoryError, torch.OutOfMemoryError) as error:
                    why = f"not timed: {error}"
            if why is not None:
                failed |= dict.fromkeys([(OURS, dtype), (TRANSFORMERS, dtype)], why)
        return targets, failed


def too_little_memory(target: Target, dtype: str) -> str | None:
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
