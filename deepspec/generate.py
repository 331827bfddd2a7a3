"""`python -m deepspec.generate +recipe=X prompt="…"`: watch a draft at work, token by token."""

if __name__ == "__main__":
    from deepspec.config.app import start

    start("generate")  # before the imports below, which take seconds

import os
import sys
import time
from dataclasses import dataclass, field
from typing import TextIO

from deepspec.config.schema import Config
from deepspec.data.conversation import BadRow
from deepspec.data.template import ChatTemplate
from deepspec.decoding import Engine, Request, Round
from deepspec.decoding.engine import sampling_of
from deepspec.decoding.text import TextStream
from deepspec.errors import UserError
from deepspec.evaluation.bare import logits_two_ways
from deepspec.evaluation.ties import prove_tie
from deepspec.pair import find_draft, load_pair
from deepspec.target import Target

ACCEPTED, PLAIN = "\x1b[32m", "\x1b[0m"  # green, and the terminal's own


@dataclass
class Answer:
    """One answer as it was watched. seconds: after the first token, which the prefill made."""

    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    first_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return (len(self.tokens) - 1) / self.seconds if self.seconds > 0 else 0.0

    @property
    def tau(self) -> float | None:
        return sum(r.committed for r in self.rounds) / len(self.rounds) if self.rounds else None


def run(config: Config) -> None:
    """Decode `config.prompt` with the draft of the run's folder and show it; with `config.compare` plainly too."""
    if config.prompt is None or not config.prompt.strip():
        raise UserError('Nothing to answer: give a prompt, prompt="Why is the sky blue?".')
    found = find_draft(config)
    pair = load_pair(config, found)
    target = pair.target
    for warning in pair.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    request = _request(config, target, config.prompt)
    engine = Engine.configured(target, pair.draft, config.decode)
    answer = watch(engine, request, target, sys.stdout)
    print("\n" + summary(answer, coloured(sys.stdout)))
    if config.compare:
        print("\nplain decoding:")
        plain = watch(Engine.configured(target, None, config.decode), request, target, sys.stdout)
        print("\n" + comparison(answer, plain, request, target, engine.how.most))


def watch(engine: Engine, request: Request, target: Target, out: TextIO) -> Answer:
    """Write the answer to `out` as it comes; accepted drafted tokens have a colour of their own."""
    stream, colour = TextStream(target.tokenizer.decode), coloured(out)
    answer, started = Answer(), time.perf_counter()
    for tokens, round_ in engine.stream(request):
        now = time.perf_counter() - started
        if round_ is None:
            answer.first_seconds = now
        else:
            answer.rounds.append(round_)
            answer.seconds = now - answer.first_seconds
        accepted = round_.accepted if round_ is not None else 0
        for index, token in enumerate(tokens):
            answer.tokens.append(token)
            if token not in request.eos:
                out.write(_painted(stream.add(token), colour and index < accepted))
        out.flush()
    out.write(stream.rest())
    out.flush()
    return answer


def coloured(out: TextIO) -> bool:
    """Whether colours belong there: a terminal, and nobody has asked for none (https://no-color.org)."""
    return out.isatty() and not os.environ.get("NO_COLOR")


def summary(answer: Answer, colour: bool) -> str:
    """τ, speed and where the tokens came from, in a line."""
    accepted = sum(r.accepted for r in answer.rounds)
    speed = f"{answer.speed:.1f} tokens/s, first token after {answer.first_seconds:.2f} s"
    if answer.tau is None:
        return speed
    drafted = _painted(f"{accepted} drafted tokens", colour)
    return (
        f"τ {answer.tau:.2f} over {len(answer.rounds)} rounds, {drafted} accepted among {len(answer.tokens)}; "
        f"{speed}"
    )


def comparison(answer: Answer, plain: Answer, request: Request, target: Target, most: int) -> str:
    """Plain decoding beside it: speed, and whether the text is the same. One answer is no measurement."""
    speed = f"plain     {plain.speed:.1f} tokens/s, first token after {plain.first_seconds:.2f} s\n"
    if plain.speed and answer.speed:
        ratio = answer.speed / plain.speed
        speed += (
            f"with the draft {ratio:.2f} times as fast on this one answer (deepspec.evaluate measures it)\n"
        )
    if request.sampling.temperature > 0:
        return speed + "sampled: two draws from one distribution, not two equal texts"
    logits = logits_two_ways(target, most, request.sampling.repetition_penalty)
    tie = prove_tie(logits, request.tokens, plain.tokens, answer.tokens)
    if tie is None:
        return speed + "the same text, token for token"
    if tie.proven:
        return speed + f"the texts part at token {tie.position + 1}: a proven tie, within rounding"
    return speed + f"the texts part at token {tie.position + 1} and rounding is not the reason: {tie.reason}"


def _request(config: Config, target: Target, prompt: str) -> Request:
    """The prompt by the target's chat template, which is the text it was trained on."""
    messages = [{"role": "user", "content": prompt}]
    if config.data.system:
        messages.insert(0, {"role": "system", "content": config.data.system})
    template = ChatTemplate(target.tokenizer, target.eos, arguments=config.data.template_args)
    decode = config.decode
    try:
        tokens = template.prompt(messages)
    except BadRow as error:
        raise UserError(f"The target's chat template does not take this prompt: {error}.") from error
    return Request(
        tokens,
        decode.max_new_tokens,
        sampling_of(decode),
        decode.seed,
        target.eos,
        stop=tuple(decode.stop),
    )


def _painted(text: str, colour: bool) -> str:
    return f"{ACCEPTED}{text}{PLAIN}" if colour and text else text
