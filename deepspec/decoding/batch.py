"""The requests being decoded now: prompts enter alone, rounds advance all rows, finished rows leave."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepspec.decoding import acceptance
from deepspec.decoding.control import RoundControl
from deepspec.decoding.randomness import Purpose, uniforms
from deepspec.decoding.request import Request, Result, Round
from deepspec.decoding.sampling import distributions, draw
from deepspec.drafts.contract import Beginning, Committed, DraftContext, Drafter, Proposal
from deepspec.errors import UserError
from deepspec.target import State, Target, chain


@dataclass
class Row:
    """One request's progress. tokens[-1] is the pending token, known but not yet in the state."""

    request: Request
    limit: int  # longest answer: max_new_tokens, or what the context still holds
    started: float
    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    prefill_seconds: float = 0.0

    @property
    def remaining(self) -> int:
        return self.limit - len(self.tokens)

    def commit(self, tokens: list[int]) -> list[int]:
        """Take in a round's tokens up to an end token or the limit; returns those that were kept."""
        kept = tokens[: self.remaining]
        for index, token in enumerate(kept):
            if token in self.request.eos:
                kept = kept[: index + 1]
                break
        self.tokens += kept
        return kept

    @property
    def finish(self) -> str | None:
        if self.tokens[-1] in self.request.eos:
            return "eos"
        return "length" if self.remaining <= 0 else None

    def result(self) -> Result:
        seconds = time.perf_counter() - self.started - self.prefill_seconds
        return Result(
            self.request.id, self.tokens, self.finish or "", self.prefill_seconds, seconds, self.rounds
        )


