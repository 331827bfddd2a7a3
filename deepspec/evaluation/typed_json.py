"""Dataclasses from JSON and back, with the place of whatever does not fit."""

import dataclasses
import json
import os
import types
import typing
from pathlib import Path
from typing import Any

SCALARS = (str, int, float, bool, type(None))
LINE = 110
FEW = 16  # numbers that may stand inside a line


def build(kind: Any, content: Any, place: str = "") -> Any:
    """Make a `kind` (a dataclass, list, dict, optional or scalar type) of parsed JSON.

    Raises ValueError naming the place (`records[3].plain[0].tokens`) where a key is missing or unknown or a
    value has another type.
    """
    if kind is Any:
        return content
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if content is None and type(None) in arguments:
            return None
        return build(next(a for a in arguments if a is not type(None)), content, place)
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(kind, content, place)
    if origin is list and isinstance(content, list):
        return [build(arguments[0], item, f"{place}[{i}]") for i, item in enumerate(content)]
    if origin is dict and isinstance(content, dict):
        return {key: build(arguments[1], item, f"{place}.{key}") for key, item in content.items()}
    if kind is float and isinstance(content, int) and not isinstance(content, bool):
        return float(content)
    if origin is None and type(content) is kind:
        return content
    name = getattr(kind, "__name__", str(kind))
    raise ValueError(f"{place or 'the top level'} should be {name}, not {type(content).__name__}")


def _build_dataclass(kind: Any, content: Any, place: str) -> Any:
    if not isinstance(content, dict):
        raise ValueError(f"{place or 'the top level'} should be an object, not {type(content).__name__}")
    hints = typing.get_type_hints(kind)
    prefix = f"{place}." if place else ""
    for key in content:
        if key not in hints:
            raise ValueError(f"{prefix}{key} is not a known key")
    values = {}
    for field in dataclasses.fields(kind):
        if field.name in content:
            values[field.name] = build(hints[field.name], content[field.name], f"{prefix}{field.name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{prefix}{field.name} is missing")
    return kind(**values)


def dumps(content: Any, indent: int = 0) -> str:
    """JSON where a container of scalars stands on one line, so that a round or an interval is one line.

    Refuses NaN and infinities (ValueError): a number that is none must be null.
    """
    if isinstance(content, SCALARS):
        return json.dumps(content, ensure_ascii=False, allow_nan=False)
    items = list(content.values()) if isinstance(content, dict) else list(content)
    flat = all(isinstance(item, SCALARS) or _few_numbers(item) for item in items)
    short = isinstance(content, dict) and sum(len(str(item)) for item in items) > 4 * LINE
    if not items or (flat and not short):
        return json.dumps(content, ensure_ascii=False, allow_nan=False)
    inner = " " * (indent + 1)
    if isinstance(content, dict):
        keys = (json.dumps(str(key), ensure_ascii=False) for key in content)
        lines = [f"{inner}{key}: {dumps(item, indent + 1)}" for key, item in zip(keys, items, strict=True)]
        return "{\n" + ",\n".join(lines) + "\n" + " " * indent + "}"
    return "[\n" + ",\n".join(inner + dumps(item, indent + 1) for item in items) + "\n" + " " * indent + "]"


def _few_numbers(item: Any) -> bool:
    return isinstance(item, list) and len(item) <= FEW and all(type(part) in (int, float) for part in item)


def write_compact(path: Path, content: Any) -> None:
    """Write `dumps(content)` under a temporary name and rename it."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    partial.write_text(dumps(content) + "\n", encoding="utf-8")
    os.replace(partial, path)
