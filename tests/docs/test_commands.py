"""Every shell command in README.md and docs/: run, or where that takes long, composed key by key."""

import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from hydra import compose, initialize
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from deepspec.config.explain import explain, incomplete
from deepspec.config.keys import schema_keys
from deepspec.config.ranges import check
from deepspec.config.schema import Config
from deepspec.config.search import recipe_names
from deepspec.config.stages import STAGES
from deepspec.config.store import PRIMARY
from deepspec.drafts.registry import option_classes
from tests.config.processes import environment
from tests.docs.pages import PAGES, REASONS, ROOT, Block, Command, all_commands, blocks, commands, inline_code

COMMANDS = all_commands()
STAGED = [one for one in COMMANDS if one.stage in STAGES]
RUN = [one for one in COMMANDS if not one.reasons]
PLAIN_PROGRAMS = {"report", "doctor"}  # they take no configuration
KEYS = schema_keys(option_classes())
SECTIONS = {name.partition(".")[0] for name in KEYS if "." in name}


def calls(arguments: list[str]) -> Iterator[list[str]]:
    """The overrides of each run that a command line makes: one, or with --multirun one a combination."""
    overrides = [
        one.replace("from=", "import_from=", 1) if one.startswith("from=") else one for one in arguments
    ]
    if "--cfg" in overrides:
        at = overrides.index("--cfg")
        del overrides[at : at + 2]
    several = "--multirun" in overrides
    overrides = [one for one in overrides if not one.startswith("--")]
    if not several:
        yield overrides
        return
    parsed = OverridesParser.create().parse_overrides(
        [one for one in overrides if not one.startswith("hydra")]
    )
    choices = [
        [f"{one.get_key_element()}={value}" for value in one.sweep_string_iterator()]
        if one.is_sweep_override()
        else [one.input_line or ""]
        for one in parsed
    ]
    yield from (list(call) for call in itertools.product(*choices))


def composed(overrides: list[str]) -> Config:
    """What a stage would be given; fails with the sentence that a person would read."""
    try:
        with initialize(version_base="1.3", config_path=None):
            found = compose(PRIMARY, overrides=overrides)
        wrong = incomplete(found)
        assert wrong is None, wrong
        config = cast(Config, OmegaConf.to_object(cast(Any, found)))
    except Exception as error:
        raise AssertionError(explain(error, KEYS) or str(error)) from error
    check(config)
    return config


@pytest.mark.parametrize("command", STAGED, ids=lambda one: one.place)
def test_a_stages_command_names_only_keys_recipes_and_choices_that_exist(
    command: Command, desk: Path
) -> None:
    if "--help" in command.arguments:
        return  # composes without a name; run below
    own = ["name=endpoints"] if command.stage == "bench_endpoint" else []  # it needs no experiment
    for overrides in calls(command.arguments):
        composed([*own, *overrides])


@pytest.mark.parametrize("command", COMMANDS, ids=lambda one: one.place)
def test_a_command_names_only_programs_and_files_that_exist(command: Command) -> None:
    if command.stage is not None:
        assert command.stage in {*STAGES, *PLAIN_PROGRAMS}
    for word in command.words:
        if re.fullmatch(r"(scripts|conf|tests)/\S*", word):
            assert (ROOT / word).exists(), word


@pytest.mark.parametrize("command", RUN, ids=lambda one: one.place)
def test_an_unmarked_command_runs(command: Command, desk: Path) -> None:
    assert command.words[0] == "python", "mark the block: <!-- commands: WHY -->"
    done = subprocess.run(
        [sys.executable, *command.words[1:]],
        cwd=desk,
        env=environment(ROOT),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_marks_are_known_words() -> None:
    every = [block for page in PAGES for block in blocks(page)]
    assert {block.kind for block in every} <= {"", "commands", "recipe", "example"}
    assert {word for block in every if block.kind == "commands" for word in block.what.split()} <= REASONS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_only_keys_and_recipes_that_exist(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for code in inline_code(page):
        found = re.match(rf"\+?((?:{'|'.join(sorted(SECTIONS))})\.[a-z_.0-9]+)(?:\.\*)?(?:=|$)", code)
        if found:
            key = found[1].rstrip(".")
            mapping = str(KEYS.get(key.rpartition(".")[0], "")).startswith("dict[")
            assert key in KEYS or mapping, f"{page.name}: `{code}`"
        for name in re.findall(r"\+recipe=([\w/]+)", code):
            assert name in (*recipe_names(), "NAME", "A", "X"), f"{page.name}: `{code}`"


def test_the_parser_sees_what_a_shell_would() -> None:
    block = Block(
        Path("x.md"), 3, "bash", "commands", "long gpu", "A=1 run \"b c\" \\\n  d  # e\n\n# f\ng='[1,2]'\n"
    )
    assert commands(block) == [
        Command("x.md:4", ("A=1", "run", "b c", "d"), frozenset({"long", "gpu"})),
        Command("x.md:7", ("g=[1,2]",), frozenset({"long", "gpu"})),
    ]
    launched = Command("x", ("torchrun", "-m", "deepspec.train", "+recipe=a"), frozenset())
    assert (launched.stage, launched.arguments) == ("train", ["+recipe=a"])


def test_every_run_of_a_sweep_is_composed() -> None:
    found = list(
        calls(["--multirun", "+recipe=a,b", "train.seed=1,2", "hydra/launcher=x", "out='r/${name}'"])
    )
    assert len(found) == 4 and ["+recipe=b", "train.seed=1", "out='r/${name}'"] in [
        [one.replace("recipe=", "+recipe=") if one.startswith("recipe") else one for one in call]
        for call in found
    ]