class Batch:
    """Up to `max_rows` requests on one state.

    Plain decoding (`draft` None) is the same round with an empty proposal: no hooks, capture or rule.
    """

    def __init__(
        self, target: Target, draft: Drafter | None, k: int, max_rows: int, sampled_rule: bool
    ) -> None:
        self.target, self.draft, self.k, self.max_rows = target, draft, k, max_rows
        self.sampled_rule = sampled_rule
        self.layers: list[int] = (
            list(draft.capture_layers) if draft is not None and draft.needs_features else []
        )
        self.context = DraftContext(target)
        self.rows: list[Row] = []
        self.state: State | None = None
        self.draft_state: Any = None
        self.drafted: list[int] = []  # tokens proposed this round, a row, before any cut

    @torch.inference_mode()
    def admit(self, request: Request, limit: int) -> Row:
        """Prefill one prompt alone, draw its first token and add it as the last row."""
        row = Row(request, limit, time.perf_counter())
        device = self.target.device
        prompt = torch.tensor([request.tokens], device=device)
        capacity = len(request.tokens) + limit + self.k + 1
        state = self.target.new_state(1, capacity)
        output = self.target.forward(prompt, state, chain([0], prompt.shape[1], device), 1, self.layers)
        state.keep([prompt.shape[1]])
        self._check_numbers([bool(output.logits.isnan().any())], [row])
        pending = self._draw_next([row], output.logits[:, -1])
        row.tokens = pending.tolist()
        self._synchronise()
        row.prefill_seconds = time.perf_counter() - row.started
        if row.finish is None:
            self._join(row, state, capacity)
            if self.draft is not None:
                features = output.features if output.features is not None else prompt.new_empty(1, 0, 0)
                text = torch.cat([prompt, pending[:, None]], 1)
                begun = self.draft.begin(Beginning(self.context, text, features, capacity, self.max_rows))
                self.draft_state = self.draft.join(self.draft_state if len(self.rows) > 1 else None, begun)
        return row

    def _join(self, row: Row, state: State, capacity: int) -> None:
        if self.max_rows == 1:
            self.state = state
        else:
            if self.state is None:
                self.state = self.target.new_state(self.max_rows, capacity, rows=0)
            self.state.append(state)
        self.rows.append(row)

    @torch.inference_mode()
    def step(self) -> list[tuple[Row, list[int]]]:
        """One round of every row. Returns the rows with the tokens that each kept; the finished have left."""
        assert self.state is not None
        started = time.perf_counter()
        proposal = self._propose()
        self._synchronise()
        drafted_at = time.perf_counter()
        pending = torch.tensor([[row.tokens[-1]] for row in self.rows], device=self.target.device)
        tokens = torch.cat([pending, proposal.tokens], 1)
        layout = chain(self.state.lengths, tokens.shape[1], self.target.device)
        output = self.target.forward(tokens, self.state, layout, 0, self.layers)
        self._synchronise()
        verified_at = time.perf_counter()
        accepted, next_tokens, broken = self._judge(proposal, output.logits)
        self._check_numbers(broken, self.rows)
        counts = [count + 1 for count in accepted]
        self.state.keep(counts)
        drafted = proposal.tokens.tolist()
        committed = [
            [*drafted[index][: accepted[index]], next_tokens[index]] for index in range(len(self.rows))
        ]
        if self.draft is not None:
            self.draft.update(self.draft_state, self._committed(committed, counts, output.features))
        kept = [(row, row.commit(tokens)) for row, tokens in zip(self.rows, committed, strict=True)]
        ended = time.perf_counter()
        for index, (row, tokens_kept) in enumerate(kept):
            # What lies behind an end token was neither verified nor accepted for anything that counts.
            kept_count, cut = len(tokens_kept), len(tokens_kept) < len(committed[index])
            row.rounds.append(
                Round(
                    drafted=self.drafted[index],
                    verified=min(proposal.length[index], kept_count) if cut else proposal.length[index],
                    accepted=min(accepted[index], kept_count),
                    committed=kept_count,
                    cut=cut,
                    draft_seconds=drafted_at - started,
                    verify_seconds=verified_at - drafted_at,
                    rest_seconds=ended - verified_at,
                )
            )
        self._leave()
        return kept

    def _propose(self) -> Proposal:
        # A longest answer that ends before K more tokens needs no more drafted ones than it can keep.
        count = min(self.k, max(row.remaining for row in self.rows) - 1)
        if self.draft is None or count < 1:
            empty = torch.empty(len(self.rows), 0, dtype=torch.long, device=self.target.device)
            self.drafted = [0] * len(self.rows)
            return Proposal(empty, self.drafted)
        control = RoundControl(
            [row.request for row in self.rows], [len(row.tokens) for row in self.rows], count
        )
        proposal = self.draft.propose(self.draft_state, control)
        if proposal.parents is not None or proposal.q_row is not None:
            raise UserError(
                f"{type(self.draft).__name__} proposes a tree; the acceptance rules here are for chains. Use a draft "
                "that proposes chains."
            )
        # Row by row, so that a request's rounds do not depend on what its batch mates have left.
        limits = [max(0, row.remaining - 1) for row in self.rows]
        self.drafted = proposal.length
        proposal.length = [min(pair) for pair in zip(proposal.length, limits, strict=True)]
        return proposal

    def _judge(self, proposal: Proposal, logits: Tensor) -> tuple[list[int], list[int], list[int]]:
        """Accepted lengths, the target's own next tokens, and rows whose logits are no numbers (the round's one
        transfer), each a Python int a row."""
        # A sum is NaN if any part is; the −inf of a masked-out vocabulary entry is none.
        broken = logits.sum(-1).isnan().any(-1).long()
        if proposal.tokens.shape[1] == 0:
            next_tokens, none = self._draw_next(self.rows, logits[:, -1]), torch.zeros_like(broken)
            lengths, tokens, bad = torch.stack([none, next_tokens, broken]).tolist()
            return lengths, tokens, bad
        samplings = [row.request.sampling for row in self.rows]
        greedy = all(sampling.temperature == 0 for sampling in samplings) and not self.sampled_rule
        law: acceptance.Law = (
            acceptance.greedy_law(proposal, logits)
            if greedy
            else acceptance.token_law(proposal, distributions(logits, samplings))
        )
        verdict = acceptance.draw(law, *self._uniforms(proposal.tokens.shape[1], greedy))
        lengths, tokens, bad = torch.stack([verdict.length, verdict.next_token, broken]).tolist()
        return lengths, tokens, bad

    def _check_numbers(self, broken: list[Any], rows: list[Row]) -> None:
        """argmax of NaN is token 0, so that a broken target would look perfectly predictable."""
        for bad, row in zip(broken, rows, strict=True):
            if bad:
                raise UserError(
                    f"The target's logits for request {row.request.id!r} are not numbers (NaN) after "
                    f"{len(row.tokens)} tokens: its weights are damaged, or {self.target.dtype} is too narrow for them. "
                    "Check the checkpoint, or set target.dtype=float32."
                )

    def _uniforms(self, count: int, greedy: bool) -> tuple[Tensor, Tensor]:
        """Keyed by output position: drafted token i's accept draw, and the next token's for each length."""
        rows = len(self.rows)
        if greedy:
            return torch.zeros(rows, count, dtype=torch.float64), torch.zeros(
                rows, count + 1, dtype=torch.float64
            )
        seeds = [row.request.seed for row in self.rows]
        positions = [len(row.tokens) for row in self.rows]
        return (
            torch.from_numpy(uniforms(seeds, positions, Purpose.accept, count)),
            torch.from_numpy(uniforms(seeds, positions, Purpose.next, count + 1)),
        )

    def _draw_next(self, rows: list[Row], logits: Tensor) -> Tensor:
        samplings = [row.request.sampling for row in rows]
        if all(sampling.temperature == 0 for sampling in samplings):
            return logits.argmax(-1)
        seeds, positions = [row.request.seed for row in rows], [len(row.tokens) for row in rows]
        drawn = torch.from_numpy(uniforms(seeds, positions, Purpose.next)[:, 0])
        return draw(distributions(logits, samplings), drawn)

    def _committed(self, tokens: list[list[int]], counts: list[int], features: Tensor | None) -> Committed:
        longest = max(counts)
        padded = [row + [0] * (longest - len(row)) for row in tokens]
        at = torch.tensor(padded, device=self.target.device)
        kept = features[:, :longest] if features is not None else at.new_empty(*at.shape, 0)
        return Committed(at, kept, counts)

    def _leave(self) -> None:
        stay = [index for index, row in enumerate(self.rows) if row.finish is None]
        if len(stay) == len(self.rows):
            return
        self.rows = [self.rows[index] for index in stay]
        if self.state is not None:
            self.state.select(stay)
        if self.draft is not None:
            self.draft.select(self.draft_state, stay)

    def _synchronise(self) -> None:
        """Make the clock honest on a device that works behind Python's back."""
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
