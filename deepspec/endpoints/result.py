"""What was measured of one or two servers, request by request, and the numbers made from it."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deepspec.errors import UserError
from deepspec.evaluation.metric import Metric
from deepspec.evaluation.typed_json import build, write_compact

SCHEMA_VERSION = 1


@dataclass
class Answer:
    """One request. Seconds are from its last try's start; what earlier tries and their pauses took is `waited`.

    counted: who says how many tokens there are: "usage" (the server), "tokenizer", "chunks" (at least so many:
    a server that speculates sends several tokens in one chunk). error: why there is no answer.
    """

    prompt: str
    seconds: float | None = None  # to the end of the stream
    first: float | None = None  # to the first text: TTFT
    last: float | None = None  # to the last text
    tokens: int | None = None
    counted: str | None = None
    prompt_tokens: int | None = None
    chunks: int = 0
    finish: str | None = None
    model: str | None = None  # as the answer names it
    rate_limited: int = 0  # 429 on the way
    retried: int = 0
    waited: float = 0.0
    error: str | None = None


@dataclass
class Acceptance:
    """From the server's own counters, before and after: everything it decoded meanwhile, whoever asked."""

    server: str  # "vllm", "sglang" or "deepspec"
    drafts: float  # draft-and-verify rounds
    accepted: float  # drafted tokens accepted
    drafted: float | None = None  # tokens verified; null where the server does not count them

    @property
    def tau(self) -> float | None:
        """Tokens a round: 1 + accepted / drafts; None where nothing was drafted."""
        return 1 + self.accepted / self.drafts if self.drafts > 0 else None

    @property
    def budget(self) -> float | None:
        """Drafted tokens verified a round."""
        return self.drafted / self.drafts if self.drafted is not None and self.drafts > 0 else None


@dataclass
class Level:
    """All requests to one server at one concurrency. seconds: on the clock while they ran."""

    endpoint: int
    concurrency: int
    seconds: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    acceptance: Acceptance | None = None
    no_acceptance: str | None = None  # why there is none


@dataclass
class Connection:
    """Seconds, medians: of a TCP connect, of the TLS handshake behind it, of a request for the list of models on a
    connection that is there."""

    tcp: Metric
    tls: Metric
    request: Metric


@dataclass
class Endpoint:
    """One server. key_variable: where its key was read from, null = none was sent."""

    url: str
    model: str
    key_variable: str | None
    models: list[str]  # as it lists them; [] = it does not
    connection: Connection
    warnings: list[str] = field(default_factory=list)


@dataclass
class Tail:
    """Percentiles over answers; a null has its reason."""

    p50: Metric
    p95: Metric
    p99: Metric


@dataclass
class LevelSummary:
    """The numbers of a level. Seconds; tokens a second over the whole level."""

    endpoint: int
    concurrency: int
    requests: int
    failed: int
    rate_limited: int
    tokens: int
    counted: dict[str, int]  # answers by who counted their tokens
    tokens_per_second: Metric
    ttft: Tail
    tpot: Tail
    seconds: Tail
    tau: float | None
    budget: float | None
    no_acceptance: str | None
    errors: dict[str, int]


@dataclass
class EndpointResult:
    """The whole file. complete: nothing was cut short; else `error` says why, and what there is stands here."""

    schema_version: int
    name: str
    command: str
    created: str  # UTC, ISO 8601
    complete: bool
    error: str | None
    client: str  # the machine that asked
    versions: dict[str, str]
    settings: dict[str, Any]
    prompts: str  # where they come from
    distinct_prompts: int
    endpoints: list[Endpoint]
    levels: list[Level]
    summary: list[LevelSummary] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def save_result(result: EndpointResult, path: Path) -> None:
    """Write the file under a temporary name and rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_compact(path, asdict(result))


def load_result(path: Path) -> EndpointResult:
    """Read it; `UserError` names the file and what is wrong with it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(f"it has not schema version {SCHEMA_VERSION}")
        return build(EndpointResult, content)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no readable result of deepspec.bench_endpoint: {error}.") from error
