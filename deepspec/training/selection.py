"""Which draft is exported, and when training has been long enough: decided at each evaluation."""

from typing import Any

from deepspec.config.schema import KeepBest, TrainConfig
from deepspec.training.checkpoint import Counters


def take_in(evaluation: dict[str, Any], counters: Counters, config: TrainConfig) -> bool:
    """Note an evaluation of step `counters.step` and whether it ends training; True if it is the best so far.

    Compared is `train.keep_best`: τ (where none can be known, the held-out loss) or the loss. With
    `train.decode_every` only a decoded τ counts, and evaluations without one are passed over.
    """
    counters.evaluation = evaluation
    if config.decode_every and "decoded_tau" not in evaluation:
        return False
    name, value = _measure(evaluation, config.keep_best)
    better = value is not None and _better(name, value, counters.best)
    if better:
        counters.best = {"step": counters.step, "by": name, "value": value, "evaluation": evaluation}
    counters.worse = 0 if better else counters.worse + 1
    counters.stopped = _why_stop(evaluation, counters, config)
    return better


def tau_of(evaluation: dict[str, Any]) -> tuple[str, float | None]:
    """Decoded τ if it was measured, else the offline one; with its name."""
    if "decoded_tau" in evaluation:
        return "decoded τ", evaluation["decoded_tau"]
    return "offline τ", evaluation["tau"]


def _measure(evaluation: dict[str, Any], by: KeepBest) -> tuple[str, float | None]:
    name, tau = tau_of(evaluation)
    if by is KeepBest.tau and tau is not None:
        return name, tau
    return "held-out loss", None if by is KeepBest.none else evaluation.get("held_out_loss")


def _better(name: str, value: float, best: dict[str, Any] | None) -> bool:
    if best is None:
        return True
    if best["by"] != name:
        return False  # not to be compared
    return value < best["value"] if name == "held-out loss" else value > best["value"]


def _why_stop(evaluation: dict[str, Any], counters: Counters, config: TrainConfig) -> str | None:
    name, tau = tau_of(evaluation)
    wanted = config.stop_when.tau
    if wanted is not None and tau is not None and tau >= wanted:
        return f"{name} reached {tau:.3f} (train.stop_when.tau={wanted:g})"
    if config.patience is not None and counters.worse >= config.patience:
        step = (counters.best or {}).get("step")
        return f"{counters.worse} evaluations brought nothing better than step {step} (train.patience)"
    return None
