"""What a round costs on this machine: `T[rows, tokens]` of the target and of the draft, measured once and kept."""

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from deepspec.artifacts import cache_dir, fingerprint, versions, without_name, write_json
from deepspec.decoding.request import Request
from deepspec.decoding.steps import draft_steps, time_steps, verify_steps
from deepspec.drafts.contract import Drafter, TrainableDraft
from deepspec.errors import UserError
from deepspec.target import Target
from deepspec.target.hardware import cpu_name, device_name

SMALLEST_BUCKET = 64
REPEATS = 5
# Widths of a forward that are measured; others lie between or beyond them on straight lines.
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)
Key = dict[str, Any]


@dataclass(frozen=True)
class Curve:
    """Seconds by rows and tokens a row, non-decreasing in both.

    seconds[i][j] belongs to rows[i] and tokens[j], both ascending.
    """

    rows: list[int]
    tokens: list[int]
    seconds: list[list[float]]

    def at(self, rows: int, tokens: int) -> float:
        """Bilinear between the measured points and beyond the largest; below the smallest, as there."""
        by_rows = [_line(self.tokens, line, tokens) for line in self.seconds]
        return _line(self.rows, by_rows, rows)


@dataclass(frozen=True)
class CostTable:
    """verify: a forward of the target over so many tokens a row. draft: a proposal of so many. key: what the
    seconds hold for."""

    key: Key
    verify: Curve
    draft: Curve

    def round_seconds(self, rows: int, k: int) -> list[float]:
        """[k+1] seconds of a round that verifies 0, 1, …, k drafted tokens a row.

        The draft has read what was committed before it can say how sure it is of its first token, so that a
        round that then verifies nothing has paid for one.
        """
        return [self.draft.at(rows, max(n, 1)) + self.verify.at(rows, n + 1) for n in range(k + 1)]

    def at_one_shape(self, rows: int, tokens: int) -> "CostTable":
        """Where every forward is filled up to so many rows and tokens a row (`decode.exact`, `decode.compile`), so that
        verifying less saves nothing of it."""
        whole = self.verify.at(rows, tokens)
        return replace(self, verify=Curve([1], [1], [[whole]]))


def cost_table(
    target: Target,
    draft: Drafter,
    request: Request,
    *,
    k: int,
    max_rows: int = 1,
    folder: Path | None = None,
) -> CostTable:
    """The table for this pair on this machine, from the cache or measured now (seconds to minutes).

    request: a typical one; the context in the middle of its answer gives the bucket, its sampling the draft's work.
    folder: of the cache, `cache_dir()/cost` by default.
    """
    middle = len(request.tokens) + request.max_new_tokens // 2
    key = cost_key(target, draft, context_bucket(middle), k, max_rows)
    path = (folder or cache_dir() / "cost") / f"{fingerprint(key)}.json"
    if path.is_file():
        return load_table(path, key)
    table = measure_table(target, draft, request, key, k, max_rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(table))
    return table


def cost_key(target: Target, draft: Drafter, context: int, k: int, max_rows: int) -> Key:
    """Everything that decides what a round takes."""
    return {
        "target": without_name(target.identity()),
        "draft": _sizes(draft),
        "dtype": str(target.dtype).removeprefix("torch."),
        "attention": str(getattr(target.model.config, "_attn_implementation", "unknown")),
        "device": device_name(target.device),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": versions().get("torch"),
        "context": context,
        "k": k,
        "max_rows": max_rows,
    }


def _sizes(draft: Drafter) -> str:
    """What a draft's time depends on."""
    if not isinstance(draft, TrainableDraft):
        return type(draft).__name__
    return f"{type(draft).__name__}, {sum(p.numel() for p in draft.parameters())} parameters, {draft.dtype}"


def context_bucket(tokens: int) -> int:
    """The power of two, 64 or more, that the context is rounded up to."""
    return max(SMALLEST_BUCKET, 1 << (tokens - 1).bit_length())


def load_table(path: Path, key: Key) -> CostTable:
    """The table in `path`; UserError if it is damaged or holds for something else than `key`."""
    again = f"Remove {path}; it is measured again when needed."
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = CostTable(content["key"], Curve(**content["verify"]), Curve(**content["draft"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"The cost table {path} is damaged ({error}). {again}") from error
    wrong = [name for name in key if found.key.get(name) != key[name]]
    if wrong:
        there = ", ".join(f"{name} {found.key.get(name)}" for name in wrong)
        here = ", ".join(f"{name} {key[name]}" for name in wrong)
        raise UserError(f"The cost table {path} was measured with {there}; here it is {here}. {again}")
    return found


def measure_table(
    target: Target, draft: Drafter, request: Request, key: Key, k: int, max_rows: int
) -> CostTable:
    """Medians of bare steps on a context of `key["context"]` tokens, made monotone."""
    context = min(key["context"], target.max_positions - k - 1)
    text = list(itertools.islice(itertools.cycle(request.tokens), context))
    rows = list(_doublings(max_rows))
    verify, drafted = [], []
    for count in rows:
        steps = verify_steps(target, text, k + 1, count)
        verify.append(time_steps({n: steps(n) for n in _widths(k + 1)}, REPEATS))
        proposals = draft_steps(target, draft, text, request, 2, count)
        drafted.append(time_steps({n: proposals(n) for n in _widths(k)}, REPEATS))
    return CostTable(key, _curve(rows, verify), _curve(rows, drafted))


def monotone(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest in squares (isotonic regression by pooling adjacent violators)."""
    pools: list[tuple[float, int]] = []  # mean, count
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (last, n), (before, m) = pools.pop(), pools.pop()
            pools.append(((last * n + before * m) / (n + m), n + m))
    return [mean for mean, count in pools for _ in range(count)]


def _curve(rows: list[int], measured: Sequence[dict[int, float]]) -> Curve:
    """Monotone along the tokens first and then along the rows, which keeps the tokens' order."""
    along_tokens = [monotone(list(line.values())) for line in measured]
    along_rows = [monotone(column) for column in zip(*along_tokens, strict=True)]
    return Curve(rows, list(measured[0]), [list(line) for line in zip(*along_rows, strict=True)])


def _line(grid: Sequence[int], values: Sequence[float], at: int) -> float:
    """Piecewise linear through (grid, values), the last piece prolonged, the first value held."""
    if at <= grid[0] or len(grid) == 1:
        return values[0]
    right = next((i for i, x in enumerate(grid) if x >= at), len(grid) - 1)
    left = right - 1
    slope = (values[right] - values[left]) / (grid[right] - grid[left])
    return values[left] + slope * (at - grid[left])


def _widths(longest: int) -> list[int]:
    return [n for n in WIDTHS if n < longest] + [longest]


def _doublings(longest: int) -> Iterable[int]:
    count = 1
    while count < longest:
        yield count
        count *= 2
    yield longest
