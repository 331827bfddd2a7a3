"""Decode every prompt every way, in alternating order, and keep what happened."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

from deepspec.decoding.request import Request, Result, Round, Sampling
from deepspec.evaluation.prompts import Prompt
from deepspec.evaluation.result import Decoding, PromptRecord
from deepspec.evaluation.ties import LogitsTwoWays, prove_tie

PLAIN, SPECULATIVE, FASTEST = "plain", "speculative", "fastest"
DIGITS = 7  # of a second: below what a clock resolves, and a result file stays readable

Decode = Callable[[Request], Result]
Detokenise = Callable[[list[int]], str]


@dataclass(frozen=True)
class Plan:
    """How the requests of a measurement are made. `repeats`: every prompt, every way. `warmup`: the first
    prompts are decoded every way once before anything counts, up to `warmup_tokens` (None: to their end)."""

    max_new_tokens: int
    eos: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    repeats: int = 1
    warmup: int = 1
    warmup_tokens: int | None = None
    stop: tuple[str, ...] = ()

    def request(self, prompt: Prompt, repeat: int) -> Request:
        """The request of one prompt; its random draws depend on the seed, the prompt and the repeat alone."""
        key = f"{self.seed}/{prompt.id}/{repeat}".encode()
        seed = int.from_bytes(hashlib.sha256(key).digest()[:6], "big")
        tokens = list(prompt.tokens)
        return Request(tokens, self.max_new_tokens, self.sampling, seed, self.eos, prompt.id, self.stop)


@dataclass
class Hooks:
    """What goes on around a decoding: `progress` after each, `meter` around those that count, `after` when a
    prompt is done, with its number and its first result by each arm."""

    progress: Callable[[], None] = field(default=lambda: None)
    meter: Callable[[], AbstractContextManager[None]] = field(default=nullcontext)
    after: Callable[[int, Mapping[str, Result]], None] = field(default=lambda number, results: None)


def decodings_of(prompts: int, arms: int, plan: Plan) -> int:
    """How many decodings `measure` will do, for a progress bar."""
    return arms * (min(plan.warmup, prompts) + prompts * plan.repeats)


def measure(
    prompts: Sequence[Prompt],
    arms: Mapping[str, Decode],
    plan: Plan,
    hooks: Hooks | None = None,
    *,
    first: int = 0,
) -> dict[str, list[list[Result]]]:
    """Decode each prompt `plan.repeats` times by each arm → arm → prompt → repeat → result.

    The arms take turns at being first (A B, B A, …; with three A B C, B C A, …), so that a machine that warms
    up, slows down or is disturbed meets them alike. first: number of the first prompt, where they are measured in
    parts.
    """
    hooks = hooks or Hooks()
    names = list(arms)
    warm_up(prompts, arms, plan, hooks)
    results: dict[str, list[list[Result]]] = {name: [[] for _ in prompts] for name in names}
    for number, prompt in enumerate(prompts):
        for repeat in range(plan.repeats):
            begin = (first + number + repeat) % len(names)
            for name in names[begin:] + names[:begin]:
                with hooks.meter():
                    result = arms[name](plan.request(prompt, repeat))
                results[name][number].append(result)
                hooks.progress()
        hooks.after(first + number, {name: results[name][number][0] for name in names})
    return results


def warm_up(prompts: Sequence[Prompt], arms: Mapping[str, Decode], plan: Plan, hooks: Hooks) -> None:
    """Decode the first `plan.warmup` prompts every way; nothing of it counts."""
    short = replace(plan, max_new_tokens=min(plan.max_new_tokens, plan.warmup_tokens or plan.max_new_tokens))
    for prompt in prompts[: plan.warmup]:
        for decode in arms.values():
            decode(short.request(prompt, 0))
            hooks.progress()


def records(
    prompts: Sequence[Prompt],
    results: Mapping[str, list[list[Result]]],
    detokenise: Detokenise,
    logits_two_ways: LogitsTwoWays | None,
) -> list[PromptRecord]:
    """Per-prompt records of what `measure` returned.

    logits_two_ways: for greedy decoding, where outputs are compared and differences examined (`prove_tie`);
    None for sampled decoding, where they are not comparable.
    """
    found = []
    for number, prompt in enumerate(prompts):
        plain, speculative = results[PLAIN][number], results[SPECULATIVE][number]
        fastest = results[FASTEST][number] if FASTEST in results else []
        record = PromptRecord(
            id=prompt.id,
            category=prompt.category,
            prompt=prompt.text,
            prompt_tokens=len(prompt.tokens),
            plain=[_decoding(r, detokenise, keep_rounds=False) for r in plain],
            speculative=[_decoding(r, detokenise, keep_rounds=True) for r in speculative],
            fastest=[_decoding(r, detokenise, keep_rounds=False) for r in fastest],
            equal=None,
            tie=None,
            turn=prompt.turn,
            references=list(prompt.references),
        )
        if logits_two_ways is not None:
            _compare(record, prompt, logits_two_ways)
        found.append(record)
    return found


def _compare(record: PromptRecord, prompt: Prompt, logits_two_ways: LogitsTwoWays) -> None:
    """Set `equal` and `tie`; of several differing repeats an unproven one is shown first."""
    ties = [
        tie
        for plain, speculative in zip(record.plain, record.speculative, strict=True)
        if (tie := prove_tie(logits_two_ways, prompt.tokens, plain.tokens, speculative.tokens)) is not None
    ]
    record.equal = not ties
    record.tie = min(ties, key=lambda tie: tie.proven, default=None)


def _decoding(result: Result, detokenise: Detokenise, keep_rounds: bool) -> Decoding:
    """`rest` is what the rounds' draft and verify seconds leave of the decode seconds: the parts add up."""
    rounds = [_rounded(r) for r in result.rounds]
    told = bool(rounds) or len(result.tokens) <= 1
    draft, verify = sum(r.draft_seconds for r in rounds), sum(r.verify_seconds for r in rounds)
    return Decoding(
        tokens=list(result.tokens),
        text=detokenise(result.tokens),
        finish=result.finish,
        prefill_seconds=round(result.prefill_seconds, DIGITS),
        decode_seconds=round(result.decode_seconds, DIGITS),
        draft_seconds=round(draft, DIGITS) if told else None,
        verify_seconds=round(verify, DIGITS) if told else None,
        rest_seconds=round(max(result.decode_seconds - draft - verify, 0.0), DIGITS) if told else None,
        rounds=rounds if keep_rounds else [],
    )


def _rounded(r: Round) -> Round:
    return replace(
        r,
        draft_seconds=round(r.draft_seconds, DIGITS),
        verify_seconds=round(r.verify_seconds, DIGITS),
        rest_seconds=round(r.rest_seconds, DIGITS),
        confidence=[round(c, 4) for c in r.confidence],
    )
