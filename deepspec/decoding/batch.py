"""The requests being decoded now: prompts enter alone, rounds advance all rows, finished rows leave."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deepspec.decoding import acceptance
from deepspec.decoding.clock import Laps
from deepspec.decoding.control import RoundControl
from deepspec.decoding.fixed import FixedShape
from deepspec.decoding.randomness import Purpose, uniforms
from deepspec.decoding.request import Request, Round
from deepspec.decoding.row import Detokenise, Row
from deepspec.decoding.sampling import distributions, draw, penalise, penalise_paths
from deepspec.decoding.schedule import RoundPlan
from deepspec.decoding.scheduler import Past, Scheduler
from deepspec.decoding.trees import topological
from deepspec.decoding.trial import How, Observe, Outcome, Trial, narrowed
from deepspec.drafts.contract import (
    Beginning,
    Committed,
    DraftContext,
    Drafter,
    Proposal,
    StaticTree,
)
from deepspec.errors import UserError
from deepspec.target import State, Target, chain
from deepspec.target.layout import tree as tree_layout

FIXED_POINT = 2**30  # of a confidence among whole numbers


class Batch:
    """Up to `max_rows` requests on one state.

    Plain decoding (`draft` None) is the same round with an empty proposal: no hooks, capture, schedule or rule.
    scheduler: None = verify what is drafted. fixed: the shape of every round's forward, None = as it comes. observe:
    called with each round's trial and the logits it was judged by, [B, N+1, V] after penalties, before anything is kept.
    """

    def __init__(
        self,
        target: Target,
        draft: Drafter | None,
        how: How,
        max_rows: int,
        detokenise: Detokenise | None = None,
        scheduler: Scheduler | None = None,
        observe: Observe | None = None,
        fixed: FixedShape | None = None,
    ) -> None:
        self.target, self.draft, self.how, self.max_rows = target, draft, how, max_rows
        self.detokenise, self.scheduler, self.observe, self.fixed = detokenise, scheduler, observe, fixed
        self.layers: list[int] = (
            list(draft.capture_layers) if draft is not None and draft.needs_features else []
        )
        self.context = DraftContext(target)
        self.rows: list[Row] = []
        self.state: State | None = None
        self.draft_state: Any = None
        self.speculated: bool | None = None  # this round; None: there was no choice

    # ------------------------------------------------------------------ entering and leaving

    @torch.inference_mode()
    def admit(self, request: Request, limit: int) -> Row:
        """Prefill one prompt alone, draw its first token and add it as the last row, unless that ends it."""
        row = Row(request, limit, self.detokenise)
        if self.scheduler is not None:
            row.past = self.scheduler.new_past()
        device = self.target.device
        prompt = torch.tensor([request.tokens], device=device)
        if request.sampling.repetition_penalty != 1:
            row.seen = torch.zeros(self.target.vocab_size, dtype=torch.bool, device=device)
            row.seen[prompt[0]] = True
        columns = 0 if self.fixed is None else self.fixed.columns
        capacity = max(columns, len(request.tokens) + limit + self.how.most + 1)
        state = self.target.new_state(1, capacity)
        output = self.target.forward(prompt, state, chain([0], prompt.shape[1], device), 1, self.layers)
        state.keep([prompt.shape[1]])
        logits = output.logits[:, -1]
        if row.seen is not None:
            logits = penalise(logits, row.seen, [request.sampling])
        pending = self._draw_next([row], logits)
        token, broken = torch.stack([pending[0], _no_numbers(logits)[0].long()]).tolist()
        row.prefill_seconds = time.perf_counter() - row.started
        if broken:
            self._fail(row)
            return row
        row.commit([token])
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
    def drop(self, row: Row) -> None:
        """End a request before its answer has; the others are not touched."""
        row.finish = "dropped"
        self._leave()

    def _leave(self) -> None:
        stay = [index for index, row in enumerate(self.rows) if row.finish is None]
        if len(stay) == len(self.rows):
            return
        self.rows = [self.rows[index] for index in stay]
        if self.state is not None:
            self.state.select(stay)
        if self.draft is not None:
            self.draft.select(self.draft_state, stay)

    def _fail(self, row: Row) -> None:
        """argmax of NaN is token 0, so that a broken target would look perfectly predictable."""
        row.fail(
            f"The target's logits for request {row.request.id!r} are not numbers (NaN or infinite) after "
            f"{len(row.tokens)} tokens: its weights are damaged, or {self.target.dtype} is too narrow for them. "
            "Check the checkpoint, or set target.dtype=float32."
        )

    # ------------------------------------------------------------------ one round

    @torch.inference_mode()
    def step(self) -> list[tuple[Row, list[int]]]:
        """One round of every row. Returns the rows with the tokens that each kept; the finished have left."""
        laps = Laps(self.target.device)
        proposal, drafted = self._propose()
        laps.lap()
        trial = self._arrange(proposal)
        assert self.state is not None
        read = self.target.forward if self.fixed is None else self.fixed.forward
        output = read(trial.tokens, self.state, trial.layout, layers=self.layers)
        laps.lap()
        outcome = self._judge(trial, output.logits)
        self._remember(outcome, output.features)
        kept = self._commit(outcome)
        self._record(laps, drafted, trial, outcome, kept)
        result = list(zip(self.rows, kept, strict=True))
        self._leave()
        return result

    def _propose(self) -> tuple[Proposal, list[int]]:
        """What the target is to verify, and how many tokens were drafted a row."""
        room = self._room()
        self.speculated = None
        if self.draft is None or max(room) < 1:
            return self._nothing()
        scheduler, plan = self.scheduler, None
        # A chain is drafted no longer than can be kept. A tree keeps its shape, whatever any row has left.
        count = min(self.how.k, max(room)) if self.how.tree is None else self.how.longest
        if scheduler is not None:
            self.speculated = scheduler.speculates(self._pasts())
            if not self.speculated:
                return self._nothing()
            plan = scheduler.plan(room)
            if plan is not None and scheduler.gives_confidence is False:
                # Known before anything is drafted: no more is drafted than that.
                planned = plan.through(scheduler.expected(self._pasts()))
                count = min(count, max(planned))
                if count < 1:
                    return self._nothing()
            elif plan is not None:
                count = min(count, plan.limit)
        control = RoundControl(
            [row.request for row in self.rows],
            [len(row.tokens) for row in self.rows],
            count,
            self.how.tree,
            self.how.sampled_children,
            self._seen(),
            plan,
        )
        proposal = self.draft.propose(self.draft_state, control)
        self._check(proposal)
        drafted = list(proposal.length)
        if scheduler is not None and plan is not None:
            proposal = replace(proposal, length=self._planned(scheduler, plan, proposal, control.asked))
        return self._schedule(proposal), drafted

    def _nothing(self) -> tuple[Proposal, list[int]]:
        empty = torch.empty(len(self.rows), 0, dtype=torch.long, device=self.target.device)
        return Proposal(empty, [0] * len(self.rows)), [0] * len(self.rows)

    def _planned(self, scheduler: Scheduler, plan: RoundPlan, proposal: Proposal, asked: bool) -> list[int]:
        """Each row's length by the schedule. Asked while drafting, it has decided already."""
        if scheduler.gives_confidence is not False:
            scheduler.gives_confidence = asked or proposal.confidence is not None
            if proposal.confidence is not None and not asked:
                plan.through(proposal.confidence.tolist(), told=True)
            elif not asked:
                plan.through([row[: proposal.tokens.shape[1]] for row in scheduler.expected(self._pasts())])
        return [min(pair) for pair in zip(proposal.length, plan.lengths, strict=True)]

    def _schedule(self, proposal: Proposal) -> Proposal:
        """How much of each row's proposal the target reads now: here, of a chain what the row can still keep.

        Row by row, so that a request's rounds do not depend on what its batch mates have left. Columns that no
        row needs are not read. Of a tree all is read, and what lies too deep not accepted (`_arrange`).
        """
        if proposal.parents is not None:
            return narrowed(proposal, max(proposal.length))
        lengths = [min(pair) for pair in zip(proposal.length, self._room(), strict=True)]
        return narrowed(replace(proposal, length=lengths), max(lengths))

    def _arrange(self, proposal: Proposal) -> Trial:
        assert self.state is not None
        pending = self._to_device([[row.tokens[-1]] for row in self.rows])
        tokens = torch.cat([pending, proposal.tokens], 1)
        shape = sound = None
        if proposal.parents is None:
            layout = chain(self.state.lengths, tokens.shape[1], self.target.device)
        else:
            lengths = self._to_device(proposal.length)
            parents, sound = topological(proposal.parents, lengths)
            if self.how.sampled_children and isinstance(self.how.tree, StaticTree):
                sound &= (parents == self._to_device(self.how.tree.parents)).all(-1)
            layout = tree_layout(self.state.lengths, parents)
            shape = acceptance.Shape.of(parents, layout.visible, lengths, self._to_device(self._room()))
        if max(self.state.lengths) + tokens.shape[1] > self.target.max_positions:
            # Only tokens that the row cannot keep stand so far; a family with learned positions has none there.
            layout.positions.clamp_(max=self.target.max_positions - 1)
        return Trial(proposal, tokens, layout, shape, sound)

    def _judge(self, trial: Trial, logits: Tensor) -> Outcome:
        """Verify; the round's one transfer from the device is here."""
        proposal, samplings = trial.proposal, [row.request.sampling for row in self.rows]
        broken = _no_numbers(logits).any(-1)
        if (seen := self._seen()) is not None:
            logits = penalise_paths(logits, trial.tokens, trial.layout.visible, seen, samplings)
        if self.observe is not None:
            self.observe(self.rows, trial, logits)
        if proposal.tokens.shape[1] == 0:
            next_token = self._draw_next(self.rows, logits[:, -1])
            verdict = acceptance.Verdict(torch.zeros_like(next_token), next_token)
        elif all(sampling.temperature == 0 for sampling in samplings) and self.how.rule != "token":
            law = acceptance.choose_greedy(proposal, logits, trial.shape)
            verdict = acceptance.draw(law, *self._uniforms(proposal.tokens.shape[1], drawn=False))
        else:
            p = distributions(logits, samplings)
            sampled = acceptance.choose_sampled(self.how.rule, proposal, p, trial.shape)
            verdict = acceptance.draw(sampled, *self._uniforms(proposal.tokens.shape[1], drawn=True))
        return self._fetch(trial, verdict, broken)

    def _fetch(self, trial: Trial, verdict: acceptance.Verdict, broken: Tensor) -> Outcome:
        accepted, path, sure = trial.proposal.tokens, None, trial.proposal.confidence
        # Whatever the host is to know crosses with this one transfer, as whole numbers: of a tree where its path
        # runs, of a chain how sure the draft was. A second transfer would be a second wait.
        more = accepted[:, :0]
        if verdict.path is not None:
            accepted, more = accepted.gather(1, verdict.path), verdict.path
            path = torch.cat([torch.zeros_like(more[:, :1]), more + 1], 1)
        elif trial.shape is None and sure is not None:
            more = (sure.double() * FIXED_POINT).round().long()
        depth = verdict.length if trial.shape is None else trial.shape.depth
        sound = torch.ones_like(broken) if trial.sound is None else trial.sound
        columns = torch.stack([verdict.length, verdict.next_token, broken.long(), depth, sound.long()], 1)
        fetched = torch.cat([columns, accepted, more], 1).tolist()
        told = [row[columns.shape[1] + accepted.shape[1] :] for row in fetched]
        if not all(row[4] for row in fetched):
            raise UserError(
                f"{type(self.draft).__name__} proposed a tree that is none: every node's parent must be -1 or a node "
                "before it, and children that are drawn must all be there, in the order of decode.tree_parents."
            )
        if all(where[: row[0]] == list(range(row[0])) for where, row in zip(told, fetched, strict=True)):
            path = None  # its nodes stand where they are to stay
        return Outcome(
            tokens=[[*row[5 : 5 + row[0]], row[1]] for row in fetched],
            broken=[bool(row[2]) for row in fetched],
            deepest=trial.proposal.length if trial.shape is None else [row[3] for row in fetched],
            path=path,
            confidence=[
                [] if trial.shape is not None else [one / FIXED_POINT for one in row] for row in told
            ],
        )

    def _remember(self, outcome: Outcome, features: Tensor | None) -> None:
        """Target and draft keep the accepted path, and forget the rest of what they have read."""
        assert self.state is not None
        longest = max(outcome.counts)
        path = None if outcome.path is None else outcome.path[:, :longest]
        self.state.keep(outcome.counts, path)
        if self.draft is None:
            return
        at = self._to_device([tokens + [0] * (longest - len(tokens)) for tokens in outcome.tokens])
        if features is None:
            kept = at.new_empty(*at.shape, 0)
        elif path is None:
            kept = features[:, :longest]
        else:
            kept = features.gather(1, path[..., None].expand(-1, -1, features.shape[-1]))
        self.draft.update(self.draft_state, Committed(at, kept, outcome.tokens))

    def _commit(self, outcome: Outcome) -> list[list[int]]:
        """Each row's tokens that stand; a row whose logits are not numbers gets none, and ends."""
        kept = []
        for row, tokens, broken in zip(self.rows, outcome.tokens, outcome.broken, strict=True):
            if broken:
                self._fail(row)
            kept.append([] if broken else row.commit(tokens))
        return kept

    def _record(
        self, laps: Laps, drafted: list[int], trial: Trial, outcome: Outcome, kept: list[list[int]]
    ) -> None:
        (draft_seconds, verify_seconds), rest_seconds = laps.seconds()
        for index, row in enumerate(self.rows):
            if row.error:
                continue
            count, accepted = len(kept[index]), len(outcome.tokens[index]) - 1
            # What lies behind an answer's end was neither verified nor accepted for anything that counts.
            cut, verified = count <= accepted, outcome.deepest[index]
            row.rounds.append(
                Round(
                    drafted=drafted[index],
                    verified=min(verified, count) if cut else verified,
                    accepted=min(accepted, count),
                    committed=count,
                    cut=cut,
                    draft_seconds=draft_seconds,
                    verify_seconds=verify_seconds,
                    rest_seconds=rest_seconds,
                    scheduled=trial.proposal.length[index],
                    confidence=outcome.confidence[index][: trial.proposal.length[index]],
                )
            )
        if self.scheduler is not None:
            sound = [row for row in self.rows if not row.error]
            rounds = [row.rounds[-1] for row in sound]
            self.scheduler.record([row.past for row in sound if row.past], rounds, self.speculated)

    # ------------------------------------------------------------------ helpers

    def _check(self, proposal: Proposal) -> None:
        """UserError where a draft's proposal has not the shape of one."""
        rows, count = proposal.tokens.shape
        name, tree, parents = type(self.draft).__name__, self.how.tree, proposal.parents
        if len(proposal.length) != rows or rows != len(self.rows) or max(proposal.length) > count:
            raise UserError(
                f"{name} proposed tokens of shape {[rows, count]} and lengths {proposal.length} for {len(self.rows)} "
                "rows; both need a row a request, and no length more than there are tokens."
            )
        if parents is None:
            return
        self.target.require("tree")
        whole = isinstance(tree, StaticTree) and set(proposal.length) == {len(tree.parents)}
        if parents.shape != proposal.tokens.shape or (self.how.sampled_children and not whole):
            raise UserError(
                f"{name} proposed {count} tokens and parents of shape {list(parents.shape)}; there must be one for each "
                "token and, where children are sampled, every node of decode.tree_parents."
            )

    def _pasts(self) -> list[Past]:
        return [row.past for row in self.rows if row.past is not None]

    def _room(self) -> list[int]:
        """Drafted tokens each row can still keep, with the target's own behind them."""
        return [max(0, row.remaining - 1) for row in self.rows]

    def _seen(self) -> Tensor | None:
        """[B, V] bool, the tokens of each row's text; None where no row has a repetition penalty."""
        some = next((row.seen for row in self.rows if row.seen is not None), None)
        if some is None:
            return None
        return torch.stack([torch.zeros_like(some) if row.seen is None else row.seen for row in self.rows])

    def _uniforms(self, count: int, drawn: bool) -> tuple[Tensor, Tensor]:
        """The draws of a round: [B, count] for the drafted tokens' tests, [B] for the next token."""
        device, rows = self.target.device, len(self.rows)
        if not drawn:
            return torch.zeros(rows, count, device=device), torch.zeros(rows, device=device)
        seeds = [row.request.seed for row in self.rows]
        positions = [len(row.tokens) for row in self.rows]
        accept = torch.from_numpy(uniforms(seeds, positions, Purpose.accept, count))
        after = torch.from_numpy(uniforms(seeds, positions, Purpose.next)[:, 0])
        return accept.to(device, non_blocking=True), after.to(device, non_blocking=True)

    def _draw_next(self, rows: list[Row], logits: Tensor) -> Tensor:
        """[B, V] → [B], where nothing was drafted."""
        samplings = [row.request.sampling for row in rows]
        if all(sampling.temperature == 0 for sampling in samplings):
            return logits.argmax(-1)
        seeds, positions = [row.request.seed for row in rows], [len(row.tokens) for row in rows]
        drawn = torch.from_numpy(uniforms(seeds, positions, Purpose.next)[:, 0])
        return draw(distributions(logits, samplings), drawn)

    def _to_device(self, values: Sequence[Any]) -> Tensor:
        """int64. From memory that is not pinned the copy is staged at once, so that nothing waits for the device."""
        return torch.tensor(values).to(self.target.device, non_blocking=True)


def _no_numbers(logits: Tensor) -> Tensor:
    """[..., V] → bool [...], no token can be drawn by them. The maximum is NaN if any logit is, and infinite where
    one has overflowed or none is left; the −inf of a masked-out vocabulary entry does no harm."""
    return ~logits.amax(-1).isfinite()
