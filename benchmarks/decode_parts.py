"""Where a round's time goes: the engine's own steps, timed from outside."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from deepspec.decoding import Engine
from deepspec.decoding.batch import Batch
from deepspec.evaluation.measure import Plan
from deepspec.evaluation.prompts import Prompt

PARTS = ("draft", "verify", "rule", "cache", "python")
# The draft's `update` runs inside `_remember`, and is the draft's.
INSIDE = (("_propose", "draft"), ("_judge", "rule"), ("_remember", "remember"), ("step", "step"))


def where_the_time_goes(engine: Engine, prompts: Sequence[Prompt], plan: Plan) -> dict[str, float] | None:
    """Milliseconds a round and each part's share, in a run of its own: the clocks cost a little themselves.

    python: what lies between the parts. None where no round was needed.
    """
    with _parts(engine) as seconds:
        rounds = sum(len(engine.generate([plan.request(p, 0)])[0].rounds) for p in prompts)
    if not rounds:
        return None
    whole, update = seconds["step"], seconds["update"]
    found = {
        "draft": seconds["draft"] + update,
        "verify": seconds["verify"],
        "rule": seconds["rule"],
        "cache": seconds["remember"] - update,
    }
    found["python"] = max(whole - sum(found.values()), 0.0)
    return {"ms_a_round": 1000 * whole / rounds, **{part: value / whole for part, value in found.items()}}


@contextmanager
def _parts(engine: Engine) -> Iterator[dict[str, float]]:
    """Seconds inside the engine's own steps meanwhile, the device waited for at each."""
    seconds: dict[str, float] = defaultdict(float)
    device = engine.target.device

    def timed(owner: Any, name: str, part: str) -> Callable[[], None]:
        original = getattr(owner, name)
        own = name in vars(owner)

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = original(*args, **kwargs)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds[part] += time.perf_counter() - start
            return result

        setattr(owner, name, call)
        return lambda: setattr(owner, name, original) if own else delattr(owner, name)

    undo = [timed(Batch, name, part) for name, part in INSIDE]
    undo.append(timed(engine.target, "forward", "verify"))
    if engine.draft is not None:
        undo.append(timed(engine.draft, "update", "update"))
    admit = Batch.admit

    def outside(self: Batch, *args: Any) -> Any:
        """A prefill is no part of a round."""
        before = seconds["verify"]
        row = admit(self, *args)
        seconds["verify"] = before
        return row

    Batch.admit = outside  # type: ignore[assignment, method-assign]
    try:
        yield seconds
    finally:
        Batch.admit = admit  # type: ignore[method-assign]
        for restore in reversed(undo):
            restore()
