"""Prompts made from the source of Python's own standard library, as it lies on the user's machine.

Real code by many hands, with docstrings that answer "what does this do" and doctests that answer "what does
this return": nothing to download, and given answers for four of the five tasks.
"""

import ast
import builtins
import doctest
import hashlib
import os
import sysconfig
import textwrap
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from deepspec.data.conversation import Conversation, hash_order
from deepspec.errors import UserError

SKIPPED_FOLDERS = {
    *("test", "tests", "idlelib", "lib2to3", "ensurepip", "turtledemo", "pydoc_data", "encodings", "msilib"),
    *("distutils", "site-packages", "dist-packages", "__pycache__", "__phello__"),
}
CODE_LINES = (4, 45)  # of a whole function
CODE_CHARACTERS = 1800
DOC_CHARACTERS = (40, 700)
DOC_SHARE = 0.3  # a docstring at least so long, relative to its code: most of a row should be answer
RESULT_CHARACTERS = 160
RETURNS_CHARACTERS = 800  # of the function
COMPLETE = (
    "Complete this function from Python's `{module}` module. Reply with the whole function.",
    "Here is the beginning of a Python function from `{module}`. Write it out in full.",
    "Finish the following Python function (module `{module}`).",
)
DOCSTRING = (
    "Write a docstring for this Python function.",
    "This Python function has no docstring. Write one.",
    "Document the following function with a docstring. Reply with the docstring only.",
)
EXPLAIN = (
    "What does this Python function do?",
    "Explain briefly what the following Python function is for.",
    "Describe in plain words what this code does.",
)
UNIT_TEST = (
    "Write a unit test for this Python function.",
    "Write two or three pytest tests for the following function.",
    "How would you test this function? Write the tests with unittest.",
)
RETURNS = (
    "What does `{call}` return, given this function from Python's `{module}` module?",
    "Given the function below (from `{module}`), what is the value of `{call}`?",
)


@dataclass(frozen=True)
class Function:
    """One function of the library: `code` dedented and whole, `bare` the same without its docstring."""

    module: str
    name: str
    code: str
    bare: str
    doc: str
    head_lines: int  # signature and docstring, in `code`
    public: bool  # reachable as module.name, so that its doctests can be read alone


