"""Recorded requests: how long they are, and how many drafted tokens each of their rounds accepted."""

from dataclasses import dataclass

from deepspec.errors import UserError
from deepspec.evaluation.result import EvaluationResult

LEAST_ROUNDS = 50  # fewer say too little about acceptance


@dataclass(frozen=True)
class RecordedRound:
    """accepted: of K drafted and verified tokens. confidence: [K] as the draft told it; empty where it gives none."""

    accepted: int
    confidence: tuple[float, ...]


@dataclass(frozen=True)
class RecordedRequest:
    """prompt, answer: tokens. rounds: in order, without those that an answer's end cut or that had less room than K."""

    prompt: int
    answer: int
    rounds: tuple[RecordedRound, ...]
    id: str = ""  # the prompt's


@dataclass(frozen=True)
class Trace:
    """k: drafted tokens of every recorded round. context: mean length of the text halfway through an answer."""

    requests: list[RecordedRequest]
    k: int

    @property
    def context(self) -> int:
        return round(sum(one.prompt + one.answer / 2 for one in self.requests) / len(self.requests))

    @property
    def gives_confidence(self) -> bool:
        return all(len(r.confidence) == self.k for one in self.requests for r in one.rounds)


def read_trace(result: EvaluationResult, where: str) -> Trace:
    """The speculative decodings of a result. `UserError` where they cannot be replayed; `where` names the file."""
    settings = result.settings.get("decode", {})
    if settings.get("tree", "none") != "none" or settings.get("schedule", "fixed") != "fixed":
        raise UserError(
            f"{where} was decoded with decode.tree={settings.get('tree')} and decode.schedule="
            f"{settings.get('schedule')}; a simulation replays chains that were verified whole. Evaluate with "
            "decode.tree=none decode.schedule=fixed (into another folder, out=...)."
        )
    k = result.conditions.k
    requests = []
    for record in result.records:
        for decoding in record.speculative:
            rounds = tuple(
                RecordedRound(r.accepted, tuple(r.confidence))
                for r in decoding.rounds
                if not r.cut and r.verified == k
            )
            if rounds:
                answer = len(decoding.tokens)
                requests.append(RecordedRequest(record.prompt_tokens, answer, rounds, record.id))
    found = sum(len(one.rounds) for one in requests)
    if found < LEAST_ROUNDS:
        raise UserError(
            f"{where} has {found} rounds that verified all {k} drafted tokens; a simulation needs {LEAST_ROUNDS}. "
            "Evaluate more or longer answers (evaluate.max_prompts, decode.max_new_tokens)."
        )
    return Trace(requests, k)
