"""Every key is explained, and the explanation is the one that stands beside it."""

import dataclasses
import re
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import pytest

from deepspec.config.keys import schema_keys
from deepspec.config.meaning import Said, meanings
from deepspec.config.schema import Config
from deepspec.config.settings import Section, sections, shown
from deepspec.config.stages import STAGES, of_stage
from deepspec.drafts.registry import option_classes

ROOT = Path(__file__).resolve().parents[2]
DRAFTS = option_classes()


class Colour(Enum):
    """Which `colour`
    it has."""

    red = "red"


@dataclass
class Inner:
    """Some inner words."""

    depth: int = 1


@dataclass
class Base:
    """Not of a field."""

    # far from the field, which an empty line parts from it

    alone: int = 0
    beside: int = 1  # beside it
    # above it, and
    # once more
    above: list[int] = field(default_factory=list)
    both: int = 2  # beside
    wrapped: list[str] = field(
        default_factory=lambda: [
            "a default that is too long for one line, so that the formatter keeps the brackets as they are",
        ]  # inside of parentheses
    )  # and after them
    text: str = "# no comment"  # a comment
    # -- a heading
    inherited: int = 4  # of the base

    def method(self) -> None:
        # of the method
        return None

    after: int = 5
    colour: Colour = Colour.red
    inner: Inner = field(default_factory=Inner)


@dataclass
class Derived(Base):
    inherited: int = 6
    beside: int = 7  # its own


def test_comments_are_found_wherever_they_may_stand() -> None:
    assert meanings(Derived) == {
        "alone": Said("", ""),
        "beside": Said("its own", ""),
        "above": Said("above it, and once more", ""),
        "both": Said("beside", ""),
        "wrapped": Said("inside of parentheses and after them", ""),
        "text": Said("a comment", ""),
        "inherited": Said("of the base", "a heading"),
        "after": Said("", "a heading"),
        "colour": Said("which colour it has", "a heading"),
        "inner": Said("Some inner words.", "a heading"),
    }


def every_section() -> list[Section]:
    found = sections(None)
    for options in DRAFTS.values():
        found += [one for one in sections(options) if one.name == "draft"]
    return found


def test_every_key_of_the_schema_is_explained() -> None:
    assert [one.key for section in every_section() for one in section.settings if not one.meaning] == []
    assert [section.name for section in every_section() if section.name and not section.meaning] == []


def test_every_key_of_the_schema_is_listed() -> None:
    listed = {one.key for section in every_section() for one in section.settings}
    keys = schema_keys(DRAFTS)
    inner = {name for name in keys if any(other.startswith(f"{name}.") for other in keys)}
    assert listed == set(keys) - inner


def test_type_bounds_choices_and_default_stand_beside_a_key() -> None:
    found = {one.key: one for section in sections(DRAFTS["eagle3"]) for one in section.settings}
    assert found["train.epochs"].takes == "a number; more than 0 and at most a million"
    assert found["train.resume"].takes == "text; auto or never"
    assert found["draft.start"].takes == "one of random, target"
    assert found["data.answers"].takes == "one of regenerated, given, mixed"
    assert found["data.thinking_tags"].default == "[<think>,</think>]"
    assert found["decode.tree_parents"].default.startswith("[-1,-1,-1,0")
    assert found["name"].default == "???" and found["out"].default == "runs/${name}"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "null"),
        (True, "true"),
        (0.5, "0.5"),
        ("", "''"),
        (Colour.red, "red"),
        ([1, None], "[1,null]"),
        ({"a": False}, "{a: false}"),
    ],
)
def test_values_as_a_shell_takes_them(value: object, words: str) -> None:
    assert shown(value) == words


def programs() -> set[str]:
    """Every module that is started as a stage."""
    return {
        path.stem
        for path in (ROOT / "deepspec").glob("*.py")
        if re.search(rf'start\("{path.stem}"|commands import {path.stem}\b', path.read_text(encoding="utf-8"))
    }


def test_every_program_says_what_it_is_for_and_which_keys_it_reads() -> None:
    assert programs() == set(STAGES)
    names = {one.name for one in dataclasses.fields(Config)}
    for name, stage in STAGES.items():
        assert stage.purpose and stage.examples and set(stage.keys) <= names, name


def test_every_key_is_shown_by_some_stage() -> None:
    everything = sections(DRAFTS["eagle3"])
    seen = {
        one.key for stage in STAGES for section in of_stage(stage, everything) for one in section.settings
    }
    assert seen == {one.key for section in everything for one in section.settings}
    assert of_stage("not listed", everything) == everything
