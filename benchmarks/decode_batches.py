"""Several rows at once: every way with continuous batching over all prompts, and what was ideal."""

import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from deepspec.decoding import Engine, Request, Result
from deepspec.decoding.cost import Curve
from deepspec.decoding.steps import draft_steps, time_steps, verify_steps
from deepspec.evaluation.measure import Plan
from deepspec.evaluation.prompts import Prompt

PLAIN = "plain"
Rounds = Counter[tuple[int, int]]  # rows and drafted tokens a row → rounds of the whole batch


class Way:
    """One engine's copy for so many rows, which counts its rounds."""

    def __init__(self, engine: Engine, rows: int) -> None:
        self.rounds: Rounds = Counter()
        self.seconds: list[float] = []  # in rounds, of each turn
        self.results: list[Result] = []
        self.engine = Engine(
            engine.target,
            engine.draft,
            k=engine.how.k,
            rule=engine.rule,
            tree=engine.how.tree,
            max_batch_size=rows,
            observe=lambda batch, trial, logits: self.rounds.update(
                [(len(batch), trial.tokens.shape[1] - 1)]
            ),
        )

    def run(self, requests: Sequence[Request]) -> None:
        self.rounds.clear()
        start = time.perf_counter()
        self.results = self.engine.generate(requests)
        prefills = sum(result.prefill_seconds for result in self.results)
        self.seconds.append(time.perf_counter() - start - prefills)

    @property
    def decoded(self) -> int:
        return sum(len(result.tokens) - 1 for result in self.results)

    @property
    def seconds_a_token(self) -> float:
        return statistics.median(self.seconds) / max(1, self.decoded)


def measure_batches(
    engines: Mapping[str, Engine], rows: int, prompts: Sequence[Prompt], plan: Plan
) -> list[dict[str, Any]]:
    """Tokens a second of all rows together without prefills, and engine efficiency: measured over ideal speedup.

    Ideal: each round of plain and of speculative decoding at what its bare steps take with as many rows.
    """
    ways = {name: Way(engine, rows) for name, engine in engines.items()}
    requests = [plan.request(prompt, 0) for prompt in prompts]
    for turn in range(max(2, plan.repeats)):
        for name in sorted(ways, reverse=turn % 2 == 1):
            ways[name].run(requests)
    plain = ways[PLAIN]
    text = _middle(prompts, plain)
    lines = []
    for name, way in ways.items():
        rounds = [r for result in way.results for r in result.rounds]
        speedup = plain.seconds_a_token / way.seconds_a_token
        line: dict[str, Any] = {
            "rows": rows,
            "way": name,
            "tokens_per_second": [way.decoded / seconds for seconds in way.seconds],
            "speedup_same": speedup,
            "tau": sum(r.committed for r in rounds) / len(rounds) if name != PLAIN and rounds else None,
            "ideal": None,
            "efficiency": None,
        }
        if name != PLAIN and rounds:
            best, alone = (
                ideal_seconds(way, rows, text, requests[0]),
                ideal_seconds(plain, rows, text, requests[0]),
            )
            line["ideal"] = (alone / plain.decoded) / (best / way.decoded)
            line["efficiency"] = speedup / line["ideal"]
        lines.append(line)
    return lines


def ideal_seconds(way: Way, rows: int, text: Sequence[int], request: Request) -> float:
    """What the rounds that `way` has counted take if only the modules cost time."""
    grid = sorted({1, max(1, rows // 2), rows})
    engine, widest = way.engine, max(drafted for _, drafted in way.rounds)
    widths = sorted({1, widest + 1})
    verified, drafted = [], []
    for count in grid:
        steps = verify_steps(engine.target, text, widest + 1, count)
        verified.append(list(time_steps({n: steps(n) for n in widths}, 3).values()))
        if engine.draft is not None:
            proposals = draft_steps(engine.target, engine.draft, text, request, 2, count, engine.how.tree)
            drafted.append(list(time_steps({widest: proposals(widest)}, 3).values()))
    verify = Curve(grid, widths, verified)
    draft = Curve(grid, [widest], drafted) if drafted else None
    return sum(
        times * (verify.at(count, n + 1) + (draft.at(count, n) if draft is not None and n else 0.0))
        for (count, n), times in way.rounds.items()
    )


def _middle(prompts: Sequence[Prompt], plain: Way) -> list[int]:
    """A typical text in the middle of its answer."""
    place = sorted(range(len(prompts)), key=lambda index: len(prompts[index].tokens))[len(prompts) // 2]
    answer = plain.results[place].tokens
    return [*prompts[place].tokens, *answer[: (len(answer) + 1) // 2]]
