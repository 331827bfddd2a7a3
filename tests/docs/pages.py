"""Reads README.md and docs/*.md: fenced blocks with the comment before them, and the commands in them.

A comment directly before a block says what it is:

    <!-- commands: WHY -->    not run by the tests, only composed; WHY is one or more of the words in `REASONS`
    <!-- recipe: NAME -->     a YAML block that is a recipe of the person's own, there for the page's commands
    <!-- example: NAME -->    a Python block that a test runs

Every other ```bash block is run.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
REASONS = {"long", "gpu", "network", "cluster", "other"}  # other: a program of another project
WHOLE_PAGES = {
    "serving.md": {"long", "other"}
}  # every command there needs a trained draft, or is an engine's
FENCE = re.compile(
    r"(?:^<!-- (?P<kind>\w+): (?P<what>[^>]*?) -->\n+)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    """kind, what: of the comment before it, or empty. line: of its first line, 1-based."""

    page: Path
    line: int
    language: str
    kind: str
    what: str
    text: str


@dataclass(frozen=True)
class Command:
    """One shell command. reasons: why the tests do not run it; empty: they do."""

    place: str
    words: tuple[str, ...]
    reasons: frozenset[str]

    @property
    def stage(self) -> str | None:
        """Of `... -m deepspec.<stage> ...`."""
        modules = [
            after.removeprefix("deepspec.")
            for before, after in zip(self.words, self.words[1:], strict=False)
            if before == "-m" and after.startswith("deepspec.")
        ]
        return modules[0] if modules else None

    @property
    def arguments(self) -> list[str]:
        """What the stage is given."""
        return list(self.words[self.words.index(f"deepspec.{self.stage}") + 1 :])


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page,
            text.count("\n", 0, found.start("text")) + 1,
            found["language"],
            found["kind"] or "",
            found["what"] or "",
            found["text"],
        )
        for found in FENCE.finditer(text)
    ]


def commands(block: Block) -> list[Command]:
    """Those of a ```bash block; a line that ends in a backslash goes on in the next."""
    said = set(block.what.split()) if block.kind == "commands" else set()
    reasons = frozenset(said | WHOLE_PAGES.get(block.page.name, set()))
    found = []
    number, waiting = block.line, ""
    for line in block.text.splitlines():
        waiting += line.removesuffix("\\") + " "
        if not line.endswith("\\"):
            words = shlex.split(waiting, comments=True)
            if words:
                found.append(Command(f"{block.page.name}:{number}", tuple(words), reasons))
            waiting = ""
        number += 1
    return found


def all_commands() -> list[Command]:
    return [
        one for page in PAGES for block in blocks(page) if block.language == "bash" for one in commands(block)
    ]


def recipes() -> dict[str, str]:
    """Name → text of every recipe that a page shows."""
    return {block.what: block.text for page in PAGES for block in blocks(page) if block.kind == "recipe"}


def inline_code(page: Path) -> list[str]:
    """`like this`, outside of blocks."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return re.findall(r"`([^`\n]+)`", text)
