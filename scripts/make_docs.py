#!/usr/bin/env python3
"""Writes the pages of docs/ that are made from the code: every key, the result file, every error's words.

python scripts/make_docs.py            write them
python scripts/make_docs.py --check    say which are not up to date; exit status 1 if any
"""

import ast
import html
import re
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from deepspec.config.meaning import meanings  # noqa: E402
from deepspec.config.schema import Config  # noqa: E402
from deepspec.config.settings import Section, Setting, draft_section, sections  # noqa: E402
from deepspec.config.stages import STAGES  # noqa: E402
from deepspec.drafts.registry import option_classes  # noqa: E402

MADE = "<!-- Made by scripts/make_docs.py from the code; edit that. -->\n"
# Of the errors page: a heading, and the files below deepspec/ whose messages stand under it. First match wins.
ERRORS = {
    "The configuration": ("config/", "drafts/options.py", "drafts/registry.py"),
    "Prompts and data": ("data/", "prepare.py"),
    "The target": ("target/",),
    "Training": ("training/", "train.py", "pipeline.py"),
    "Decoding": ("decoding/", "library.py", "generate.py", "verify.py"),
    "Evaluation and reports": (
        "evaluation/",
        "evaluate.py",
        "reporting/",
        "report.py",
        "simulation/",
        "simulate.py",
    ),
    "Drafts": ("drafts/", "pair.py"),
    "Export and import": ("interop/", "export.py", "import_draft.py"),
    "Everything else": ("",),
}


def configuration() -> str:
    """Every key of the configuration, in the schema's order."""
    said = meanings(Config)
    parts = [
        MADE,
        "# Configuration\n",
        "One configuration serves all stages. A recipe (`+recipe=NAME`) sets what differs from the defaults below, and "
        "any key can be set from the shell: `train.epochs=2`. `--help` of a stage shows the keys it reads with the "
        "values of that very call, `--cfg job` the whole configuration. A key that does not exist, or a value that "
        "does not fit, stops the stage with a sentence that names the nearest key.\n",
        "A default of `???` means that the key must be given, by a recipe or from the shell. `null` is a value of its "
        "own. A list is written `[1,2]`, a mapping `{a: 1}`, with quotes around it in a shell; a key that a mapping "
        "does not have yet is added with a plus sign: `+train.loss.tv=1`.\n",
        "| stage | |",
        "|---|---|",
        *(f"| `deepspec.{name}` | {_text(stage.purpose)} |" for name, stage in STAGES.items()),
        "\n",
    ]
    for section in sections(None):
        if section.name == "train":
            parts += _drafts(said["draft"].words)
        parts.append(f"## {_title(section)}\n")
        parts.append(f"{_text(section.meaning)}\n" if section.meaning else "")
        parts.append(_table(section))
    return "\n".join(part for part in parts if part)


def _title(section: Section) -> str:
    return f"`{section.name}`" if section.name else "Keys of their own"


def _drafts(words: str) -> Iterator[str]:
    yield f"## `draft`\n\n{_text(words[:1].upper() + words[1:])}. `draft=NAME` chooses one of these.\n"
    for name, options in option_classes().items():
        section = draft_section(options)
        yield f"### `draft={name}`\n\n{_text(section.meaning)}\n"
        yield _table(section)


def _table(section: Section) -> str:
    """The settings of a section, under the headings they have."""
    lines: list[str] = []
    heading = ""
    for one in section.settings:
        if one.heading != heading and section.name:
            heading = one.heading
            lines += ["", f"**{_text(heading[:1].upper() + heading[1:])}**", ""]
            lines += HEAD
        elif not lines:
            lines += HEAD
        lines.append(_row(one))
    return "\n".join(lines).lstrip("\n") + "\n"


HEAD = ["| key | default | takes | meaning |", "|---|---|---|---|"]


def _row(one: Setting) -> str:
    return f"| `{one.key}` | `{one.default}` | {_text(one.takes)} | {_text(one.meaning)} |"


def _text(words: str) -> str:
    """Plain words as Markdown: nothing in them is a tag, a cell's end, emphasis or a link; `code` stays."""
    pieces = re.split(r"(`[^`]*`)", words)
    return "".join(
        piece if piece.startswith("`") else re.sub(r"([|*_\[\]])", r"\\\1", html.escape(piece, quote=False))
        for piece in pieces
    )


