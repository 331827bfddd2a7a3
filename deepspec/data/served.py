"""Answers by the target behind servers: conversation by conversation, turn by turn, in any order."""

import json
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from deepspec.artifacts import fingerprint
from deepspec.data.answers import questions, samples_of
from deepspec.data.conversation import BadRow, Conversation, Message, Tally, hash_order
from deepspec.data.ledger import Ledger
from deepspec.data.servers import Failure, Pool
from deepspec.data.shapes import tool_calls
from deepspec.data.store import Store
from deepspec.data.template import ChatTemplate

FINISHED = ("stop", "tool_calls")
CUT = "length"
NO_ANSWER = "no answer from the servers"


@dataclass(frozen=True)
class _Job:
    n: int
    sample: int
    conversation: Conversation


@dataclass(frozen=True)
class _Told:
    """The turns that were answered: what was asked since the last, the answer, how it ended. failed: why it
    went no further."""

    job: _Job
    turns: list[tuple[tuple[Message, ...], dict[str, Any]]]
    failed: str | None = None


@dataclass
class Server:
    """Fills the store's turns from a pool, everything kept in `ledger`. recipe: what else decides an answer."""

    pool: Pool
    ledger: Ledger
    recipe: dict[str, Any]
    seed: int

    def keep(self, folder: Path) -> None:
        """Write every answer that was used into `folder`."""
        self.ledger.keep(folder)

    def regenerate(self, store: Store, template: ChatTemplate, *, samples: int, tally: Tally) -> None:
        """Answer the marked conversations; a turn without an answer ends its conversation and is
        counted, as are those after a cut answer."""
        jobs = self._jobs(store, samples)
        total = sum(samples_of(store, n, samples) for n, _ in store.conversations("anew"))
        with (
            tqdm(total=total, desc="answers", unit="row", smoothing=0) as bar,
            ThreadPoolExecutor(self.pool.workers) as threads,
        ):
            running: set[Future[_Told]] = set()
            try:
                for job in jobs:
                    running.add(threads.submit(self._converse, job))
                    if len(running) >= 2 * self.pool.workers:
                        done, running = wait(running, return_when=FIRST_COMPLETED)
                        self._take_all(done, store, template, tally, bar)
                while running:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    self._take_all(done, store, template, tally, bar)
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                self.pool.close()
                raise

    def _take_all(
        self, done: set[Future[_Told]], store: Store, template: ChatTemplate, tally: Tally, bar: Any
    ) -> None:
        for future in done:
            self._take(future.result(), store, template, tally)
        bar.update(len(done))

    def chat(self, texts: list[str], seeds: list[int]) -> list[str | None]:
        """Answers to single questions, in their order; None where one failed or was cut."""

        def one(text: str, seed: int) -> str | None:
            name = fingerprint([self.recipe, "chat", text, seed])
            answer = self.ledger.answer(name)
            if answer is None:
                try:
                    reply = self.pool.ask([{"role": "user", "content": text}], (), seed)
                except Failure:
                    return None
                answer = {"message": reply.message, "finish_reason": reply.finish_reason}
                answer |= {"usage": reply.usage, "model": reply.model}
                self.ledger.keep_answer(name, answer)
            return str(answer["message"]["content"]) if answer["finish_reason"] == FINISHED[0] else None

        with ThreadPoolExecutor(self.pool.workers) as threads:
            return list(threads.map(one, texts, seeds))

    def _jobs(self, store: Store, samples: int) -> Iterator[_Job]:
        for n, conversation in store.conversations("anew", "key"):
            for sample in range(samples_of(store, n, samples)):
                yield _Job(n, sample, conversation)

    def _converse(self, job: _Job) -> _Told:
        """In a thread: every turn in order, from the ledger where it is there."""
        history: list[Message] = []
        turns: list[tuple[tuple[Message, ...], dict[str, Any]]] = []
        tools = job.conversation.tools
        for turn, asked in enumerate(questions(job.conversation)):
            history += asked
            name = fingerprint([self.recipe, history, list(tools), job.sample])
            answer = self.ledger.answer(name)
            if answer is None:
                failure = self.ledger.failure(name)
                if failure is not None:
                    return _Told(job, turns, failure["reason"])
                try:
                    answer = self._ask(history, tools, f"answer {job.conversation.key} {turn} {job.sample}")
                except (Failure, BadRow) as error:
                    if not self.pool.stopped.is_set():
                        record = {"id": job.conversation.id, "sample": job.sample, "turn": turn}
                        self.ledger.keep_failure(name, {**record, "reason": str(error)})
                    return _Told(job, turns, str(error))
                answer |= {"id": job.conversation.id, "sample": job.sample, "turn": turn}
                self.ledger.keep_answer(name, answer)
            turns.append((asked, answer))
            history.append(answer["message"])
            if answer["finish_reason"] == CUT:
                break
        return _Told(job, turns)

    def _ask(self, history: list[Message], tools: Any, text: str) -> dict[str, Any]:
        reply = self.pool.ask(history, tools, hash_order(self.seed, text))
        if reply.finish_reason not in (*FINISHED, CUT):
            raise Failure(f"finish_reason {reply.finish_reason}")
        message = dict(reply.message)
        if "tool_calls" in message:
            message["tool_calls"] = tool_calls(message["tool_calls"], "the server's answer")
        return {
            "message": message,
            "finish_reason": reply.finish_reason,
            "usage": reply.usage,
            "model": reply.model,
        }

    def _take(self, told: _Told, store: Store, template: ChatTemplate, tally: Tally) -> None:
        """In the main thread: a conversation's answers as tokens into the store."""
        job = told.job
        history: list[Message] = []
        for turn, (asked, answer) in enumerate(told.turns):
            history += asked
            message, ended = answer["message"], answer["finish_reason"] != CUT
            try:
                found = template.answered(history, message, job.conversation.tools, ended)
            except BadRow as error:
                tally.drop_conversation(job.conversation, error.reason, str(error))
                return
            body = json.dumps([found.prompt, found.answer, ended, [*asked, message]])
            store.run("INSERT INTO turn VALUES (?, ?, ?, ?)", (job.n, job.sample, turn, body))
            history.append(message)
        cut = bool(told.turns) and told.turns[-1][1]["finish_reason"] == CUT
        if cut and len(told.turns) < len(list(questions(job.conversation))):
            tally.drop_conversation(job.conversation, "later turns: the answer before them was cut")
        if told.failed is not None:
            reason = f"later turns: {NO_ANSWER}" if told.turns else NO_ANSWER
            tally.drop_conversation(job.conversation, reason, f"{reason}: {told.failed}")
