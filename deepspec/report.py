"""`python -m deepspec.report [PATH ...]`: write the report again, from the result file alone."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from deepspec.config.app import with_sentences
from deepspec.errors import UserError
from deepspec.evaluation.result import load_result
from deepspec.reporting.html import write_report
from deepspec.reporting.words import summary_lines

RUNS = Path("runs")
INSIDE = (Path("evaluation") / "result.json", Path("result.json"))


def find_result(path: Path | None) -> Path:
    """The result file meant by a path (a result file or a run's folder; None: the newest below runs/)."""
    if path is None:
        found = sorted(RUNS.glob("**/evaluation/result.json"), key=lambda file: file.stat().st_mtime)
        if not found:
            raise UserError("There is no result below runs/; `python -m deepspec.evaluate` writes one.")
        return found[-1]
    if path.is_dir():
        for inside in INSIDE:
            if (path / inside).is_file():
                return path / inside
        raise UserError(f"{path} has no evaluation/result.json; `python -m deepspec.evaluate` writes it.")
    return path


def report(path: Path | None) -> Path:
    """Write the report beside its result file (`result.json` → `report.html`, `x.json` → `x.html`)."""
    file = find_result(path)
    result = load_result(file)
    page = file.with_name("report.html") if file.name == "result.json" else file.with_suffix(".html")
    write_report(result, page)
    print("\n".join([*summary_lines(result), f"report    {page}"]))
    return page


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m deepspec.report", description=__doc__.split(": ", 1)[1])
    parser.add_argument(
        "paths",
        nargs="*",
        type=Path,
        metavar="PATH",
        help="a result.json or a run's folder (default: the newest)",
    )
    paths: list[Path | None] = [*parser.parse_args(arguments).paths] or [None]

    def write_all() -> None:
        for path in paths:
            report(path)

    with_sentences(write_all)


if __name__ == "__main__":
    main()
