"""The same Python code with other names for its arguments and local variables."""

import ast
import io
import random
import re
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from deepspec.data.augment.contract import FENCE, each_question
from deepspec.data.conversation import Message

NAMES = tuple(
    "alpha beta count data entry first group item key left line mark node part point result right rest".split()  # noqa: SIM905
)
BLOCK = re.compile(r"```(?:python|py)?\n(.*?)```", re.S)


@dataclass(frozen=True)
class Rename:
    """share: of the names in a fenced block of Python that can be changed safely."""

    name: ClassVar[str] = "rename"
    share: float = 0.7

    def __call__(self, messages: Sequence[Message], draw: random.Random) -> list[Message] | None:
        def block(match: re.Match[str]) -> str:
            inside = BLOCK.fullmatch(match[0])
            if inside is None:
                return match[0]
            code = renamed(inside[1], draw, self.share)
            return match[0][: inside.start(1)] + code + match[0][inside.end(1) :]

        return each_question(messages, lambda text: FENCE.sub(block, text))


def renamed(code: str, draw: random.Random, share: float) -> str:
    """The code, its behaviour unchanged; as it was if it is not Python.

    Only arguments and variables bound inside functions change, and none that is global, an attribute, a
    keyword of any call, or named in an f-string.
    """
    try:
        tree = ast.parse(code)
        tokens = list(tokenize.generate_tokens(io.StringIO(code).readline))
    except (SyntaxError, ValueError, tokenize.TokenError, RecursionError):
        return code
    names = sorted(_bound(tree) - _fixed(tree))
    chosen = [name for name in names if draw.random() < share]
    taken = {token.string for token in tokens if token.type == tokenize.NAME}
    free = [
        f"{name}{number}" for number in ("", "_1", "_2") for name in NAMES if f"{name}{number}" not in taken
    ]
    draw.shuffle(free)
    new = dict(zip(chosen, free, strict=False))
    lines = code.splitlines(keepends=True)
    for before, token in reversed(list(zip([None, *tokens], tokens, strict=False))):
        after_dot = before is not None and before.string == "."
        if token.type == tokenize.NAME and token.string in new and not after_dot:
            row, column = token.start
            line = lines[row - 1]
            lines[row - 1] = line[:column] + new[token.string] + line[token.end[1] :]
    return "".join(lines)


def _bound(tree: ast.AST) -> set[str]:
    found = set()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for node in ast.walk(function):
                if isinstance(node, ast.arg):
                    found.add(node.arg)
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    found.add(node.id)
    return found - {"self", "cls"}


def _fixed(tree: ast.Module) -> set[str]:
    """Names that mean something outside of the functions, or that tokens alone would not catch."""
    found = {node.id for node in _outside(tree) if isinstance(node, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg:
            found.add(node.arg)
        elif isinstance(node, ast.Global | ast.Nonlocal):
            found.update(node.names)
        elif isinstance(node, ast.JoinedStr):
            found.update(part.id for part in ast.walk(node) if isinstance(part, ast.Name))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            found.add(node.name)
    return found


def _outside(node: ast.AST) -> list[ast.AST]:
    found: list[ast.AST] = []
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            found += [child, *_outside(child)]
    return found
