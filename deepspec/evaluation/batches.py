"""Several requests at once: tokens a second of each stream and of all together, plain and speculative."""

import statistics
import time
from collections.abc import Callable, Sequence

from deepspec.config.schema import DecodeConfig
from deepspec.decoding import Engine
from deepspec.decoding.request import Request, Result
from deepspec.drafts.contract import Drafter
from deepspec.evaluation.findings import Batched, Throughput
from deepspec.evaluation.measure import PLAIN, SPECULATIVE, Plan
from deepspec.evaluation.prompts import Prompt
from deepspec.target import Target

Run = tuple[float, list[Result]]  # seconds, and what was decoded in them


def measure_batches(
    target: Target,
    draft: Drafter,
    decode: DecodeConfig,
    k: int,
    prompts: Sequence[Prompt],
    plan: Plan,
    sizes: Sequence[int],
) -> list[Batched]:
    """All prompts, at most `size` at once (waiting ones enter as others finish), both ways, taking turns at going
    first; `plan.repeats` times, after one batch that does not count."""
    found = []
    for size in sizes:
        engines = {
            PLAIN: Engine(target, max_batch_size=size),
            SPECULATIVE: Engine.configured(target, draft, decode, k, max_batch_size=size),
        }
        requests = [plan.request(prompt, 0) for prompt in prompts]
        for engine in engines.values():
            engine.generate(requests[:size])
        runs: dict[str, list[Run]] = {name: [] for name in engines}
        for repeat in range(plan.repeats):
            names = list(engines)
            for name in names[repeat % 2 :] + names[: repeat % 2]:
                runs[name].append(timed(engines[name].generate, requests))
        found.append(batched(size, runs[PLAIN], runs[SPECULATIVE]))
    return found


def timed(decode: Callable[[Sequence[Request]], list[Result]], requests: Sequence[Request]) -> Run:
    """Seconds of the whole, and the results."""
    start = time.perf_counter()
    results = decode(requests)
    return time.perf_counter() - start, results


def batched(size: int, plain: Sequence[Run], speculative: Sequence[Run]) -> Batched:
    """The numbers of one batch size."""
    pairs = zip(plain, speculative, strict=True)
    equal = [a.tokens == b.tokens for (_, one), (_, other) in pairs for a, b in zip(one, other, strict=True)]
    return Batched(size, len(equal), throughput(plain), throughput(speculative), sum(equal))


def throughput(runs: Sequence[Run]) -> Throughput:
    """In total: all tokens over all seconds, prefill included. A stream: decoding alone, at the median."""
    tokens = sum(len(result.tokens) for _, results in runs for result in results)
    streams = [
        (len(result.tokens) - 1) / result.decode_seconds
        for _, results in runs
        for result in results
        if len(result.tokens) > 1
    ]
    return Throughput(
        tokens / sum(seconds for seconds, _ in runs), statistics.median(streams) if streams else None
    )
