"""The documentation's pages: made from the code where they say so, whole, and linked to what exists."""

import ast
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.docs.pages import PAGES, ROOT, blocks
from tests.models import prompts, tiny_target

MAKE_DOCS: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "make_docs.py"))
DOCS = sorted((ROOT / "docs").glob("*.md"))


class Loader(yaml.SafeLoader):
    """mkdocs.yml may have tags of Python objects."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
SITE = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)


@pytest.mark.parametrize("name", sorted(MAKE_DOCS["PAGES"]))
def test_a_page_made_from_the_code_is_up_to_date(name: str) -> None:
    made = MAKE_DOCS["PAGES"][name]().rstrip() + "\n"
    written = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert written == made, "run python scripts/make_docs.py"


def test_words_of_errors_are_read_as_they_are_printed() -> None:
    source = """
raise UserError("One sentence " "of two parts.")
raise UserError(f"`{key}` in {path.name} is {len(rows)} {', '.join(all)} long; {value!r}")
raise UserError(f"Begins so: {x} " + "and ends so.")
raise UserError(str(error))
"""
    assert MAKE_DOCS["user_errors"](source) == [
        "One sentence of two parts.",
        "`{key}` in {name} is {rows} {all} long; {value}",
        "Begins so: {x} and ends so.",
    ]


def written_strings() -> list[str]:
    """Every string of the code, with \0 for what is filled in."""
    found = []
    for path in (ROOT / "deepspec").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [str(one.value) if isinstance(one, ast.Constant) else "\0" for one in node.values]
                found.append("".join(parts))
    return found


def test_what_troubleshooting_quotes_is_said_somewhere() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    first_cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| ")]
    quoted = [code for cell in first_cells for code in re.findall(r"`([^`]+)`", cell) if " " in code]
    said = [" ".join(one.replace("`", "").split()) for one in written_strings()]
    assert len(quoted) > 10
    for words in quoted:
        for piece in re.split(r"\.\.\.|(?<=\.) ", words):
            assert any(piece.strip(" ?()") in one for one in said), words


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as mkdocs makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", one).strip().lower()) for one in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        there = page.parent / name if name else page
        assert there.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(there), f"{page.name}: {link}"


def nav(entries: list[Any]) -> list[str]:
    found = []
    for entry in entries:
        for value in entry.values():
            found += nav(value) if isinstance(value, list) else [value]
    return found


def test_every_page_is_in_the_site_once() -> None:
    assert sorted(nav(SITE["nav"])) == [page.name for page in DOCS]


def test_the_site_asks_no_network() -> None:
    """No font server, no script from elsewhere (the plugin `offline` would add one), no diagrams drawn by one."""
    assert SITE["theme"]["font"] is False and "offline" in SITE["plugins"]
    assert SITE["use_directory_urls"] is False
    (worker,) = SITE["extra"]["polyfills"]
    assert "iframe-worker" in worker and (ROOT / "docs" / worker).is_file()
    assert not [block.page for page in DOCS for block in blocks(page) if block.language == "mermaid"]
    assert not [page for page in DOCS if re.search(r"!\[[^]]*\]\(http", page.read_text(encoding="utf-8"))]


def test_the_draft_of_the_example_decodes_losslessly() -> None:
    page = ROOT / "docs" / "adding-a-draft.md"
    drafter, use = (block.text for block in blocks(page) if block.kind == "example")
    target = tiny_target("llama")
    names: dict[str, Any] = {"target": target, "prompt": prompts(1, seed=3, longest=12)[0]}
    exec(compile(drafter, str(page), "exec"), names)
    exec(compile(use, str(page), "exec"), names)
    (answer,) = names["answers"]
    expected = target.model.generate(
        torch.tensor([names["prompt"]]), max_new_tokens=16, do_sample=False, eos_token_id=None
    )[0, len(names["prompt"]) :]
    assert answer.tokens == expected.tolist()
    assert sum(one.drafted for one in answer.rounds) > 0
