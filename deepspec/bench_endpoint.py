"""`python -m deepspec.bench_endpoint url=http://host:8000/v1 model=NAME`: how fast a server is, seen by its clients."""

if __name__ == "__main__":
    from deepspec.config.app import start

    start("bench_endpoint", name="endpoints")  # before the imports below, which take seconds

import asyncio
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from deepspec.artifacts import plain, versions
from deepspec.config.app import command
from deepspec.config.ranges import check
from deepspec.config.schema import Config
from deepspec.data.conversation import Conversation, Tally
from deepspec.data.prompts import read_prompts
from deepspec.data.questions import question_prompts
from deepspec.data.servers import OURS, Sampling
from deepspec.endpoints.bench import Plan, Question, client_machine, measure
from deepspec.endpoints.client import Client, Count
from deepspec.endpoints.result import SCHEMA_VERSION, EndpointResult, load_result, save_result
from deepspec.errors import UserError
from deepspec.reporting.endpoints import summary_lines, write_report

RESULT, REPORT = "endpoints.json", "endpoints.html"


def run(config: Config) -> Path:
    """Measure `config.url`, and `config.other_url` in turns with it; writes endpoints.json and endpoints.html into
    `config.out`. Returns the report's path.

    What was measured before a failure is written too. `UserError`, with a sentence, for a server that cannot be
    measured and for a complete result in the way, unless `config.overwrite`.
    """
    check(config)
    if config.url is None:
        raise UserError("No server is named: url=http://host:8000/v1")
    clients = _clients(config)
    path = Path(config.out) / RESULT
    _check_place(path, config.overwrite)
    questions, source = _questions(config)
    result = EndpointResult(
        SCHEMA_VERSION,
        config.name,
        command("bench_endpoint"),
        datetime.now(UTC).isoformat(timespec="seconds"),
        complete=False,
        error=None,
        client=client_machine(),
        versions=versions(),
        settings=_settings(config),
        prompts=source,
        distinct_prompts=len(questions),
        endpoints=[],
        levels=[],
    )
    asked = config.endpoint
    plan = Plan(questions, asked.requests, asked.concurrency, asked.warmup)
    try:
        asyncio.run(measure(clients, plan, result, lambda line: print(line, flush=True)))
        result.complete = True
    except (UserError, KeyboardInterrupt) as error:
        result.error = str(error) or "stopped by Ctrl-C"
        if not any(level.answers for level in result.levels):
            raise
        raise UserError(f"{result.error} What was measured before is in {path}.") from error
    finally:
        if any(level.answers for level in result.levels):
            save_result(result, path)
            write_report(result, path.with_name(REPORT))
    print("\n".join([*summary_lines(result), f"report    {path.with_name(REPORT)}"]), flush=True)
    return path.with_name(REPORT)


def _clients(config: Config) -> list[Client]:
    asked, decode = config.endpoint, config.decode
    wrong = [name for name in asked.args if name in (*OURS, "stream_options")]
    if wrong:
        raise UserError(f"endpoint.args cannot set {wrong[0]!r}: it has a key of its own, or is fixed.")
    body: dict[str, Any] = Sampling(decode.temperature, decode.top_p, decode.max_new_tokens, asked.args).body(
        decode.seed
    )
    body |= {"stop": list(decode.stop)} if decode.stop else {}
    places = [("url", config.url, config.model, asked.key_variable)]
    if config.other_url is not None:
        other = config.other_model or config.model
        places.append(("other_url", config.other_url, other, asked.other_key_variable))
    return [
        Client(
            str(url),
            model,
            setting,
            variable,
            body,
            asked.timeout,
            asked.retries,
            max(asked.concurrency),
            _counter(asked.tokenizer),
        )
        for setting, url, model, variable in places
    ]


@cache
def _counter(tokenizer: str | None) -> Count | None:
    """Text → tokens."""
    if tokenizer is None:
        return None
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        raise UserError(
            f"endpoint.tokenizer: {tokenizer!r} cannot be loaded ({str(error).splitlines()[0]})"
        ) from error
    return lambda text: len(found(text, add_special_tokens=False)["input_ids"])


def _questions(config: Config) -> tuple[list[Question], str]:
    """What is asked, and where it comes from."""
    asked = config.endpoint
    if asked.prompts is None:
        found, source = question_prompts(config.decode.seed)[0], "built-in questions"
    else:
        found, source = read_prompts(Path(asked.prompts), Tally(strict=True)), Path(asked.prompts).name
    questions = [_question(one.with_system(config.data.system)) for one in found]
    if not questions:
        raise UserError(f"{asked.prompts} has no prompts.")
    return questions, source


def _question(conversation: Conversation) -> Question:
    if conversation.row is not None:
        raise UserError(f"{conversation.place} is ready-made tokens; a server is asked with text.")
    messages = conversation.messages[:-1] if conversation.has_answer else conversation.messages
    return Question(conversation.id, messages)


def _settings(config: Config) -> dict[str, Any]:
    kept = ("url", "model", "other_url", "other_model", "endpoint", "decode")
    return {key: value for key, value in plain(config).items() if key in kept}


def _check_place(path: Path, overwrite: bool) -> None:
    """What is complete is replaced only when asked; what was cut short is."""
    if path.is_file() and not overwrite and load_result(path).complete:
        raise UserError(
            f"{path} is a complete measurement already. Choose another folder (out=...), or replace it with "
            "overwrite=true."
        )