def result_file() -> str:
    """The schema of result.json."""
    from deepspec.evaluation.result import SCHEMA_VERSION, EvaluationResult

    parts = [
        MADE,
        "# result.json\n",
        f"`deepspec.evaluate` writes `<out>/evaluation/result.json`, schema version {SCHEMA_VERSION}: one JSON "
        "object of the type `EvaluationResult`. Times are seconds and sizes are tokens unless said otherwise. Every "
        "summary can be computed again from `records` and `settings`: "
        "`deepspec.evaluation.summary.summarise_result`. `deepspec.evaluation.result.load_result` reads a file and "
        "says what is wrong with it.\n",
    ]
    done: list[type] = []
    waiting: list[type] = [EvaluationResult]
    while waiting:
        one = waiting.pop(0)
        if one in done:
            continue
        done.append(one)
        said, hints = meanings(one), get_type_hints(one)
        parts.append(f"## {one.__name__}\n\n{_docstring(one)}\n")
        parts += ["| field | type | meaning |", "|---|---|---|"]
        for field in fields(one):
            kind = hints[field.name]
            inner = _classes(kind)
            words = _text(said[field.name].words)
            if inner and said[field.name].words == " ".join(
                (inner[0].__doc__ or "").replace("`", "").split()
            ):
                words = ""  # it stands under the type's own heading
            parts.append(f"| `{field.name}` | {_kind(kind)} | {words} |")
            waiting += inner
        parts.append("")
    return "\n".join(parts)


def _docstring(one: type) -> str:
    paragraphs = (one.__doc__ or "").strip().split("\n\n")
    return "\n\n".join(_text(" ".join(paragraph.split())) for paragraph in paragraphs)


def _classes(kind: Any) -> list[type]:
    """The dataclasses that a type is made of."""
    if isinstance(kind, type) and is_dataclass(kind):
        return [kind]
    return [one for part in get_args(kind) for one in _classes(part)]


def _kind(kind: Any) -> str:
    name = kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)
    text = (
        "`"
        + re.sub(r"(?:\w+\.)+(\w+)", r"\1", name).replace("NoneType", "null").replace("None", "null")
        + "`"
    )
    text = text.replace("|", "or")
    inner = _classes(kind)
    return f"[{text}](#{inner[0].__name__.lower()})" if inner else text


def errors() -> str:
    """Every message of a `UserError`, as it stands in the code."""
    found: dict[str, list[str]] = {heading: [] for heading in ERRORS}
    for path in sorted((ROOT / "deepspec").rglob("*.py")):
        place = path.relative_to(ROOT / "deepspec").as_posix()
        heading = next(name for name, begins in ERRORS.items() if place.startswith(begins))
        found[heading] += user_errors(path.read_text(encoding="utf-8"))
    parts = [
        MADE,
        "# Every error message\n",
        "A mistake that a person can mend ends a stage with one of these sentences and exit status 1, without a "
        "traceback. What stands in braces is filled in. A traceback is a defect of this project: please report it. "
        "[Troubleshooting](troubleshooting.md) has what goes wrong most often.\n",
    ]
    for heading, messages in found.items():
        if messages:
            parts.append(f"## {heading}\n")
            parts += [f"- `` {message} ``" for message in sorted(set(messages), key=str.casefold)]
            parts.append("")
    return "\n".join(parts)


def user_errors(source: str) -> list[str]:
    """The words of each `UserError(...)` in a file that are written there, with {what is filled in}."""
    calls = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "UserError"
    ]
    messages = [" ".join(_words(call.args[0]).split()) for call in calls if call.args]
    return [message for message in messages if re.search("[a-z]", re.sub(r"\{[^}]*\}", "", message))]


def _words(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_words(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return _words(node.value) if isinstance(node.value, ast.Constant) else "{" + _name(node.value) + "}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _words(node.left) + _words(node.right)
    return "{" + _name(node) + "}"


def _name(node: ast.expr) -> str:
    """A short name for what an expression gives: the last name in it that is not a function's."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return _name(node.value) if node.attr.startswith("__") else node.attr
    if isinstance(node, ast.Subscript):
        return _name(node.value)
    if isinstance(node, ast.BinOp):
        return _name(node.left)
    if isinstance(node, ast.Call):
        of = node.func.value if isinstance(node.func, ast.Attribute) else node.func
        return _name(node.args[-1] if node.args else of)
    return "…"


PAGES = {"configuration.md": configuration, "result-file.md": result_file, "messages.md": errors}


def main() -> int:
    """Command line."""
    stale = []
    for name, make in PAGES.items():
        path, text = ROOT / "docs" / name, make().rstrip() + "\n"
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if "--check" not in sys.argv[1:]:
            path.write_text(text, encoding="utf-8")
            print(f"docs/{name}")
    if "--check" in sys.argv[1:] and stale:
        print(f"Not up to date: {', '.join(stale)}. Run python scripts/make_docs.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
