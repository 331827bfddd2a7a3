"""`python -m deepspec.pipeline +recipe=X`: prepare, train, evaluate; what is done already is skipped."""

import gc
import time
from collections.abc import Callable

from deepspec.config.app import entry
from deepspec.config.schema import Config


def run(config: Config) -> None:
    """The three stages in order, in this process; each sees for itself whether it is already done."""
    from deepspec import evaluate, prepare, train

    stages: list[tuple[str, Callable[[Config], object]]] = [
        ("prepare", prepare.run),
        ("train", train.run),
        ("evaluate", evaluate.run),
    ]
    start = time.perf_counter()
    for number, (name, stage) in enumerate(stages, 1):
        print(f"\n[{number}/{len(stages)}] {name}, after {minutes(time.perf_counter() - start)}", flush=True)
        stage(config)
        gc.collect()  # a stage's target and draft leave memory before the next one loads its own
    print(f"total     {minutes(time.perf_counter() - start)}", flush=True)


def minutes(seconds: float) -> str:
    """`7 s`, `3 min 05 s`, `1 h 02 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


main = entry("pipeline", run)

if __name__ == "__main__":
    main()
