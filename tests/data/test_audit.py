"""The auditor's page, parsed again: marked text is the supervised text, and every count of the manifest is there."""

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspec.config.schema import OnError
from deepspec.data.audit import pieces, write_audit
from deepspec.errors import UserError
from tests.data.test_build_data import conversations, make, prompts_file, supervised
from tests.data.toy_target import toy_facts
from tests.data.toy_tokenizers import INST, metaspace

TOKENIZER = toy_facts().tokenizer


class Page(HTMLParser):
    """The texts of all rows: (marked, whole) each."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.depth, self.inside = 0, False
        self.rows: list[list[str]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, Any]]) -> None:
        if tag == "pre":
            self.inside = True
            self.rows.append(["", ""])
        self.depth += self.inside and tag == "span"

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag != "pre"
        self.depth -= self.inside and tag == "span"

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.inside:
            self.rows[-1][0] += data if self.depth else ""
            self.rows[-1][1] += data


def test_marked_is_what_is_learned_and_all_counts_are_shown(tmp_path: Path) -> None:
    path = prompts_file(tmp_path)
    path.write_text(
        path.read_text() + '{"prompt": \n{"prompt": "<b>漢字</b>", "response": "naïve </pre>", "odd": 1}\n'
    )
    manifest = make(tmp_path / "data", prompts=str(path), on_error=OnError.skip)
    page = write_audit(tmp_path / "data", TOKENIZER, tmp_path / "audit.html", "make it")
    found = Page(page.read_text())
    rows = conversations(tmp_path / "data")
    assert len(found.rows) == min(40, len(rows)) and len(rows) > 25
    whole = {TOKENIZER.decode(row["tokens"]): supervised(row) for row in rows}
    for marked, text in found.rows:
        assert whole[text] == marked
    for name in ("left_out", "noted", "shapes"):
        for reason, count in manifest["counts"][name].items():
            assert f"{count:,}{reason}" in found.text
    assert "broken JSON" in found.text
    one = Page(write_audit(tmp_path / "data", TOKENIZER, page, "make it", rows=5).read_text())
    assert len(one.rows) == 5
    with pytest.raises(UserError, match="Make it first: make it"):
        write_audit(tmp_path / "nowhere", TOKENIZER, page, "make it")


@settings(max_examples=40, deadline=None)
@given(st.text(alphabet=st.sampled_from(list("ab \n漢🙂é<")), min_size=1, max_size=60), st.booleans())
def test_pieces_are_the_text(text: str, byte_level: bool) -> None:
    tokenizer = TOKENIZER if byte_level else metaspace(INST)
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    found = pieces(tokenizer, tokens)
    assert len(found) == len(tokens)
    whole = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
    if byte_level:
        assert "".join(found) == whole
    else:
        assert "".join("".join(found).split()) == "".join(whole.split())
