"""Prompts out of files and data sets, row by row, every bad row named or counted."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from deepspec.config.schema import HubConfig
from deepspec.data.conversation import BadRow, Conversation, Tally
from deepspec.data.readers import BlankLine
from deepspec.data.shapes import conversation as read_row
from deepspec.data.sources import HUB, prompts_sha256, source_rows

__all__ = ["iter_prompts", "prompts_sha256", "read_prompts"]


def read_prompts(path: Path, tally: Tally) -> list[Conversation]:
    """All conversations of one source, in its order, no id twice; see `iter_prompts`."""
    found: dict[str, Conversation] = {}
    kept = []
    for conversation in iter_prompts(str(path), tally):
        first = found.setdefault(conversation.id, conversation)
        if first.key == conversation.key:
            kept.append(conversation)
        else:
            tally.bad(repeated_id(conversation.id, first.place), conversation.source, conversation.line)
    return kept


def repeated_id(id: str, first: str) -> BadRow:
    """Two contents under one name."""
    return BadRow("repeated id", f"{id!r} is also the id of {first}")


def iter_prompts(
    source: str, tally: Tally, columns: Mapping[str, str] | None = None, hub: HubConfig | None = None
) -> Iterator[Conversation]:
    """The conversations of a file, folder, pattern or hub data set, one at a time, in order.

    Rows are as `deepspec.data.shapes` knows them; `category`, `group` and `id` are optional. Bad rows go to
    `tally` (an error with the line's number if it is strict); blank lines are counted. `UserError` if there
    is nothing to read, or a file cannot be read as a whole. Repeated ids are the caller's to find.
    """
    for name, rows in source_rows(source, hub or HubConfig()):
        short = name if name.startswith(HUB) else Path(name).name
        for number, row in rows:
            try:
                if isinstance(row, BlankLine):
                    tally.drop(row.reason, short, number)
                    continue
                if isinstance(row, BadRow):
                    raise row
                yield read_row(row, short, number, tally, columns)
            except BadRow as error:
                tally.bad(error, name, number)
