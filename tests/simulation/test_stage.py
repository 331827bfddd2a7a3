"""`deepspec.simulate` on a real recorded run of a tiny target."""

import json
from pathlib import Path

import pytest

from deepspec import evaluate
from deepspec import simulate as stage
from deepspec.config.schema import Config, HardwareConfig
from deepspec.errors import UserError
from tests.evaluation.conftest import config, target, trained

__all__ = ["config", "target", "trained"]  # fixtures
MACHINE = HardwareConfig("box", flops=1e13, bandwidth=1e11)


@pytest.fixture
def recorded(config: Config, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config.evaluate.baselines, config.evaluate.sweep = False, []
    config.decode.k, config.decode.max_new_tokens = 2, 48
    evaluate.run(config)
    config.simulate.result = str(trained / "evaluation" / "result.json")
    config.simulate.users = [1, 2, 4]
    return config


def findings(config: Config) -> dict:
    return json.loads((Path(config.out) / "simulation" / "simulation.json").read_text(encoding="utf-8"))


def test_this_machine_is_measured_and_the_engine_is_asked_too(
    recorded: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded.simulate.measured_rows, recorded.simulate.validate = 2, [2]
    page = stage.run(recorded)
    found = findings(recorded)
    assert [(one["policy"], one["load"]) for one in found["points"][:4]] == [
        ("plain", 1),
        ("fixed", 1),
        ("threshold", 1),
        ("hardware", 1),
    ]
    assert all(one["tokens_per_second"] > 0 for one in found["points"])
    assert {one["tau"] for one in found["points"] if one["policy"] == "plain"} == {1.0}
    assert [(one["policy"], one["rows"]) for one in found["checked"]] == [("plain", 2), ("fixed", 2)]
    assert all(one["real_seconds"] > 0 for one in found["checked"])
    text = page.read_text(encoding="utf-8")
    assert "Throughput against a user" in text
    assert "were not timed" in text  # four users, two rows
    said = capsys.readouterr().out
    assert "fixed: " in said and str(page) in said


def test_a_described_machine_and_an_api(recorded: Config) -> None:
    recorded.hardware = MACHINE
    recorded.simulate.target_parameters = 10**9
    recorded.simulate.draft_parameters, recorded.simulate.cached_bytes = 10**8, 10**5
    recorded.simulate.api_tpot, recorded.simulate.api_round_trip = 0.05, 0.2
    page = stage.run(recorded)
    found = findings(recorded)
    plain = next(one for one in found["points"] if one["policy"] == "plain" and one["load"] == 1)
    assert plain["per_user"] == pytest.approx(1 / (2e9 / 1e11 + 5e-4), rel=0.05)
    assert found["network"][0]["seconds"]["api"] == pytest.approx(0.2 + 15 * 0.05)
    assert "the network is the larger part up to answers of 5 tokens" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: setattr(c.simulate, "k", 9), r"simulate\.k=9.*recorded rounds of 2"),
        (lambda c: setattr(c.simulate, "result", "nowhere.json"), r"nowhere\.json"),
        (lambda c: setattr(c.simulate, "policies", ["best"]), r"simulate\.policies: 'best'.*hardware"),
        (lambda c: setattr(c.hardware, "name", "box"), r"hardware=box lacks hardware\.flops"),
        (lambda c: setattr(c.simulate, "users", []), r"nothing to simulate"),
    ],
)
def test_what_cannot_be_simulated_is_said(recorded: Config, change, words: str) -> None:
    change(recorded)
    with pytest.raises(UserError, match=words):
        stage.run(recorded)


def test_a_run_too_short_is_said(recorded: Config) -> None:
    path = Path(str(recorded.simulate.result))
    content = json.loads(path.read_text(encoding="utf-8"))
    for record in content["records"]:
        for decoding in record["speculative"]:
            decoding["rounds"] = decoding["rounds"][:2]
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(UserError, match=r"has 8 rounds .* needs 50.*evaluate\.max_prompts"):
        stage.run(recorded)