def stdlib_prompts(seed: int) -> tuple[list[Conversation], str]:
    """All tasks in a seeded order, and a sha256 over the sources they come from.

    Every function appears once before any appears twice. group = module. `UserError` if this Python was
    installed without its sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    functions, digest = _library(folder)
    tasks: list[tuple[int, int, Conversation]] = []
    for function in functions:
        own = sorted(_tasks(function, seed), key=lambda task: hash_order(seed, f"task {task.id}"))
        tasks += [(rank, hash_order(seed, task.id), task) for rank, task in enumerate(own)]
    if not tasks:
        raise UserError(
            f"Python's library sources are not at {folder}: set data.builtin_prompts=0 and give "
            "data.prompts, or use a Python that has them."
        )
    tasks.sort(key=lambda item: item[:2])
    return [task for _, _, task in tasks], digest


@cache
def _library(folder: Path) -> tuple[list[Function], str]:
    """Every function of the library that suits a task, and a sha256 over the sources."""
    digest = hashlib.sha256()
    functions: list[Function] = []
    for path in _modules(folder):
        relative = path.relative_to(folder)
        try:
            with tokenize.open(path) as file:
                source = file.read()
            functions += _functions(source, _module_name(relative))
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
        digest.update(f"{relative.as_posix()}\n{source}".encode())
    return functions, digest.hexdigest()


def _modules(folder: Path) -> list[Path]:
    """The library's own files, in an order that does not depend on the file system."""
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        found += [
            Path(place, name)
            for name in names
            if name.endswith(".py") and not name.startswith(("_sysconfigdata", "__main__"))
        ]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _module_name(relative: Path) -> str:
    parts = relative.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _functions(source: str, module: str) -> Iterator[Function]:
    """Functions and methods of moderate size, nested ones left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    lines = source.splitlines(keepends=True)
    for node in tree.body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        for member in members:
            if isinstance(member, ast.FunctionDef) and not member.name.startswith("__"):
                found = _function(member, lines, module, public=member is node)
                if found is not None:
                    yield found


def _function(node: ast.FunctionDef, lines: list[str], module: str, public: bool) -> Function | None:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    last = node.end_lineno or first
    own = lines[first - 1 : last]
    code = textwrap.dedent("".join(own)).rstrip()
    if not CODE_LINES[0] <= len(own) <= CODE_LINES[1] or len(code) > CODE_CHARACTERS:
        return None
    doc = (ast.get_docstring(node) or "").strip()
    opening = node.body[0]
    body_from = opening.lineno
    bare = code
    if doc:
        if opening.lineno == node.lineno or len(node.body) == 1:
            return None
        doc_end = opening.end_lineno or opening.lineno
        body = own[doc_end - first + 1 :]
        while body and not body[0].strip():
            body = body[1:]
        bare = textwrap.dedent("".join(own[: opening.lineno - first] + body)).rstrip()
        body_from = doc_end + 1
    return Function(module, node.name, code, bare, doc, body_from - first, public)


def _tasks(function: Function, seed: int) -> Iterator[Conversation]:
    yield from _completion(function, seed)
    long_enough = max(DOC_CHARACTERS[0], DOC_SHARE * len(function.bare))
    if long_enough <= len(function.doc) <= DOC_CHARACTERS[1] and ">>>" not in function.doc:
        bare = _fence(function.bare)
        prompt = f"{_wording(DOCSTRING, function, seed)}\n\n{bare}"
        yield _task(function, "docstring", prompt, f'"""{function.doc}\n"""')
        prompt = f"{_wording(EXPLAIN, function, seed)}\n\n{bare}"
        yield _task(function, "explain", prompt, function.doc)
    if function.public:
        yield _task(
            function, "unit_test", f"{_wording(UNIT_TEST, function, seed)}\n\n{_fence(function.code)}", None
        )
        if len(function.bare) <= RETURNS_CHARACTERS:
            yield from _returns(function, seed)


def _completion(function: Function, seed: int) -> Iterator[Conversation]:
    lines = function.code.splitlines()
    body = len(lines) - function.head_lines
    if body < 4:
        return
    shown = "\n".join(lines[: function.head_lines + body // 5])
    prompt = f"{_wording(COMPLETE, function, seed)}\n\n{_fence(shown)}"
    yield _task(function, "code_completion", prompt, _fence(function.code))


def _returns(function: Function, seed: int) -> Iterator[Conversation]:
    """Doctests that stand alone: one expression of builtins and the function itself, with a plain result."""
    try:
        examples = doctest.DocTestParser().get_examples(function.doc)
    except ValueError:
        return
    for example in examples:
        call, want = example.source.strip(), example.want.strip()
        if not want or len(want) > RESULT_CHARACTERS or example.exc_msg or "..." in want or " at 0x" in want:
            continue
        if not _stands_alone(call, function):
            continue
        code = _fence(function.bare)
        prompt = f"{_wording(RETURNS, function, seed).replace('{call}', call)}\n\n{code}"
        yield _task(function, "returns", prompt, f"It returns:\n\n```\n{want}\n```")


def _stands_alone(call: str, function: Function) -> bool:
    try:
        tree = ast.parse(call, mode="eval")
    except SyntaxError:
        return False
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    bound = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    return function.name in names and names - bound <= {function.name, *dir(builtins)}


def _wording(choices: tuple[str, ...], function: Function, seed: int) -> str:
    chosen = choices[hash_order(seed, f"{choices[0]} {function.module}.{function.name}") % len(choices)]
    return chosen.replace("{module}", function.module)


def _fence(code: str) -> str:
    return f"```python\n{code}\n```"


def _task(function: Function, category: str, prompt: str, answer: str | None) -> Conversation:
    messages = [{"role": "user", "content": prompt}]
    if answer is not None:
        messages.append({"role": "assistant", "content": answer})
    digest = hashlib.sha256(f"{function.code}{prompt}".encode()).hexdigest()[:8]
    return Conversation(
        messages=tuple(messages),
        id=f"stdlib:{function.module}.{function.name}:{category}:{digest}",
        group=f"stdlib:{function.module}",
        category=category,
        source="stdlib",
    )
