"""What goes into the decoding engine and what comes out of it."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. temperature 0 = greedy; top_k 0, top_p 1, min_p 0 and repetition_penalty 1 = off.

    The penalty counts prompt and answer, and makes the argmax of greedy decoding another one too.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class Request:
    """One prompt to continue. `seed` and the output position alone decide every random draw.

    The answer ends with the first token that is in `eos`, or after which the answer's text contains one of
    the strings in `stop`; that token is its last one.
    """

    tokens: list[int]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    seed: int = 0
    eos: tuple[int, ...] = ()
    id: str = ""
    stop: tuple[str, ...] = ()


@dataclass
class Round:
    """One propose–verify cycle of one request.

    drafted: tokens the draft proposed. verified: how many positions of them were verified, a tree's depth;
    near the limit of an answer fewer than were drafted. accepted: drafted tokens kept. `committed` counts what
    was kept: accepted + 1, unless the answer ended inside (`cut`); what lay behind its end counts as neither
    verified nor accepted. scheduled: drafted tokens the target read, a tree's nodes, cut or not (None: a
    record of before trees). confidence: of these tokens in order, that each is accepted given that those before
    it were; empty where the draft gives none, and for trees. Seconds are the whole round's, shared by all rows of
    the batch.
    """

    drafted: int
    verified: int
    accepted: int
    committed: int
    cut: bool
    draft_seconds: float
    verify_seconds: float
    rest_seconds: float
    scheduled: int | None = None
    confidence: list[float] = field(default_factory=list)


@dataclass
class Result:
    """A finished request.

    tokens: the answer's, end token included. prefill_seconds: from the request's start to its first token
    (TTFT, which belongs to no round). decode_seconds: all that followed, so that
    decode_seconds / (len(tokens) − 1) is the TPOT. finish: "eos", "stop", "length", or "error", where `error`
    says why and `tokens` are those that came before.
    """

    id: str
    tokens: list[int]
    finish: str
    prefill_seconds: float
    decode_seconds: float
    rounds: list[Round] = field(default_factory=list)
    error: str = ""
