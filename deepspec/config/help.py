"""The text of `--help`: what a stage is for, what can be chosen, and its keys as this call would set them."""

import shutil
import textwrap
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from deepspec.config import search
from deepspec.config.meaning import type_says
from deepspec.config.settings import REQUIRED, Section, Setting, sections, shown
from deepspec.config.stages import STAGES, Stage, of_stage

WIDEST = 110

FLAGS = """\
Flags:
  --cfg job              print the whole configuration of this call, keys of other stages too, and stop
  --multirun key=1,2     one run for each value (give each its own out); also +recipe=A,B
  --config-dir DIR       more groups of your own (DIR/target/mine.yaml)
  --hydra-help           Hydra's own flags and settings"""


def help_text(stage: str, drafts: dict[str, type], config: DictConfig) -> str:
    """What `python -m deepspec.<stage> ... --help` prints. drafts: name → option class; config: as composed."""
    width = min(shutil.get_terminal_size((100, 24)).columns, WIDEST)
    about = STAGES.get(stage, Stage())
    program = f"python -m deepspec.{stage}"
    parts = [f"{program} {'' if stage == 'import_draft' else '+recipe=NAME '}[key=value ...]"]
    if about.purpose:
        parts.append(textwrap.fill(about.purpose, width))
        parts.append("\n".join(["Examples:", *(f"  {program} {one}" for one in about.examples)]))
    parts.append("\n".join(_choices(drafts, about.keys, width)))
    parts.append(FLAGS)
    values = OmegaConf.to_container(config, resolve=False)
    chosen = OmegaConf.get_type(config, "draft")
    found = of_stage(stage, sections(chosen if chosen in drafts.values() else None))
    parts.append("Keys of this stage, as this call sets them; every stage takes those of the others too:")
    parts += ["\n".join(_section(one, values, width)) for one in found]
    return "\n\n".join(parts)


def _choices(drafts: dict[str, type], keys: tuple[str, ...], width: int) -> Iterator[str]:
    yield "Choices:"
    yield "  +recipe=...  (recipes/ here, and those of the project)"
    yield _indented(", ".join(search.recipe_names()), width)
    yield f"  target=...   {', '.join(_options('target'))}"
    if "hardware" in keys:
        yield f"  hardware=... {', '.join(_options('hardware'))}"
    yield "  draft=..."
    for name, options in drafts.items():
        yield _indented(f"{name:11}{type_says(options)}", width, further=17)


def _options(group: str) -> list[str]:
    return sorted(path.stem for path in (search.shipped("conf") / group).glob("*.yaml"))


def _section(section: Section, values: Any, width: int) -> Iterator[str]:
    name = section.name and section.name.upper()
    yield f"{name}: {section.meaning}" if section.meaning else name or "RUN"
    heading = ""
    for one in section.settings:
        if one.heading and one.heading != heading and section.name:
            heading = one.heading
            yield f"  -- {heading}"
        yield from _setting(one, _value(values, one.key), width)


def _setting(one: Setting, value: str, width: int) -> Iterator[str]:
    was = "none" if one.default == REQUIRED else one.default
    default = "" if value == one.default else f"   (default: {was})"
    yield f"  {one.key}={value}{default}"
    words = f"{one.meaning} [{one.takes}]" if one.meaning else f"[{one.takes}]"
    yield _indented(words, width)


def _indented(text: str, width: int, further: int = 6) -> str:
    return textwrap.fill(text, width, initial_indent=" " * 6, subsequent_indent=" " * further)


def _value(values: Any, key: str) -> str:
    for name in key.split("."):
        values = values[name]
    return shown(values)
