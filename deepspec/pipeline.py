"""`python -m deepspec.pipeline +recipe=X`: prepare, capture (for a feature store), train, evaluate; what is done already
is skipped."""

if __name__ == "__main__":
    from deepspec.config.app import start

    start("pipeline")  # before the imports below, which take seconds

import gc
import time
from importlib import import_module
from pathlib import Path

from deepspec.config.schema import Config, FeatureSource, Precision
from deepspec.errors import UserError

STAGES = ("prepare", "capture", "train", "evaluate")


def run(config: Config) -> None:
    """The stages in order, in this process; each sees for itself whether it is already done."""
    check(config)
    begun = time.perf_counter()
    stores = config.features.source in (FeatureSource.store, FeatureSource.auto)
    stages = [name for name in STAGES if name != "capture" or stores]
    for number, name in enumerate(stages, 1):
        print(f"\n[{number}/{len(stages)}] {name}, after {minutes(time.perf_counter() - begun)}", flush=True)
        import_module(f"deepspec.{name}").run(config)
        gc.collect()  # a stage's target and draft leave memory before the next one loads its own
    print(f"total     {minutes(time.perf_counter() - begun)}", flush=True)


def check(config: Config) -> None:
    """`UserError`, before any long work, for what would stop a later stage; needs no target.

    What the target must be able to do is checked as soon as prepare has loaded it.
    """
    import torch

    from deepspec.drafts.registry import untrained_draft
    from deepspec.evaluation.sources import check_prompts
    from deepspec.training.trackers import check_installed

    if untrained_draft(config.draft) is not None:
        raise UserError(
            f"The draft {config.draft.algorithm} has nothing to train: run prepare, then evaluate, instead of pipeline."
        )
    start = getattr(config.draft, "init_from", None)
    if start is not None and not (Path(start) / "config.json").is_file():
        raise UserError(f"draft.init_from: {start} holds no draft (no config.json).")
    check_prompts(config)
    check_installed(config.train.tracker)
    on_cpu = config.target.device == "cpu" or not torch.cuda.is_available()
    if config.train.precision is Precision.fp16 and on_cpu:
        raise UserError("train.precision=fp16 needs a GPU. Use train.precision=auto, no or bf16.")


def minutes(seconds: float) -> str:
    """`7 s`, `3 min 05 s`, `1 h 02 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
