"""Metrics in the `evaluate` library's format, loaded by path and offline: the shipped ones and a user's own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, Protocol

from deepspec.errors import UserError

SHIPPED = Path(__file__).parent.parent / "metrics"


class LoadedMetric(Protocol):
    """The part of `evaluate.Metric` that is used."""

    def compute(self, *, predictions: list[str], references: list[list[str]]) -> dict[str, Any] | None:
        """Numbers by name."""


def metric_path(name: str) -> Path:
    """The file of a shipped metric, or a user's file or folder (with a file of the folder's own name).

    UserError where there is none; nothing is loaded.
    """
    shipped = SHIPPED / f"{name}.py"
    if shipped.is_file():
        return shipped
    path = Path(name)
    if path.is_dir():
        path = path / f"{path.resolve().name}.py"
    if not path.is_file() or path.suffix != ".py":
        known = ", ".join(sorted(file.stem for file in SHIPPED.glob("*.py") if file.stem != "__init__"))
        raise UserError(
            f"evaluate.metrics: {name!r} is neither a metric that ships ({known}) nor a Python file, or a folder with "
            "a file of its own name, that defines an `evaluate.Metric`."
        )
    return path


def load_metric(name: str) -> LoadedMetric:
    """Load a metric; the `evaluate` library is imported here, which takes seconds."""
    path = metric_path(name)
    try:
        import evaluate
    except ImportError as error:
        raise UserError("evaluate.metrics needs packages more: pip install sacrebleu rouge-score") from error
    try:
        metric = evaluate.load(str(path), experiment_id="deepspec", keep_in_memory=True)
    except Exception as error:  # a user's file may raise anything
        raise UserError(
            f"evaluate.metrics: {path} cannot be loaded as an `evaluate.Metric` ({type(error).__name__}: {error})."
        ) from error
    if not isinstance(metric, evaluate.Metric):
        raise UserError(f"evaluate.metrics: {path} defines no subclass of `evaluate.Metric`.")
    return metric


def compute(
    name: str, metric: LoadedMetric, predictions: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, float]:
    """All numbers of a metric over these answers; UserError where it fails or gives something else."""
    try:
        with _quiet():
            found = metric.compute(
                predictions=list(predictions), references=[list(texts) for texts in references]
            )
    except Exception as error:  # a user's file may raise anything
        raise UserError(f"evaluate.metrics: {name} failed ({type(error).__name__}: {error}).") from error
    numbers = {
        str(key): float(value)
        for key, value in (found or {}).items()
        if isinstance(value, int | float) or hasattr(value, "__float__")
    }
    if not numbers:
        raise UserError(f"evaluate.metrics: {name} returned no number.")
    return numbers


@contextmanager
def _quiet() -> Iterator[None]:
    """Some metrics print while they compute."""
    with redirect_stdout(StringIO()):
        yield
