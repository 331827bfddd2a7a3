"""What every key means: read out of the source of the typed classes, where it stands beside the key."""

import ast
import inspect
import io
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import Enum
from functools import cache
from typing import Any, get_type_hints

HEADING = "-- "


@dataclass(frozen=True)
class Said:
    """What stands about a field in its class. heading: of the group of fields that it belongs to, or empty."""

    words: str
    heading: str


@cache
def meanings(schema: type) -> dict[str, Said]:
    """Field name → what is said of it in a dataclass's source, for every field, inherited ones included.

    A comment counts that stands beside the field or in the lines directly above it; if there is none, that of the
    class it is inherited from, else the docstring of an `Enum` or dataclass that is its type. A comment `# -- words`
    is a heading over the fields that follow.
    """
    commented: dict[str, Said] = {}
    for one in reversed(schema.__mro__[:-1]):
        for name, said in _commented(one):
            before = commented.get(name, Said("", ""))
            commented[name] = Said(said.words or before.words, said.heading or before.heading)
    hints = get_type_hints(schema)
    found = {}
    for field in fields(schema):
        said = commented.get(field.name, Said("", ""))
        found[field.name] = Said(said.words or _of_type(hints[field.name]), said.heading)
    return found


def type_says(kind: Any) -> str:
    """The docstring of an `Enum` or dataclass in one line; empty for other types, and where it has none."""
    if not isinstance(kind, type):
        return ""
    written = kind.__doc__ or ""
    ours = issubclass(kind, Enum) or not written.startswith(f"{kind.__name__}(")  # what dataclasses make up
    return " ".join(written.replace("`", "").split()) if ours and kind.__module__ != "builtins" else ""


def _of_type(kind: Any) -> str:
    """A type's docstring as a comment: for an `Enum`, neither a capital nor a full stop."""
    words = type_says(kind)
    return (
        words[:1].lower() + words[1:].rstrip(".")
        if isinstance(kind, type) and issubclass(kind, Enum)
        else words
    )


def _commented(schema: type) -> Iterator[tuple[str, Said]]:
    """The comments of the fields that this very class defines."""
    source = textwrap.dedent(inspect.getsource(schema))
    lines = source.splitlines()
    comments = {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    heading = ""
    done = 0
    parsed = next(node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))
    for node in parsed.body:
        last = node.end_lineno or node.lineno
        words = []
        for line in range(done + 1, last + 1):
            alone = lines[line - 1].lstrip().startswith("#")
            if line in comments and alone and comments[line].startswith(HEADING):
                heading = comments[line].removeprefix(HEADING)
            elif line in comments:
                words.append(comments[line])
            elif line < node.lineno:
                words = []  # an empty line parts what stands above it from the field
        done = last
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, Said(" ".join(words), heading)
