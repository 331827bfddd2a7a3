"""A request's JSON → what the engine decodes. Every field is followed, known to change nothing, or refused by name."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deepspec.config.schema import DecodeConfig
from deepspec.data.conversation import BadRow, Message
from deepspec.data.shapes import read_turns
from deepspec.data.template import ChatTemplate
from deepspec.decoding import Engine, Request, Sampling
from deepspec.decoding.sampling import check_sampling
from deepspec.errors import UserError
from deepspec.serving.refusal import Refusal, wrong

MOST_STOPS = 16
# Fields that change no text: bookkeeping of the client's side.
IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
# What is not done here, and the values that ask for nothing.
NOT_HERE: dict[str, tuple[Any, ...]] = {
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "modalities": (None, ["text"]),
    "echo": (None, False),
    "suffix": (None, ""),
    "reasoning_effort": (None, "none"),
    "audio": (None,),
    "prediction": (None,),
}
WHY = {
    "logprobs": "a drafted token is accepted without a normalised distribution of its own",
    "tools": "calls are not taken out of the text; serve the exported draft with vLLM or SGLang for that",
}


@dataclass(frozen=True)
class Ask:
    """What one HTTP request wants. requests: one a choice, in the choices' order."""

    requests: list[Request]
    prompt_tokens: int
    stream: bool
    include_usage: bool


