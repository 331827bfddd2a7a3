"""Names, types and bounds of the configuration's keys."""

from dataclasses import dataclass, field, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspec.config.keys import nearest, schema_keys, takes
from deepspec.config.ranges import BOUNDS, check
from deepspec.config.schema import Config, Precision, TargetConfig, TrainConfig
from deepspec.drafts.options import Eagle3Options
from deepspec.drafts.registry import option_classes
from deepspec.errors import UserError


@dataclass
class Options:
    algorithm: str = "fake"
    steps: int = 5
    layers: list[int] | None = field(default_factory=list)


KEYS = schema_keys({"fake": Options})


def test_every_field_of_every_section_is_a_key() -> None:
    assert {f"train.{one.name}" for one in fields(TrainConfig)} <= set(KEYS)
    assert {f"target.{one.name}" for one in fields(TargetConfig)} <= set(KEYS)
    assert {one.name for one in fields(Config)} <= set(KEYS)
    assert {name for name in KEYS if name.startswith("draft.")} == {
        "draft.algorithm",
        "draft.steps",
        "draft.layers",
    }


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (int, "a whole number"),
        (int | None, "a whole number or null"),
        (list[int], "a list, each item a whole number"),
        (tuple[float, float], "a list of 2 items, each a number"),
        (dict[str, float], "a mapping of names to a number"),
        (Precision, "one of auto, no, bf16, fp16"),
        (Options, "a section with the keys algorithm, steps, layers"),
    ],
)
def test_types_in_words(kind: object, words: str) -> None:
    assert takes(kind) == words


@given(st.sampled_from(sorted(name for name in KEYS if len(name.rpartition(".")[2]) >= 6)), st.data())
def test_one_wrong_letter_still_finds_the_key(name: str, data: st.DataObject) -> None:
    start = name.rfind(".") + 1
    at = data.draw(st.integers(start, len(name) - 1))
    mistyped = name[:at] + "q" + name[at + 1 :]
    assert name in nearest(mistyped, list(KEYS))


def test_bounds_name_existing_keys() -> None:
    assert set(BOUNDS) <= set(schema_keys(option_classes()))


def a_config() -> Config:
    return Config(name="x", target=TargetConfig(name="t", path="p"), draft=Eagle3Options())


def test_the_defaults_are_inside_their_bounds() -> None:
    check(a_config())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("decode.k", 0),
        ("decode.top_p", 0.0),
        ("decode.min_p", 1.0),
        ("decode.temperature", float("inf")),
        ("evaluate.sweep", [3, 0]),
        ("train.betas", [0.9, 1.0]),
        ("train.betas", [0.9]),
        ("train.betas", [0.9, 0.95, 0.99]),
        ("train.epochs", float("inf")),
        ("train.loss", {"soft_ce": float("nan")}),
        ("train.eval_steps", 1023),
        ("draft.ttt_steps", 1023),
        ("train.seed", -1),
        ("decode.seed", 2**63),
        ("evaluate.threads", 10**9),
        ("train.warmup", 1.5),
        ("train.resume", "always"),
        ("data.regenerated_prompts", -1),
        ("draft.start", "nowhere"),
        ("draft.algorithm", "eagle9"),
    ],
)
def test_a_number_outside_is_named(key: str, value: object) -> None:
    config = a_config()
    section, name = key.split(".")
    setattr(getattr(config, section), name, value)
    with pytest.raises(UserError, match=f"`?{key}`? "):
        check(config)
