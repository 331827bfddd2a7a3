"""`python -m deepspec.report [PATH ...]`: write the report again, from result files alone; compare several."""

import argparse
import errno
import os
from collections.abc import Sequence
from pathlib import Path

from deepspec.config.app import with_sentences
from deepspec.errors import UserError
from deepspec.evaluation.result import load_result
from deepspec.reporting import review
from deepspec.reporting.comparison import HEAD as COMPARISON_HEAD
from deepspec.reporting.comparison import csv_rows, grouped
from deepspec.reporting.comparison import lines as comparison_lines
from deepspec.reporting.comparison import render as render_comparison
from deepspec.reporting.html import environment, write_report
from deepspec.reporting.tables import csv_text, write_text
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
    page = write_report(result, file)
    print("\n".join([*summary_lines(result), f"report    {page}"]))
    return page


def compare_all(paths: Sequence[Path]) -> Path | None:
    """The reports of several results, and a page that has them side by side; folders without one are named.

    Returns the page, in the folder that all results lie below (the current one where they share but the root); None
    where fewer than two results were found.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir() and not any((path / inside).is_file() for inside in INSIDE):
            print(f"{path}: no result, left out.")
        else:
            files.append(find_result(path))
            report(files[-1])
    files = list(dict.fromkeys(file.resolve() for file in files))
    if not files:
        raise UserError("None of these folders has a result; `python -m deepspec.evaluate` writes one.")
    if len(files) < 2:
        return None
    folder = Path(os.path.commonpath([file.parent for file in files]))
    groups = grouped([(_name(file, folder), load_result(file)) for file in files])
    place = Path.cwd() if folder == folder.parent else folder
    page = write_text(place / "comparison.html", render_comparison(groups, environment()))
    write_text(place / "comparison.csv", csv_text(COMPARISON_HEAD, csv_rows(groups)))
    print("\n".join([*comparison_lines(groups), f"comparison {page}"]))
    return page


def _name(file: Path, folder: Path) -> str:
    """What tells the file from the others below `folder`."""
    parts = [part for part in file.relative_to(folder).with_suffix("").parts if part != "evaluation"]
    return "/".join(parts[:-1] if len(parts) > 1 and parts[-1] == "result" else parts)


def make_sheet(path: Path | None, number: int) -> Path:
    """A blinded sheet of `number` pairs of answers beside the result: HTML to read, CSV to fill in."""
    file = find_result(path)
    found = review.pairs(load_result(file), number)
    sheet = file.with_name("review.csv")
    if review.filled_in(sheet):
        raise UserError(f"{sheet} has been filled in: rename it first, then review=COPY reads it.")
    write_text(sheet, review.sheet(found))
    template = environment().get_template("review.html.j2")
    page = write_text(file.with_name("review.html"), template.render(pairs=found, sheet=sheet.name))
    print(f"{len(found)} pairs to judge: read {page}, fill in a copy of {sheet}, then review=COPY.")
    return sheet


def read_sheets(path: Path | None, sheets: Sequence[Path]) -> review.Verdict:
    """What people wrote into sheets of this result."""
    result = load_result(find_result(path))
    found = review.pairs(result, len(result.records))
    verdict = review.judge(found, [review.read_sheet(sheet, found) for sheet in sheets])
    print("\n".join(review.lines(verdict)))
    return verdict


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m deepspec.report", description=__doc__.split(": ", 1)[1])
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="a result.json or a run's folder (default: the newest); several are also put side by side; "
        "review=N makes a blinded sheet of N pairs of answers, review=SHEET.csv reads filled ones back",
    )
    words = parser.parse_args(arguments).paths
    reviews = [word.removeprefix("review=") for word in words if word.startswith("review=")]
    paths = [Path(word) for word in words if not word.startswith("review=")]
    with_sentences(lambda: _run(paths, reviews), _about_place)


def _about_place(error: Exception) -> str | None:
    if not isinstance(error, PermissionError) and getattr(error, "errno", None) != errno.EROFS:
        return None
    return (
        f"{getattr(error, 'filename', None)} cannot be written ({error}). What is made of a result is written beside it: "
        "copy the result file elsewhere and name the copy."
    )


def _run(paths: Sequence[Path], reviews: Sequence[str]) -> None:
    if reviews:
        if len(paths) > 1:
            raise UserError("review= is of one result; several were given.")
        path = paths[0] if paths else None
        if len(reviews) == 1 and reviews[0].isdecimal():
            if int(reviews[0]) < 1:
                raise UserError(f"review={reviews[0]}: give a number of pairs, or filled sheets.")
            make_sheet(path, int(reviews[0]))
        else:
            read_sheets(path, [Path(name) for name in reviews])
    elif len(paths) > 1:
        compare_all(paths)
    else:
        report(paths[0] if paths else None)


if __name__ == "__main__":
    main()