@dataclass(frozen=True)
class Translator:
    """Reads requests for one model. name: what clients call it. defaults: of what a request leaves out. longest:
    tokens of an answer. choices: of one request, at most."""

    engine: Engine
    template: ChatTemplate
    name: str
    defaults: DecodeConfig
    longest: int
    choices: int

    def chat(self, body: dict[str, Any]) -> Ask:
        """`POST /v1/chat/completions`; `Refusal` for what cannot be done."""
        fields = _Fields(body)
        messages = _messages(fields.take("messages"))
        try:
            prompt = self.template.prompt(messages)
        except BadRow as error:
            raise wrong(
                "messages", f"The model's chat template does not take these messages: {error}."
            ) from error
        newer = fields.whole("max_completion_tokens", None, 1)
        older = fields.whole("max_tokens", None, 1)
        return self._ask(fields, [prompt], older if newer is None else newer)

    def completion(self, body: dict[str, Any]) -> Ask:
        """`POST /v1/completions`; `Refusal` for what cannot be done."""
        fields = _Fields(body)
        prompts = [self._tokens(one) for one in _prompts(fields.take("prompt"))]
        best_of = fields.whole("best_of", None, 1)
        if best_of is not None and best_of != body.get("n", 1):
            raise wrong("best_of", "`best_of` other than `n` is not done here.")
        return self._ask(fields, prompts, fields.whole("max_tokens", None, 1))

    def _ask(self, fields: "_Fields", prompts: list[list[int]], most: int | None) -> Ask:
        self._check_model(fields.take("model", self.name))
        given, stop = self.defaults, fields.stops(tuple(self.defaults.stop))
        sampling = Sampling(
            temperature=fields.number("temperature", given.temperature, 0, 2),
            top_k=max(fields.whole("top_k", given.top_k, -1) or 0, 0),  # −1: vLLM's "off"
            top_p=fields.number("top_p", given.top_p, 0, 1),
            min_p=fields.number("min_p", given.min_p, 0, 1),
            repetition_penalty=fields.number("repetition_penalty", given.repetition_penalty, 0, 10),
        )
        try:
            check_sampling(sampling)
        except UserError as error:
            raise Refusal(400, str(error)) from error
        n = fields.whole("n", 1, 1) or 1
        if n * len(prompts) > self.choices:
            raise wrong(
                "n", f"{n * len(prompts)} answers are asked for; a request here has at most {self.choices}."
            )
        seed = fields.whole("seed", None, -(2**63))
        first = secrets.randbits(32) if seed is None else seed
        ignore_eos = fields.flag("ignore_eos")
        stream = fields.flag("stream")
        options = fields.take("stream_options", None)
        if options is not None and not (stream and isinstance(options, dict)):
            raise wrong("stream_options", "`stream_options` is an object, and needs `stream: true`.")
        fields.finish()
        requests = [
            Request(
                tokens,
                self._limit(tokens, most),
                sampling,
                first + choice,
                () if ignore_eos else self.engine.target.eos,
                stop=stop,
            )
            for tokens in prompts
            for choice in range(n)
        ]
        for request in requests:
            try:
                self.engine.check(request)
            except UserError as error:
                raise Refusal(400, str(error)) from error
        usage = bool(options and options.get("include_usage"))
        return Ask(requests, sum(len(tokens) for tokens in prompts), stream, usage)

    def _check_model(self, model: Any) -> None:
        if model != self.name:
            raise Refusal(
                404,
                f"The model {model!r} does not exist here; this server has {self.name!r}.",
                param="model",
                code="model_not_found",
            )

    def _tokens(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        return [int(token) for token in self.template.tokenizer(prompt)["input_ids"]]

    def _limit(self, tokens: Sequence[int], most: int | None) -> int:
        """The longest answer; `Refusal` where the context or the server has not so much."""
        context = self.engine.target.max_positions
        room = context - len(tokens)
        if room < 1 or (most or 0) > room:
            and_answer = "" if most is None else f" and `max_tokens` is {most}"
            raise Refusal(
                400,
                f"The prompt has {len(tokens)} tokens{and_answer}; together the model takes {context}.",
                code="context_length_exceeded",
            )
        if most is not None and most > self.longest:
            raise wrong("max_tokens", f"`max_tokens` is {most}; an answer here has at most {self.longest}.")
        return min(room, self.longest) if most is None else most


class _Fields:
    """A body's fields, each taken once; what is left at the end is refused."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.left = dict(body)

    def take(self, name: str, *default: Any) -> Any:
        """The value; null counts as left out."""
        value = self.left.pop(name, None)
        if value is None:
            if not default:
                raise wrong(name, f"`{name}` is missing.")
            return default[0]
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise wrong(name, f"`{name}` is a number between {low} and {high}, not {_short(value)}.")
        return float(value)

    def whole(self, name: str, default: int | None, low: int) -> int | None:
        value = self.take(name, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**63:
            raise wrong(name, f"`{name}` is a whole number from {low} up, not {_short(value)}.")
        return value

    def flag(self, name: str) -> bool:
        value = self.take(name, False)
        if not isinstance(value, bool):
            raise wrong(name, f"`{name}` is true or false, not {_short(value)}.")
        return value

    def stops(self, default: tuple[str, ...]) -> tuple[str, ...]:
        value = self.take("stop", list(default))
        stops = [value] if isinstance(value, str) else value
        good = isinstance(stops, list) and len(stops) <= MOST_STOPS
        if not good or not all(isinstance(one, str) and one for one in stops):
            raise wrong(
                "stop", f"`stop` is a text or a list of at most {MOST_STOPS} texts, none of them empty."
            )
        return tuple(stops)

    def finish(self) -> None:
        """`Refusal` for what was asked and is not done."""
        for name, value in self.left.items():
            if name in IGNORED:
                continue
            if name not in NOT_HERE:
                raise wrong(name, f"`{name}` is not known here. Leave it out.")
            if not any(
                value == one and isinstance(value, bool) == isinstance(one, bool) for one in NOT_HERE[name]
            ):
                why = f": {WHY[name]}" if name in WHY else ""
                raise wrong(name, f"`{name}` is not done here{why}. Leave it out.")


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list):
        raise wrong("messages", "`messages` is a list of messages.")
    try:
        _, messages = read_turns(value, "messages")
    except BadRow as error:
        raise wrong("messages", f"{error}.") from error
    if messages[-1]["role"] == "assistant":
        raise wrong("messages", "The last message is the assistant's: there is nothing to answer.")
    return messages


def _prompts(value: Any) -> list[str | list[int]]:
    """The protocol's four shapes: a text, texts, tokens, lists of tokens."""
    if isinstance(value, str) or _is_tokens(value):
        return [value]
    if isinstance(value, list) and value and all(isinstance(one, str) or _is_tokens(one) for one in value):
        return value
    raise wrong("prompt", "`prompt` is a text, a list of texts, a list of tokens, or a list of those.")


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
