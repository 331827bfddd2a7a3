"""People judge: a blinded sheet of plain and speculative answers side by side, and what came back.

Which answer stands left depends on the seed, the measurement and the prompt alone, so no key has to be kept: the
filled sheet is read back with the same result file.
"""

import csv
import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from statistics import NormalDist

from deepspec.errors import UserError
from deepspec.evaluation.result import EvaluationResult, PromptRecord
from deepspec.reporting.tables import csv_text

HEAD = ("number", "prompt", "left", "right", "better")
ANSWERS = ("left", "right", "same")
SURE = 5000  # letters of an answer by which a sheet is known; a spreadsheet's cells end somewhere behind them


@dataclass(frozen=True)
class Pair:
    """One line of the sheet. number: 1-based. speculative_left: not told to whoever judges."""

    number: int
    prompt: str
    left: str
    right: str
    speculative_left: bool


@dataclass(frozen=True)
class Share:
    """A share with its 95% Wilson interval; all None of nothing."""

    hits: int
    of: int
    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Verdict:
    """What people said. preferred: speculative answers among those where one was better; p_value: of "neither is
    preferred" (exact sign test). agreement: pairs on which two people said the same, among all such pairs."""

    people: int
    judged: int
    same: Share
    preferred: Share
    p_value: float
    agreement: Share


def pairs(result: EvaluationResult, number: int, seed: int = 0) -> list[Pair]:
    """At most `number` prompts whose answers differ, in a random order; UserError where none does."""
    differing = [record for record in result.records if record.plain[0].text != record.speculative[0].text]
    if not differing:
        raise UserError(
            "Every answer is the same text both ways: there is nothing to judge. (Sampled answers differ: "
            "decode.temperature above 0.)"
        )
    chosen = sorted(differing, key=lambda record: _hash(result, record, seed, "order"))[:number]
    return [_pair(place, result, record, seed) for place, record in enumerate(chosen, start=1)]


def _pair(place: int, result: EvaluationResult, record: PromptRecord, seed: int) -> Pair:
    first = _hash(result, record, seed, "side") % 2 == 0
    texts = (record.speculative[0].text, record.plain[0].text)
    left, right = texts if first else texts[::-1]
    return Pair(place, record.prompt, left, right, first)


def sheet(found: Sequence[Pair]) -> str:
    """The CSV to be filled in: `better` is left, right or same."""
    return csv_text(HEAD, ([p.number, p.prompt, p.left, p.right, ""] for p in found))


def read_sheet(path: Path, found: Sequence[Pair]) -> dict[int, str]:
    """Number of the pair → left, right or same; lines that were left empty are not in it. found: the result's pairs.

    UserError by line, for a sheet of another result too: its sides are others, and nobody would see it.
    """
    said: dict[int, str] = {}
    by_number = {pair.number: pair for pair in found}
    for place, line in enumerate(_lines(path), start=1):
        answer, number = line["better"].strip().lower(), line["number"].strip()
        if not answer:
            continue
        where = f"{path}, pair {number or place}"
        if answer not in ANSWERS or not number.isdecimal():
            raise UserError(f"{where}: `better` is {answer!r}; left, right or same is expected.")
        pair = by_number.get(int(number))
        if pair is None:
            raise UserError(f"{where}: this result has no such pair; the sheet is of another result.")
        if any(
            side in line and _letters(line[side]) != _letters(getattr(pair, side))
            for side in ("left", "right")
        ):
            raise UserError(f"{where}: its answers are not this result's; the sheet is of another result.")
        if pair.number in said:
            raise UserError(f"{where}: it stands in the sheet twice; keep one of the lines.")
        said[pair.number] = answer
    if not said:
        raise UserError(f"{path}: nothing is filled in (`better`: left, right or same).")
    return said


def filled_in(path: Path) -> bool:
    """Whether somebody has written into the sheet at `path`."""
    return path.exists() and any(line["better"].strip() for line in _lines(path))


def _lines(path: Path) -> list[dict[str, str]]:
    """The sheet's rows; of what spreadsheets save, commas, semicolons and tabs are read."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        table = csv.DictReader(
            StringIO(text, newline=""), delimiter=max(",;\t", key=text.partition("\n")[0].count)
        )
        names, lines = table.fieldnames or (), list(table)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"The sheet {path} cannot be read ({error}). It must be CSV in UTF-8.") from error
    if lacking := [name for name in ("number", "better") if name not in names]:
        raise UserError(f"The sheet {path} has no column `{lacking[0]}` in its first line.")
    return [{name: line[name] or "" for name in names} for line in lines]


def _letters(text: str) -> str:
    """What no spreadsheet changes of a text, as far as a cell of one is sure to go."""
    return "".join(char for char in text if char.isalnum())[:SURE]


def judge(found: Sequence[Pair], sheets: Sequence[dict[int, str]]) -> Verdict:
    """Put together what people said about these pairs (`read_sheet`)."""
    by_number = {pair.number: pair for pair in found}
    counts = Counter(
        "same" if said == "same" else (said == "left") == by_number[number].speculative_left
        for sheet in sheets
        for number, said in sheet.items()
    )
    better, worse, same = counts[True], counts[False], counts["same"]
    agreed = [
        one[number] == other[number]
        for place, one in enumerate(sheets)
        for other in sheets[place + 1 :]
        for number in one.keys() & other.keys()
    ]
    return Verdict(
        people=len(sheets),
        judged=better + worse + same,
        same=share(same, better + worse + same),
        preferred=share(better, better + worse),
        p_value=sign_test(better, worse),
        agreement=share(sum(agreed), len(agreed)),
    )


def share(hits: int, of: int) -> Share:
    """Wilson's interval: it stays inside 0 and 1, and says something at 0 and at all."""
    if not of:
        return Share(0, 0, None, None, None)
    z = NormalDist().inv_cdf(0.975)
    p, scale = hits / of, 1 + z**2 / of
    middle = (p + z**2 / (2 * of)) / scale
    half = z * math.sqrt(p * (1 - p) / of + z**2 / (4 * of**2)) / scale
    return Share(hits, of, p, max(0.0, middle - half), min(1.0, middle + half))


def sign_test(better: int, worse: int) -> float:
    """Two-sided, exact: how likely a split at least so uneven is by chance."""
    n, most = better + worse, max(better, worse)
    tail = sum(math.comb(n, k) for k in range(most, n + 1)) / 2**n
    return min(1.0, 2 * tail)


def lines(verdict: Verdict) -> list[str]:
    """What a terminal shows."""
    found = [
        f"judged      {verdict.judged} answers by {verdict.people} {'people' if verdict.people > 1 else 'person'}",
        f"as good     {_words(verdict.same)}",
        f"preferred   speculative {_words(verdict.preferred)} of those that differ, p = {verdict.p_value:.3f}",
    ]
    if verdict.agreement.of:
        found.append(f"agreement   {_words(verdict.agreement)} of the pairs two people judged")
    return found


def _words(found: Share) -> str:
    if found.value is None or found.low is None or found.high is None:
        return "none"
    return f"{found.hits} of {found.of}, {found.value:.0%} (95% {found.low:.0%}–{found.high:.0%})"


def _hash(result: EvaluationResult, record: PromptRecord, seed: int, purpose: str) -> int:
    key = f"{seed}/{result.fingerprint}/{result.created}/{record.id}/{purpose}"
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
