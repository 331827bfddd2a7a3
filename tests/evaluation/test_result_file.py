"""The result file: there and back, and refusals that say what is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from deepspec.errors import UserError
from deepspec.evaluation.result import load_result, save_result
from deepspec.evaluation.summary import summarise_result
from deepspec.evaluation.typed_json import build, dumps
from tests.reporting.synthetic import make_records, make_result, spoil


@pytest.fixture
def file(tmp_path: Path) -> Path:
    records = make_records(5)
    spoil(records[1], proven=True)
    path = tmp_path / "evaluation" / "result.json"
    save_result(make_result(records), path)
    return path


def change(path: Path, edit: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    edit(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def test_there_and_back(file: Path) -> None:
    result = load_result(file)
    records = make_records(5)
    spoil(records[1], proven=True)
    assert result == make_result(records)
    assert (result.summary, result.categories) == summarise_result(result)
    assert [path.name for path in file.parent.iterdir()] == ["result.json"]


def test_rounds_stand_on_one_line_each(file: Path) -> None:
    lines = file.read_text(encoding="utf-8").splitlines()
    rounds = sum(len(d.rounds) for r in load_result(file).records for d in r.speculative)
    assert sum(line.strip().startswith('{"drafted":') for line in lines) == rounds


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda c: c.update(schema_version=0), "schema version 0"),
        (lambda c: c.update(schema_version="2"), "schema version '2'"),
        (lambda c: c.pop("schema_version"), "schema_version"),
        (lambda c: c.pop("conditions"), "conditions is missing"),
        (lambda c: c["records"][2].pop("plain"), "records[2].plain is missing"),
        (
            lambda c: c["records"][0]["plain"][0].update(tokens="x"),
            "records[0].plain[0].tokens should be list",
        ),
        (
            lambda c: c["records"][0]["speculative"][0]["rounds"][1].update(cut=1),
            "rounds[1].cut should be bool",
        ),
        (lambda c: c["summary"]["tau"].update(value="2.1"), "summary.tau.value should be float"),
        (lambda c: c.update(surprise=1), "surprise is not a known key"),
        (lambda c: c.update(step_times=[]), "step_times should be an object"),
        (lambda c: c["summary"]["tau"].update(value=float("nan")), "NaN is no number"),
        (lambda c: c.update(records=[]), "records is empty"),
        (lambda c: c["records"][2].update(speculative=[]), "records[2].speculative is empty"),
        (
            lambda c: c["records"][2].update(plain=[]) or c.update(schema_version=2),
            "records[2].plain is empty",
        ),
        (lambda c: c["conditions"].update(resamples=0), "conditions.resamples is 0"),
    ],
)
def test_a_damaged_or_other_file_is_refused_by_place(file: Path, edit: Any, words: str) -> None:
    change(file, edit)
    with pytest.raises(UserError) as caught:
        load_result(file)
    assert str(file) in str(caught.value)
    assert words in str(caught.value)


def test_a_file_that_nests_without_end_is_damaged(file: Path) -> None:
    file.write_text("[" * 100_000 + "]" * 100_000, encoding="utf-8")
    with pytest.raises(UserError, match="is damaged or unreadable"):
        load_result(file)


def test_a_file_of_version_1_is_migrated_by_computing_again(file: Path) -> None:
    expected = load_result(file)

    def age(content: Any) -> None:
        content["schema_version"] = 1
        for baseline in content["baselines"]:
            del baseline["differing"]
        for summary in (content["summary"], *content["categories"].values()):
            for way in ("plain", "speculative", "fastest"):
                del summary[way]["end_to_end"], summary[way]["ttft"]["p95"], summary[way]["tpot"]["p95"]
        for key in ("sources", "quality", "detail", "resources", "calibration"):
            del content[key]
        for record in content["records"]:
            del record["turn"], record["references"]
            for decoding in (*record["plain"], *record["speculative"], *record["fastest"]):
                del decoding["outside"], decoding["scores"]
                for one in decoding["rounds"]:
                    del one["confidence"], one["scheduled"]

    change(file, age)
    assert load_result(file) == expected
    change(file, lambda content: content.pop("summary"))
    with pytest.raises(UserError, match="summary is missing"):
        load_result(file)


def test_the_published_results_are_read() -> None:
    files = list((Path(__file__).parents[2] / "results").glob("*/result.json"))
    assert files
    for path in files:
        result = load_result(path)
        assert (result.summary, result.categories) == summarise_result(result)


@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b"\xff\xfe\x00", b'"text"'])
def test_what_is_no_result_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "result.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"result\.json"):
        load_result(path)
    with pytest.raises(UserError, match="does not exist"):
        load_result(tmp_path / "nothing.json")


def test_a_number_that_is_none_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="JSON"):
        dumps({"value": float("nan")})


@pytest.mark.parametrize(
    "content", [{}, [], {"a": []}, {"a": {"b": [{"c": 1}, {}]}, "ü": 'x"\n'}, [[1], ["a"]]]
)
def test_compact_json_is_json(content: Any) -> None:
    assert json.loads(dumps(content)) == content
    assert build(Any, content) == content
