"""Every key of the configuration as a dotted name, with what it takes, for error messages."""

import difflib
import types
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

from deepspec.config.schema import Config

WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def schema_keys(drafts: dict[str, type]) -> dict[str, Any]:
    """Dotted name → type of every key; `draft.*` is the union over the drafts' option classes."""
    keys = _walk(Config, "")
    for options in drafts.values():
        keys |= _walk(options, "draft.")
    return keys


def _walk(schema: type, prefix: str) -> dict[str, Any]:
    hints = get_type_hints(schema)
    keys: dict[str, Any] = {}
    for field in fields(schema):
        kind = hints[field.name]
        keys[prefix + field.name] = kind
        if isinstance(kind, type) and is_dataclass(kind):
            keys |= _walk(kind, f"{prefix}{field.name}.")
    return keys


def nearest(key: str, names: list[str], count: int = 3) -> list[str]:
    """The names most like `key`: first as a whole, then by the last part (`epochs` → `train.epochs`)."""
    alike = [name for name in names if name.count(".") == key.count(".")]
    whole = difflib.get_close_matches(key, alike, n=count, cutoff=0.7)
    leaves: dict[str, list[str]] = {}
    for name in names:
        leaves.setdefault(name.rpartition(".")[2], []).append(name)
    close = difflib.get_close_matches(key.rpartition(".")[2], list(leaves), n=count, cutoff=0.7)
    by_leaf = [name for leaf in close for name in leaves[leaf]]
    return list(dict.fromkeys(whole + by_leaf))[:count]


def takes(kind: Any) -> str:
    """What a key of this type accepts, in words: `a whole number or null`."""
    if get_origin(kind) in (Union, types.UnionType):
        inner = [takes(part) for part in get_args(kind) if part is not type(None)]
        return " or ".join([*inner, "null"]) if type(None) in get_args(kind) else " or ".join(inner)
    if get_origin(kind) is list:
        return f"a list, each item {takes(get_args(kind)[0])}"
    if get_origin(kind) is tuple:
        return f"a list of {len(get_args(kind))} items, each {takes(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return f"a mapping of names to {takes(get_args(kind)[1])}"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of {', '.join(member.name for member in kind)}"
    if isinstance(kind, type) and is_dataclass(kind):
        return f"a section with the keys {', '.join(field.name for field in fields(kind))}"
    return WORDS.get(kind, "a value")
