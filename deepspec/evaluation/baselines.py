"""How fast plain decoding can be here: number format × {this project's loop, transformers' generate}."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from deepspec.decoding.request import Request, Result
from deepspec.evaluation.measure import Decode, Hooks, Plan, measure
from deepspec.evaluation.prompts import Prompt
from deepspec.evaluation.result import Baseline, Metric
from deepspec.evaluation.statistics import Bootstrap, Column, null

OURS, TRANSFORMERS = "deepspec", "transformers generate"


class Model(Protocol):
    """The part of a target that transformers' generate needs."""

    model: Any
    tokenizer: Any
    device: torch.device


class _FirstToken(BaseStreamer):
    """Notes when the first generated token arrives (the first `put` brings the prompt)."""

    def __init__(self) -> None:
        self.puts = 0
        self.first: float | None = None

    def put(self, value: torch.Tensor) -> None:
        self.puts += 1
        if self.puts == 2:
            self.first = time.perf_counter()

    def end(self) -> None:
        pass


def transformers_decode(target: Model, **more: Any) -> Decode:
    """Plain decoding as a user of transformers does it: `generate` with a KV cache, streaming its tokens.

    more: further arguments of `generate`, of its own assisted and prompt-lookup decoding.
    """

    def decode(request: Request) -> Result:
        tokens = torch.tensor([request.tokens], device=target.device)
        streamer = _FirstToken()
        if request.sampling.temperature > 0:
            torch.manual_seed(request.seed)
        start = time.perf_counter()
        with _no_defaults(target.model):
            output = target.model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                generation_config=_generation_config(request),
                streamer=streamer,
                tokenizer=target.tokenizer if request.stop else None,
                **more,
            )
        answer = output[0, len(request.tokens) :].tolist()
        end = time.perf_counter()
        first = end if streamer.first is None else streamer.first
        ended = "stop" if request.stop and len(answer) < request.max_new_tokens else "length"
        finish = "eos" if answer and answer[-1] in request.eos else ended
        return Result(request.id, answer, finish, first - start, end - first)

    return decode


@contextmanager
def _no_defaults(model: Any) -> Iterator[None]:
    """The checkpoint's generation settings put away: `generate` fills in from them whatever is not given."""
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


def _generation_config(request: Request) -> GenerationConfig:
    """Every setting is given: a checkpoint's own defaults must not make this another decoder."""
    sampling = request.sampling
    sampled = sampling.temperature > 0
    return GenerationConfig(
        max_new_tokens=request.max_new_tokens,
        use_cache=True,
        eos_token_id=list(request.eos) or None,
        pad_token_id=request.eos[0] if request.eos else 0,
        repetition_penalty=sampling.repetition_penalty,
        stop_strings=list(request.stop) or None,
        do_sample=sampled,
        temperature=sampling.temperature if sampled else 1.0,
        top_k=sampling.top_k if sampled else 50,  # where nothing is sampled, the values that raise no warning
        top_p=sampling.top_p if sampled else 1.0,
        min_p=sampling.min_p or None,
    )


def time_baselines(
    ways: dict[tuple[str, str], Decode],
    prompts: Sequence[Prompt],
    plan: Plan,
    *,
    resamples: int,
    failed: dict[tuple[str, str], str] | None = None,
    hooks: Hooks | None = None,
) -> list[Baseline]:
    """Time every (decoder, dtype) on a few prompts, alternating, and mark the fastest.

    failed: ways that could not be had, with the reason; they are listed, not dropped. Greedy answers that are
    not our loop's in the same dtype are counted: the two do not round alike, or do not decode alike.
    """
    names = {f"{decoder} {dtype}": (decoder, dtype) for decoder, dtype in ways}
    arms = {name: ways[way] for name, way in names.items()}
    measured = measure(prompts, arms, plan, hooks)
    speeds = {names[name]: _speed(results, resamples, plan.seed) for name, results in measured.items()}
    fastest = max(speeds, key=lambda way: speeds[way].value or 0.0)
    found = [Baseline(*way, speed, chosen=way == fastest) for way, speed in speeds.items()]
    if plan.sampling.temperature == 0:
        texts = {way: [[r.tokens for r in rs] for rs in measured[name]] for name, way in names.items()}
        for baseline in found:
            ours = texts.get((OURS, baseline.dtype))
            if baseline.decoder != OURS and ours is not None:
                theirs = texts[baseline.decoder, baseline.dtype]
                baseline.differing = sum(a != b for a, b in zip(ours, theirs, strict=True))
    return found + [Baseline(*way, null(why), chosen=False, note=why) for way, why in (failed or {}).items()]


def _speed(results: list[list[Result]], resamples: int, seed: int) -> Metric:
    tokens: Column = torch.tensor([sum(len(r.tokens) - 1 for r in rs) for rs in results]).double().numpy()
    seconds: Column = torch.tensor([sum(r.decode_seconds for r in rs) for rs in results]).double().numpy()
    return Bootstrap(len(results), resamples, seed).ratio(lambda t, s: t / s, tokens, seconds, where=tokens)
