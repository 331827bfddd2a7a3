"""The decoding engine: prefill, then (propose → verify → commit) until done; plain decoding is the same loop."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from deepspec.decoding.batch import Batch, Row
from deepspec.decoding.request import Request, Result, Round
from deepspec.decoding.sampling import check_sampling
from deepspec.drafts.contract import Drafter
from deepspec.errors import UserError
from deepspec.target import Target


class Engine:
    """Decodes requests with a draft, or plainly without one; the output has the target's own distribution.

    k: drafted tokens a round. rule: "auto" (greedy at temperature 0, token rejection above it), "greedy" or
    "token". max_batch_size: rows decoded at once; waiting requests enter as others finish.
    """

    def __init__(
        self,
        target: Target,
        draft: Drafter | None = None,
        *,
        k: int = 5,
        rule: str = "auto",
        max_batch_size: int = 1,
    ) -> None:
        if k < 1:
            raise UserError(
                f"decode.k is {k}; a round drafts at least 1 token (leave the draft out for plain decoding)."
            )
        if max_batch_size < 1:
            raise UserError(f"max_batch_size is {max_batch_size}; it must be 1 or more.")
        if rule not in ("auto", "greedy", "token"):
            raise UserError(f"decode.rule is {rule!r}; it must be auto, greedy or token.")
        target.require("chain", *(["ragged"] if max_batch_size > 1 else []))
        if draft is not None and draft.needs_features:
            target.require("features")
        self.target, self.draft, self.k, self.rule, self.max_batch_size = (
            target,
            draft,
            k,
            rule,
            max_batch_size,
        )

    def generate(
        self, requests: Sequence[Request], on_result: Callable[[Result], None] | None = None
    ) -> list[Result]:
        """Decode all; results in the requests' order, `on_result` as each finishes."""
        for request in requests:
            self.check(request)
        results: dict[int, Result] = {}
        waiting, places = deque(enumerate(requests)), {}
        batch = self._batch(self.max_batch_size)
        while waiting or batch.rows:
            while waiting and len(batch.rows) < self.max_batch_size:
                place, request = waiting.popleft()
                row = batch.admit(request, self._limit(request))
                places[id(row)] = place
                self._collect(row, places, results, on_result)
            if batch.rows:
                for row, _ in batch.step():
                    self._collect(row, places, results, on_result)
        return [results[place] for place in range(len(requests))]

    def stream(self, request: Request) -> Iterator[tuple[list[int], Round | None]]:
        """One request's tokens as they are committed, with the round that made them (None: the prefill)."""
        self.check(request)
        batch = self._batch(1)
        row = batch.admit(request, self._limit(request))
        yield list(row.tokens), None
        while batch.rows:
            ((row, tokens),) = batch.step()
            yield tokens, row.rounds[-1]

    def check(self, request: Request) -> None:
        """UserError for a request that cannot be decoded; others are not touched."""
        name = f"Request {request.id!r}" if request.id else "The request"
        if not request.tokens:
            raise UserError(f"{name} has an empty prompt; at least one token is needed.")
        if len(request.tokens) >= self.target.max_positions:
            raise UserError(
                f"{name} has a prompt of {len(request.tokens)} tokens; {self.target.name} takes "
                f"{self.target.max_positions}, answer included. Shorten the prompt."
            )
        if request.max_new_tokens < 1:
            raise UserError(f"{name} has max_new_tokens={request.max_new_tokens}; it must be 1 or more.")
        if self.rule == "greedy" and request.sampling.temperature != 0:
            raise UserError(
                f"{name} has temperature {request.sampling.temperature}, but decode.rule=greedy accepts by argmax "
                "only. Use decode.rule=auto."
            )
        check_sampling(request.sampling)

    def _limit(self, request: Request) -> int:
        return min(request.max_new_tokens, self.target.max_positions - len(request.tokens))

    def _batch(self, rows: int) -> Batch:
        return Batch(self.target, self.draft, self.k, rows, sampled_rule=self.rule == "token")

    @staticmethod
    def _collect(
        row: Row,
        places: dict[int, int],
        results: dict[int, Result],
        on_result: Callable[[Result], None] | None,
    ) -> None:
        if row.finish is None:
            return
        result = row.result()
        results[places.pop(id(row))] = result
        if on_result is not None:
            on_result(result)
