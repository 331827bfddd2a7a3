"""The main run: every prompt of the list decoded every way, conversations turn by turn, each on disk when done."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from deepspec.decoding.request import Result
from deepspec.decoding.steps import draft_steps, verify_steps
from deepspec.decoding.trees import size_of
from deepspec.drafts.contract import Drafter, DynamicTree, StaticTree
from deepspec.evaluation.bare import logits_two_ways
from deepspec.evaluation.ideal import StepClock
from deepspec.evaluation.journal import Journal
from deepspec.evaluation.measure import SPECULATIVE, Decode, Hooks, Plan, measure, records, warm_up
from deepspec.evaluation.prompts import Prompt
from deepspec.evaluation.result import PromptRecord
from deepspec.evaluation.turns import Following
from deepspec.target import Target


class MainRun:
    """arms: decoders by name. k: drafted tokens a round, or a tree's depth. following: the next turn's prompt.

    resumed: prompts that the journal had already. steps: times of bare steps, taken between the decodings.
    """

    def __init__(
        self,
        target: Target,
        draft: Drafter,
        arms: Mapping[str, Decode],
        plan: Plan,
        k: int,
        tree: StaticTree | DynamicTree | None,
        following: Following,
    ) -> None:
        self.target, self.draft, self.arms, self.plan = target, draft, arms, plan
        self.k, self.tree, self.following = k, tree, following
        ids = getattr(draft, "vocab", None)
        self.vocabulary: set[int] | None = None if ids is None else set(ids.tolist())
        self.resumed = 0
        self.steps = StepClock(k, 1)

    def records(
        self, prompts: Sequence[Prompt], journal: Journal, wait: Callable[[], None], hooks: Hooks
    ) -> list[PromptRecord]:
        """Measure what the journal does not have, each conversation by one process; then all records, in order, to
        the first process (it removes the journal when it has them)."""
        done = journal.records()
        self.resumed = len(done)
        wait()  # all must see the same prompts as left
        left = [(number, prompt) for number, prompt in enumerate(prompts) if self._open(prompt, done)]
        mine = [pair for place, pair in enumerate(left) if journal.mine(place)]
        self.steps = StepClock(self._read, len(mine), whole=self.tree is not None)
        if mine:
            warm_up(prompts, self.arms, self.plan, hooks)
        for place, (number, prompt) in enumerate(mine):
            while (turn := self._open(prompt, done)) is not None:
                done[turn.id] = self._measured(turn, number, place, hooks)
                journal.append(done[turn.id])
        wait()
        if journal.rank:
            return []
        done = journal.records()
        return [done[turn.id] for prompt in prompts for turn in self._turns(prompt, done) if turn.id in done]

    def _turns(self, prompt: Prompt, done: Mapping[str, PromptRecord]) -> Iterator[Prompt]:
        """The conversation's turns, as far as their earlier answers are known."""
        turn: Prompt | None = prompt
        while turn is not None:
            yield turn
            record = done.get(turn.id)
            turn = None if record is None else self.following(turn, record.plain[0].text)

    def _open(self, prompt: Prompt, done: Mapping[str, PromptRecord]) -> Prompt | None:
        """The conversation's first turn that has no record yet; None: it is finished."""
        return next((turn for turn in self._turns(prompt, done) if turn.id not in done), None)

    def _measured(self, prompt: Prompt, number: int, place: int, hooks: Hooks) -> PromptRecord:
        """One prompt decoded every way. number: among all, which decides which way goes first; place: among those
        of this process."""
        hooks = replace(hooks, after=lambda _, results: self._time_steps(place, prompt, results))
        results = measure([prompt], self.arms, replace(self.plan, warmup=0), hooks, first=number)
        greedy = self.plan.sampling.temperature == 0
        proof = (
            logits_two_ways(self.target, self._read, self.plan.sampling.repetition_penalty)
            if greedy
            else None
        )
        (record,) = records([prompt], results, self._text, proof)
        if self.vocabulary is not None:
            for decoding in record.speculative:
                decoding.outside = [i for i, t in enumerate(decoding.tokens) if t not in self.vocabulary]
        return record

    @property
    def _read(self) -> int:
        """Drafted tokens that the target reads in a round at most."""
        return self.k if self.tree is None else size_of(self.tree)

    def _text(self, tokens: list[int]) -> str:
        if self.target.tokenizer is None:
            return ""
        kept = tokens[:-1] if tokens and tokens[-1] in self.target.eos else tokens
        return str(self.target.tokenizer.decode(kept))

    def _time_steps(self, place: int, prompt: Prompt, results: Mapping[str, Result]) -> None:
        """Bare steps in the middle of the answer just decoded, for rounds like its own."""
        answer = results[SPECULATIVE]
        if not answer.rounds or not self.steps.wants(place):
            return
        text = [*prompt.tokens, *answer.tokens[: (len(answer.tokens) + 1) // 2]]
        committed = max(1, round(sum(r.committed for r in answer.rounds) / len(answer.rounds)))
        self.steps.take(
            verify_steps(self.target, text, self._read + 1),
            draft_steps(
                self.target, self.draft, text, self.plan.request(prompt, 0), committed, tree=self.tree
            ),
            context=len(text),
        )
