"""The decoding engine: prefill, then (propose → verify → commit) until done; plain decoding is the same loop."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from deepspec.config.schema import DecodeConfig
from deepspec.decoding.acceptance import RULES
from deepspec.decoding.batch import Batch
from deepspec.decoding.cost import cost_table
from deepspec.decoding.fixed import FixedShape, check_exact
from deepspec.decoding.request import Request, Result, Round, Sampling
from deepspec.decoding.row import Detokenise, Row
from deepspec.decoding.sampling import check_sampling
from deepspec.decoding.scheduler import Schedule, Scheduler
from deepspec.decoding.trees import check_tree
from deepspec.decoding.trial import How, Observe
from deepspec.decoding.utilization import utilization_of
from deepspec.drafts.contract import Drafter, DynamicTree, StaticTree
from deepspec.errors import UserError
from deepspec.target import Target


class Engine:
    """Decodes requests with a draft, or plainly without one; the output has the target's own distribution.

    k: drafted tokens a round, of a chain. rule: how they are accepted. "auto" is greedy at temperature 0; above
    it block verification for chains (never fewer tokens a round than token rejection, see
    `acceptance.choose_sampled`) and the one rule there is for trees. tree: drafts that can branch propose such
    trees instead of chains. children: of a static tree's nodes, "deterministic" (the most probable) or "sampled"
    without replacement. max_batch_size: rows decoded at once; waiting requests enter as others finish.
    detokenise: tokens → text, for stop strings; the target's tokenizer if not given. schedule: how much of what is
    drafted is verified (`scheduler.Schedule`; what it learns stays with the engine). exact: forwards of one shape
    (`fixed.FixedShape`), so that greedy text is that of plain decoding with the same k, tree and max_batch_size and
    `exact`, token for token in low precision too. compile: the target's rounds by `torch.compile`, at one shape too;
    the first take seconds to minutes. observe: see `Batch`.
    """

    def __init__(
        self,
        target: Target,
        draft: Drafter | None = None,
        *,
        k: int = 5,
        rule: str = "auto",
        max_batch_size: int = 1,
        tree: StaticTree | DynamicTree | None = None,
        children: str = "deterministic",
        detokenise: Detokenise | None = None,
        schedule: Schedule | None = None,
        exact: bool = False,
        compile: bool = False,
        observe: Observe | None = None,
    ) -> None:
        if k < 1:
            raise UserError(
                f"decode.k is {k}; a round drafts at least 1 token (leave the draft out for plain decoding)."
            )
        if max_batch_size < 1:
            raise UserError(f"max_batch_size is {max_batch_size}; it must be 1 or more.")
        if rule not in RULES:
            raise UserError(f"decode.rule is {rule!r}; it must be {', '.join(RULES[:-1])} or {RULES[-1]}.")
        _check_branching(rule, tree, children, target.vocab_size)
        target.require("chain", *(["ragged"] if max_batch_size > 1 else []))
        if draft is not None:
            target.require(*(["features"] if draft.needs_features else []), *(["tree"] if tree else []))
        if detokenise is None and target.tokenizer is not None:
            detokenise = target.tokenizer.decode
        self.target, self.draft, self.rule, self.max_batch_size = target, draft, rule, max_batch_size
        self.how = How(k, rule, tree, children == "sampled", exact, compile)
        shape = FixedShape.of(target, self.how, max_batch_size, (), draft is None)
        if exact and shape is not None:
            check_exact(shape)
        self.detokenise, self.observe = detokenise, observe
        self.scheduler = None
        if draft is not None and schedule is not None and schedule != Schedule():
            schedule.check(tree is not None)
            busy = schedule.utilization_threshold is not None
            reading = utilization_of(target.device) if busy else None
            self.scheduler = Scheduler(schedule, self.how.longest, utilization=reading)

    @classmethod
    def configured(
        cls, target: Target, draft: Drafter | None, decode: DecodeConfig, k: int | None = None, **others: Any
    ) -> "Engine":
        """An engine as `decode` has it. k: instead of its own. others: further arguments of `Engine`."""
        return cls(
            target,
            draft,
            k=decode.k if k is None else k,
            rule=decode.rule.value,
            tree=tree_of(decode),
            children=decode.children.value,
            schedule=schedule_of(decode, draft),
            exact=decode.exact,
            compile=decode.compile,
            **others,
        )

    def generate(
        self,
        requests: Sequence[Request],
        on_result: Callable[[Result], None] | None = None,
        *,
        keep_going: bool = False,
    ) -> list[Result]:
        """Decode all; results in the requests' order, `on_result` as each finishes.

        A request that cannot be decoded raises `UserError`, before anything runs where it can be known. With
        `keep_going` it ends with `finish="error"` and the words in `error`, and the others are not touched.
        """
        results: dict[int, Result] = {}

        def collect(place: int, result: Result) -> None:
            if result.error and not keep_going:
                raise UserError(result.error)
            results[place] = result
            if on_result is not None:
                on_result(result)

        waiting = deque(self._sound(requests, collect))
        self.learn_costs([request for _, request in waiting])
        places: dict[int, int] = {}
        batch = self._batch([request for _, request in waiting])
        while waiting or batch.rows:
            moved: list[Row] = []
            while waiting and len(batch.rows) < self.max_batch_size:
                place, request = waiting.popleft()
                row = batch.admit(request, self.limit(request))
                places[id(row)] = place
                if row.finish is not None:
                    collect(places.pop(id(row)), row.result())
            if batch.rows:
                moved = [row for row, _ in batch.step()]
            for row in moved:
                if row.finish is not None:
                    collect(places.pop(id(row)), row.result())
        return [results[place] for place in range(len(requests))]

    def stream(self, request: Request) -> Iterator[tuple[list[int], Round | None]]:
        """One request's tokens as they are committed, with the round that made them (None: the prefill)."""
        self.check(request)
        self.learn_costs([request])
        batch = self._batch([request], rows=1)
        row = batch.admit(request, self.limit(request))
        if not row.error:
            yield list(row.tokens), None
        while batch.rows:
            ((row, tokens),) = batch.step()
            if not row.error:
                yield tokens, row.rounds[-1]
        if row.error:
            raise UserError(row.error)

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
        if not 0 <= min(request.tokens) <= max(request.tokens) < self.target.vocab_size:
            raise UserError(
                f"{name} has token {max(request.tokens, key=abs)}; {self.target.name} has 0 to "
                f"{self.target.vocab_size - 1}. Was it made with another tokenizer?"
            )
        if request.max_new_tokens < 1:
            raise UserError(f"{name} has max_new_tokens={request.max_new_tokens}; it must be 1 or more.")
        if self.rule == "greedy" and request.sampling.temperature != 0:
            raise UserError(
                f"{name} has temperature {request.sampling.temperature}, but decode.rule=greedy accepts by argmax "
                "only. Use decode.rule=auto."
            )
        if request.stop and ("" in request.stop or self.detokenise is None):
            why = (
                "an empty one"
                if "" in request.stop
                else "them, and there is no tokenizer to read the text with"
            )
            raise UserError(f"{name} has stop strings, {why}. Leave it out, or give Engine a `detokenise`.")
        check_sampling(request.sampling)

    def _sound(
        self, requests: Sequence[Request], collect: Callable[[int, Result], None]
    ) -> list[tuple[int, Request]]:
        """The requests that can be decoded, with their places; `collect` gets the others' errors."""
        sound = []
        for place, request in enumerate(requests):
            try:
                self.check(request)
            except UserError as error:
                collect(place, Result(request.id, [], "error", 0.0, 0.0, error=str(error)))
            else:
                sound.append((place, request))
        return sound

    def limit(self, request: Request) -> int:
        """The longest answer that `request` can have here."""
        return min(request.max_new_tokens, self.target.max_positions - len(request.tokens))

    def running(self) -> Batch:
        """An empty batch for a caller that lets requests in and out itself (`Batch.admit`, `step`, `drop`).

        A request must have passed `check`; a hardware-aware schedule needs `learn_costs` first.
        """
        return self._batch([])

    def _batch(self, requests: Sequence[Request], rows: int | None = None) -> Batch:
        """An empty batch for these requests."""
        rows = rows or self.max_batch_size
        return Batch(
            self.target,
            self.draft,
            self.how,
            rows,
            self.detokenise,
            self.scheduler,
            self.observe,
            FixedShape.of(self.target, self.how, rows, requests, self.draft is None),
        )

    def learn_costs(self, requests: Sequence[Request]) -> None:
        """The cost table that a hardware-aware schedule needs, for contexts like that of the middle request."""
        scheduler = self.scheduler
        if not requests or self.draft is None or scheduler is None or scheduler.schedule.kind != "hardware":
            return
        by_length = sorted(requests, key=lambda request: len(request.tokens) + request.max_new_tokens // 2)
        typical = by_length[len(by_length) // 2]
        rows = self.max_batch_size
        costs = cost_table(self.target, self.draft, typical, k=self.how.k, max_rows=rows)
        one_shape = self.how.exact or self.how.compile
        scheduler.costs = costs.at_one_shape(rows, self.how.most + 1) if one_shape else costs


def sampling_of(decode: DecodeConfig) -> Sampling:
    """How `decode` draws tokens."""
    return Sampling(decode.temperature, decode.top_k, decode.top_p, decode.min_p, decode.repetition_penalty)


def tree_of(decode: DecodeConfig) -> StaticTree | DynamicTree | None:
    """The tree that `decode` asks for."""
    if decode.tree.value == "static":
        return StaticTree(tuple(decode.tree_parents))
    if decode.tree.value == "dynamic":
        return DynamicTree(decode.tree_depth, decode.tree_top_k, decode.tree_total_tokens)
    return None


def calibration_key(decode: DecodeConfig) -> str:
    """What a confidence's temperatures belong to: another sampling or rule accepts otherwise."""
    rule = decode.rule.value
    if rule == "auto":
        rule = "greedy" if decode.temperature == 0 else "block"
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return ",".join([*(f"{name}={getattr(decode, name):g}" for name in names), f"rule={rule}"])


def schedule_of(decode: DecodeConfig, draft: Drafter | None = None) -> Schedule:
    """The schedule that `decode` asks for, with the draft's calibration for this sampling, if it has one.

    Calibrations stand in the draft's own configuration, `confidence_temperatures`: {key: [T_1, T_2, …]}.
    """
    known = getattr(getattr(draft, "config", None), "confidence_temperatures", None) or {}
    schedule = _schedule(decode)
    return (
        replace(schedule, temperatures=tuple(known.get(calibration_key(decode), ())))
        if schedule.cuts
        else schedule
    )


def _schedule(decode: DecodeConfig) -> Schedule:
    return Schedule(
        kind=decode.schedule.value,
        confidence_threshold=decode.confidence_threshold,
        max_candidates=decode.max_candidates,
        fallback=decode.fallback.value == "auto",
        utilization_threshold=decode.utilization_threshold,
    )


def _check_branching(
    rule: str, tree: StaticTree | DynamicTree | None, children: str, vocab_size: int
) -> None:
    if children not in ("deterministic", "sampled"):
        raise UserError(f"decode.children is {children!r}; it must be deterministic or sampled.")
    if tree is not None:
        check_tree(tree, vocab_size)
        if rule == "block":
            raise UserError("decode.rule=block verifies chains; with decode.tree use decode.rule=auto.")
    if isinstance(tree, DynamicTree) and children == "sampled":
        raise UserError(
            "decode.tree=dynamic picks children by their probability, which sampled ones must not be: the output would "
            "no longer be the target's. Use decode.children=deterministic, or decode.tree=static."
        )
