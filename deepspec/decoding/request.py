"""What goes into the decoding engine and what comes out of it."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. temperature 0 = greedy; top_k 0, top_p 1 and min_p 0 = off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True)
class Request:
    """One prompt to continue. `seed` and the output position alone decide every random draw."""

    tokens: list[int]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    seed: int = 0
    eos: tuple[int, ...] = ()
    id: str = ""


@dataclass
class Round:
    """One propose–verify cycle of one request.

    drafted, verified, accepted: tokens; near the limit of an answer fewer are verified than were drafted.
    `committed` counts what was kept: accepted + 1, unless an end token fell inside (`cut`); what lay behind it
    counts as neither verified nor accepted. Seconds are the whole round's, shared by all rows of the batch.
    """

    drafted: int
    verified: int
    accepted: int
    committed: int
    cut: bool
    draft_seconds: float
    verify_seconds: float
    rest_seconds: float
    confidence: list[float] = field(default_factory=list)


@dataclass
class Result:
    """A finished request.

    tokens: the answer's, end token included. prefill_seconds: from the request's start to its first token
    (TTFT, which belongs to no round). decode_seconds: all that followed, so that
    decode_seconds / (len(tokens) − 1) is the TPOT. finish: "eos" or "length".
    """

    id: str
    tokens: list[int]
    finish: str
    prefill_seconds: float
    decode_seconds: float
    rounds: list[Round] = field(default_factory=list)
