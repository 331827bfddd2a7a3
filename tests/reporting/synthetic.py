"""A made-up result with the shape of a real one: rounds from given acceptance rates, times with noise."""

import random

from deepspec.decoding.request import Round
from deepspec.evaluation.detail import acceptance_detail
from deepspec.evaluation.result import (
    SCHEMA_VERSION,
    Baseline,
    Conditions,
    Decoding,
    EvaluationResult,
    Machine,
    Metric,
    Noise,
    PromptRecord,
    StepTimes,
    SweepPoint,
    Tie,
)
from deepspec.evaluation.summary import summarise, summarise_result

PLAIN_STEP, DRAFT_STEP, REST = 0.0523, 0.0021, 0.0009
CATEGORIES = {
    "complete a function": 0.74,
    "explain code": 0.6,
    "write a docstring": 0.66,
    "everyday questions": 0.47,
}
LINE = "    total += values[index]  # the running sum\n"


def verify_step(n: int) -> float:
    return PLAIN_STEP * (1 + 0.09 * (n - 1))


def decode(draw: random.Random, count: int, k: int, rate: float) -> Decoding:
    """A speculative decoding of `count` tokens with acceptance `rate` at every position."""
    left, rounds = count - 1, []
    while left > 0:
        drafted = min(k, max(left - 1, 0))
        accepted = 0
        while accepted < drafted and draw.random() < rate * 0.97**accepted:
            accepted += 1
        kept = min(accepted + 1, left)
        jitter = draw.lognormvariate(0, 0.04)
        rounds.append(
            Round(
                drafted, drafted, accepted, kept, kept < accepted + 1,
                DRAFT_STEP * drafted * jitter, verify_step(drafted + 1) * jitter, REST * jitter,
            )
        )  # fmt: skip
        left -= kept
    draft, verify = sum(r.draft_seconds for r in rounds), sum(r.verify_seconds for r in rounds)
    rest = sum(r.rest_seconds for r in rounds)
    return Decoding(
        list(range(count)), LINE * (count // 12), "length", draw.uniform(0.15, 0.4), draft + verify + rest,
        draft, verify, rest, rounds,
    )  # fmt: skip


def plain(draw: random.Random, like: Decoding, pace: float = 1.0) -> Decoding:
    tokens = len(like.tokens) - 1
    verify = tokens * PLAIN_STEP * pace * draw.lognormvariate(0, 0.03)
    rest = tokens * REST
    return Decoding(
        like.tokens, like.text, like.finish, like.prefill_seconds * draw.uniform(0.95, 1.05), verify + rest,
        0.0, verify, rest,
    )  # fmt: skip


def make_records(
    prompts: int = 24, k: int = 5, seed: int = 0, skill: float = 1.0, fastest: bool = True
) -> list[PromptRecord]:
    draw = random.Random(seed)
    found = []
    for number in range(prompts):
        category = list(CATEGORIES)[number % len(CATEGORIES)]
        speculative = decode(
            draw, draw.randint(40, 128), k, CATEGORIES[category] * skill * draw.uniform(0.85, 1.12)
        )
        found.append(
            PromptRecord(
                id=f"{category[:4].strip()}-{number:03d}",
                category=category,
                prompt=f"Complete this function as its docstring says.\n\ndef f{number}(values):",
                prompt_tokens=draw.randint(40, 300),
                plain=[plain(draw, speculative)],
                speculative=[speculative],
                fastest=[plain(draw, speculative, 0.93)] if fastest else [],
                equal=True,
                tie=None,
            )
        )
    return found


def spoil(record: PromptRecord, proven: bool) -> None:
    """Let the speculative answer differ."""
    answer = record.speculative[0]
    at = len(answer.tokens) // 2
    answer.tokens = [*answer.tokens[:at], 7, *answer.tokens[at + 1 :]]
    answer.text = answer.text[: len(answer.text) // 2] + "something else altogether"
    record.equal = False
    record.tie = Tie(at, at, 7, 0.031 if proven else 4.2, 0.062, proven, None if proven else "too far apart")


def make_conditions(k: int, noisy: bool) -> Conditions:
    words = "Noisy: the decoding thread had a core only 71% of the time. Measure again on an idle machine."
    return Conditions(
        dtype="bfloat16",
        attention="sdpa",
        k=k,
        rule="greedy",
        batch_size=1,
        temperature=0.0,
        max_new_tokens=128,
        prompt_source="held-out prompts of the data",
        sweep_prompts=8,
        sweep_overlap=0,
        excluded={},
        repeats=1,
        resamples=500,
        seed=0,
        price_per_hour=None,
        fastest_plain="the fastest plain decoding tried (transformers generate, bfloat16)",
        machine=Machine(
            system="Linux 6.1, Python 3.11.9",
            cpu="A Processor @ 2.80GHz",
            cores=2,
            logical_cores=2,
            threads=2,
            memory_gib=15.6,
            device="cpu",
            load_before=[0.4, 0.8, 1.1],
            load_after=[2.0, 1.7, 1.3],
            versions={"deepspec": "0.1.0", "torch": "2.13.0"},
        ),
        noise=Noise(0.71 if noisy else 0.99, 1.95, 0.06, noisy, words if noisy else "Quiet."),
    )


def make_result(
    records: list[PromptRecord] | None = None, k: int = 5, noisy: bool = False
) -> EvaluationResult:
    records = make_records(k=k) if records is None else records
    sweep = []
    for tried in (2, 3, 5, 7):
        small = summarise(make_records(8, tried, seed=9, fastest=False), resamples=300)
        sweep.append(SweepPoint(tried, small.tau, small.speedup_same_loop, tried == k))
    result = EvaluationResult(
        schema_version=SCHEMA_VERSION,
        name="synthetic",
        command="python -m deepspec.evaluate +recipe=quickstart evaluate.max_prompts=24",
        created="2026-11-30T21:16:04+00:00",
        fingerprint="0011223344556677",
        settings={"name": "synthetic", "decode": {"k": k}},
        target={"name": "Made-up-135M-Instruct", "weights": "0123456789abcdef"},
        draft={"algorithm": "eagle3", "parameters": 7_700_000},
        conditions=make_conditions(k, noisy),
        baselines=[
            Baseline("deepspec", "bfloat16", Metric(18.9, 18.5, 19.2, 4), False),
            Baseline("transformers generate", "bfloat16", Metric(20.1, 19.9, 20.4, 4), True),
            Baseline("deepspec", "float32", Metric(13.1, 12.8, 13.3, 4), False),
            Baseline(
                "transformers generate", "float32", Metric(None, None, None, 0, "not timed"), False, "full"
            ),
        ],
        sweep=sweep,
        step_times=StepTimes(
            context=210,
            verify=[verify_step(n) for n in range(1, k + 2)],
            draft=[DRAFT_STEP * j for j in range(1, k + 1)],
            repeats=7,
        ),
        summary=summarise([], resamples=100),
        categories={},
        warnings=[],
        training=make_history(),
        records=records,
    )
    result.summary, result.categories = summarise_result(result)
    result.detail = acceptance_detail(records, resamples=500)
    return result


def make_history(steps: int = 400) -> list[dict[str, object]]:
    draw = random.Random(3)
    rows: list[dict[str, object]] = []
    for step in range(10, steps + 1, 10):
        progress = 1 - 1 / (1 + step / 60)
        loss = 6.5 - 3.9 * progress + draw.gauss(0, 0.08)
        rows.append({"step": step, "loss": loss, "accuracy": [0.62 * progress * 0.9**s for s in range(5)]})
        if step % 100 == 0:
            acceptance = [0.6 * progress * 0.94**s for s in range(7)]
            rows.append(
                {
                    "step": step,
                    "held_out_loss": loss + 0.2,
                    "tau": 1 + 1.15 * progress,
                    "k": 7,
                    "acceptance": acceptance,
                }
            )
    return rows
