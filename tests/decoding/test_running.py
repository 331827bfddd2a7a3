"""The running batch in a caller's own hands: requests come late, leave early, and change nobody else's text."""

import pytest

from deepspec.decoding import Engine, Request
from deepspec.drafts.ngram import NgramDraft
from deepspec.drafts.options import NgramOptions
from tests.decoding.fakes import reference
from tests.models import prompts, tiny_target


@pytest.mark.parametrize("draft", [None, NgramDraft(NgramOptions(min_n=1))], ids=["plain", "ngram"])
def test_who_comes_late_or_leaves_early_changes_nobodys_text(draft) -> None:
    texts = prompts(5, seed=8)
    engine = Engine(tiny_target("llama"), draft, k=3, max_batch_size=3)
    batch, rows = engine.running(), []

    def admit(text: list[int]) -> None:
        request = Request(text, 24)
        engine.check(request)
        rows.append(batch.admit(request, engine.limit(request)))

    for text in texts[:3]:
        admit(text)
    batch.step()
    batch.drop(rows[0])
    admit(texts[3])
    batch.step()
    batch.drop(rows[2])
    admit(texts[4])
    while batch.rows:
        batch.step()
    for index, (row, text) in enumerate(zip(rows, texts, strict=True)):
        expected = reference("llama", text, 24)
        assert row.finish == ("dropped" if index in (0, 2) else "length")
        assert row.tokens == expected[: len(row.tokens)] and (len(row.tokens) < 24) == (index in (0, 2))
