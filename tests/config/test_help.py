"""What `--help` prints."""

from pathlib import Path

import pytest
from hydra import compose, initialize
from hydra.core.global_hydra import GlobalHydra

from deepspec.config.help import help_text
from deepspec.config.store import PRIMARY, register
from deepspec.drafts.registry import option_classes
from tests.test_programs import program

DRAFTS = option_classes()


def helped(stage: str, *overrides: str) -> list[str]:
    register(stage, DRAFTS)
    GlobalHydra.instance().clear()
    with initialize(version_base="1.3", config_path=None):
        return help_text(stage, DRAFTS, compose(PRIMARY, overrides=list(overrides))).splitlines()


def keys(lines: list[str]) -> set[str]:
    return {
        line.split("=")[0].strip()
        for line in lines
        if line.startswith("  ") and line[2:3].islower() and "=" in line
    }


def test_a_key_has_its_value_here_its_default_its_meaning_and_what_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    lines = helped("train", "+recipe=quickstart", "train.clip=0.5")
    at = lines.index("  train.clip=0.5   (default: 1.0)")
    assert (
        lines[at + 1] == "      a larger gradient is scaled down to this norm; 0 = off [a number; 0 or more]"
    )
    assert "  train.epochs=2.0   (default: 1.0)" in lines
    assert "  train.warmup=0.05" in lines
    assert max(len(line) for line in lines if line.startswith("      ")) <= 110


def test_a_stage_shows_its_own_keys_only() -> None:
    assert {"data.prompts", "data.hub.split", "audit", "out"} <= keys(helped("prepare"))
    assert not {"train.epochs", "decode.k", "format"} & keys(helped("prepare"))
    assert {"decode.k", "evaluate.sweep"} <= keys(helped("evaluate"))
    assert not {"data.prompts", "prompt"} & keys(helped("evaluate"))


def test_the_chosen_drafts_options_are_shown() -> None:
    medusa = keys(helped("train", "draft=medusa"))
    assert "draft.heads" in medusa and "draft.ttt_steps" not in medusa


def test_a_dollar_sign_survives_hydras_template(tmp_path: Path) -> None:
    done = program(tmp_path, "prepare", "--help")
    assert done.returncode == 0 and done.stderr == ""
    assert "  out=runs/${name}" in done.stdout and "$OPENAI_API_KEY" in done.stdout


def test_hydras_own_help_is_there(tmp_path: Path) -> None:
    done = program(tmp_path, "train", "--hydra-help")
    assert done.returncode == 0 and "== Flags ==" in done.stdout
