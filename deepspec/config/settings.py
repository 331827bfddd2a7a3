"""Every key with all that a person can be told of it: type, bounds, choices, default and meaning."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, get_type_hints

from deepspec.config.keys import takes
from deepspec.config.meaning import meanings, type_says
from deepspec.config.ranges import BOUNDS
from deepspec.config.schema import Config

REQUIRED = "???"  # OmegaConf's word for a key that must be given


@dataclass(frozen=True)
class Setting:
    """One key. takes: what it accepts, in words. default: as written in a shell. heading: of its group, or empty."""

    key: str
    takes: str
    default: str
    meaning: str
    heading: str


@dataclass(frozen=True)
class Section:
    """Keys that stand together: those of one class, or those that belong to none (`name` is empty)."""

    name: str
    meaning: str
    settings: tuple[Setting, ...]


def sections(draft: type | None) -> list[Section]:
    """The whole configuration in the schema's order. draft: the option class that `draft` has; None: leave it out."""
    said = meanings(Config)
    alone = [one for one in fields(Config) if one.name != "draft" and not _section(Config, one)]
    found = [Section("", "", tuple(_setting(Config, one, "") for one in alone))]
    for one in fields(Config):
        kind = _section(Config, one)
        if kind is not None:
            found.append(Section(one.name, said[one.name].words, tuple(_settings(kind, f"{one.name}."))))
        elif one.name == "draft" and draft is not None:
            found.append(draft_section(draft))
    return found


def draft_section(options: type) -> Section:
    """The keys of one draft. options: its option class."""
    return Section("draft", type_says(options), tuple(_settings(options, "draft.")))


def shown(value: Any) -> str:
    """A value as it is written in a shell."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list | tuple):
        return f"[{','.join(shown(item) for item in value)}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {shown(item)}" for name, item in value.items()) + "}"
    return str(value) or "''"


def _section(schema: type, field: Field[Any]) -> type | None:
    kind = get_type_hints(schema)[field.name]
    return kind if isinstance(kind, type) and is_dataclass(kind) else None


def _settings(schema: type, prefix: str) -> Iterator[Setting]:
    """The keys of one class; a class inside it stands under its own words as a heading."""
    for field in fields(schema):
        inner = _section(schema, field)
        if inner is None:
            yield _setting(schema, field, prefix)
            continue
        for one in _settings(inner, f"{prefix}{field.name}."):
            yield Setting(one.key, one.takes, one.default, one.meaning, type_says(inner).rstrip("."))


def _setting(schema: type, field: Field[Any], prefix: str) -> Setting:
    key, said = prefix + field.name, meanings(schema)[field.name]
    choices = field.metadata.get("choices")
    accepted = f"one of {', '.join(choices)}" if choices else takes(get_type_hints(schema)[field.name])
    if key in BOUNDS:
        accepted += f"; {BOUNDS[key][1]}"
    return Setting(key, accepted, _default(field), said.words, said.heading)


def _default(field: Field[Any]) -> str:
    if field.default_factory is not MISSING:
        return shown(field.default_factory())
    return REQUIRED if field.default is MISSING else shown(field.default)
