"""Whole evaluations of a tiny target with an untrained EAGLE-3 draft, in float64: no tie is excused."""

import json
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from deepspec import evaluate as stage
from deepspec.config.schema import Config, TargetConfig, Tree
from deepspec.decoding import Engine
from deepspec.decoding.request import Request, Result, Sampling
from deepspec.drafts.ngram import NgramOptions
from deepspec.errors import UserError
from deepspec.evaluation import choosing, ways
from deepspec.evaluation import run as measuring
from deepspec.evaluation.bare import logits_two_ways
from deepspec.evaluation.baselines import transformers_decode
from deepspec.evaluation.result import load_result
from deepspec.evaluation.summary import summarise_result
from deepspec.target import Target
from tests.evaluation.tiny import IDENTITY
from tests.models import VOCAB, prompts, tiny_model, tiny_target


def test_a_whole_evaluation(config: Config, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = stage.run(config)
    result = load_result(trained / "evaluation" / "result.json")
    assert [record.equal for record in result.records] == [True] * 4
    assert sorted(record.category for record in result.records) == ["x", "x", "y", "y"]
    assert (result.summary, result.categories) == summarise_result(result)
    assert result.conditions.k in (1, 3)
    assert [point.k for point in result.sweep if point.chosen] == [result.conditions.k]
    assert result.conditions.sweep_overlap == 1  # five prompts: four measured, two for the sweep
    assert {(b.decoder, b.dtype) for b in result.baselines} == {
        (decoder, dtype)
        for decoder in ("deepspec", "transformers generate")
        for dtype in ("float64", "float32", "bfloat16")
    }
    assert sum(b.chosen for b in result.baselines) == 1
    assert result.step_times is not None and len(result.step_times.verify) == result.conditions.k + 1
    for record in result.records:
        (decoding,) = record.speculative
        assert sum(r.committed for r in decoding.rounds) == len(decoding.tokens) - 1
        assert all(r.committed == r.accepted + 1 or r.cut for r in decoding.rounds)
    assert len(result.training) == 3
    page = report.read_text(encoding="utf-8")
    assert "&lt;b&gt;1&lt;/b&gt;" in page and "<b>1</b>" not in page
    lines = capsys.readouterr().out.strip().splitlines()
    warned = ["warning"] if result.conditions.noise.noisy else []  # something else ran beside this very test
    assert [line.split()[0] for line in lines] == [*warned, "τ", "speedup", "equality", "report"]
    assert "4 of 4" in lines[-2] and str(report) in lines[-1]


def test_a_draft_with_nothing_to_train(config: Config, trained: Path) -> None:
    """From the data alone, beside a trained draft's result and not in its place."""
    config.draft = NgramOptions(min_n=1)
    config.evaluate.baselines = False
    (trained / "data" / "manifest.json").write_text(
        json.dumps({"inputs": {"target": {**IDENTITY, "weights": "others"}}}), encoding="utf-8"
    )
    with pytest.raises(UserError, match="allow_other_target"):
        stage.run(config)
    config.target.allow_other_target = True
    config.decode.tree = Tree.dynamic
    report = stage.run(config)
    assert report == trained / "evaluation_ngram" / "report.html"
    result = load_result(report.with_name("result.json"))
    assert [record.equal for record in result.records] == [True] * 4
    assert (result.draft["algorithm"], result.draft["parameters"], result.training) == ("ngram", 0, [])
    assert "other weights" in result.warnings[0] and "proposed chains" in result.warnings[1]
    assert not (trained / "evaluation").exists()
    assert (result.summary, result.categories) == summarise_result(result)


def test_trees_penalties_and_stop_strings_reach_the_decoding(
    config: Config, trained: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Speller:
        eos_token_id = None

        def decode(self, tokens: list[int]) -> str:
            return "".join(f"{token:02d}" for token in tokens)

    monkeypatch.setattr(target, "tokenizer", Speller())
    config.evaluate.baselines = False
    config.decode.tree = Tree.static
    config.decode.repetition_penalty = 1.3
    config.decode.stop = ["7"]
    result = load_result(stage.run(config).with_name("result.json"))
    assert (result.conditions.k, result.conditions.rule, result.sweep) == (5, "greedy static-tree", [])
    rounds = [r for record in result.records for d in record.speculative for r in d.rounds]
    assert not result.warnings
    size = len(config.decode.tree_parents)
    assert result.step_times is not None
    assert (len(result.step_times.verify), len(result.step_times.draft)) == (size + 1, size)
    assert len(set(result.step_times.draft)) == 1  # a tree is drafted whole
    assert result.summary.efficiency.value is not None
    assert max(r.scheduled or 0 for r in rounds) == len(config.decode.tree_parents)
    penalty = Sampling(repetition_penalty=1.3)
    assert all(record.equal for record in result.records)
    texts = {f"p{i}": tokens for i, tokens in enumerate(prompts(5))}
    stopped = 0
    for record in result.records:
        (whole,) = Engine(target).generate([Request(texts[record.id], 12, penalty, eos=target.eos)])
        end = next((n for n in range(1, 13) if "7" in Speller().decode(whole.tokens[:n])), 12)
        assert record.plain[0].tokens == whole.tokens[:end]
        stopped += record.plain[0].finish == "stop"
    assert stopped


def test_dtypes_that_do_not_fit_into_memory_are_listed_with_the_reason(
    config: Config, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choosing.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000, total=1))
    stage.run(config)
    result = load_result(trained / "evaluation" / "result.json")
    notes = {b.dtype: b.note for b in result.baselines if b.tokens_per_second.value is None}
    assert notes.keys() == {"float32", "bfloat16"}
    assert all(note is not None and "GiB are free" in note for note in notes.values())


def test_the_headline_is_never_against_a_slower_plain_decoding(
    config: Config, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(target: Any) -> Any:
        engine, calls = Engine(target), 0

        def decode(request: Request) -> Result:
            nonlocal calls
            calls += 1
            (result,) = engine.generate([request])
            result.rounds = []
            # By far the fastest in the first trials (one warm-up, two prompts), the slowest afterwards.
            result.decode_seconds = 1e-9 if calls <= 3 else 1e3
            return result

        return decode

    monkeypatch.setattr(ways, "transformers_decode", slow)
    stage.run(config)
    result = load_result(trained / "evaluation" / "result.json")
    (chosen,) = [b for b in result.baselines if b.chosen]
    assert (chosen.decoder, chosen.dtype) == ("deepspec", "float64")
    assert "the same loop" in result.conditions.fastest_plain
    assert result.summary.speedup == result.summary.speedup_same_loop
    assert any(b.note and "on all prompts" in b.note for b in result.baselines)


def test_k_beyond_the_answers_length_times_no_steps_that_cannot_occur(config: Config, trained: Path) -> None:
    config.evaluate.baselines, config.evaluate.sweep = False, [1, 300, 5000]
    stage.run(config)
    result = load_result(trained / "evaluation" / "result.json")
    assert [point.k for point in result.sweep] == [
        1,
        10,
    ]  # of 12 tokens, 1 is the prefill's and 1 the target's
    assert result.step_times is not None and len(result.step_times.verify) == result.conditions.k + 1


def test_copies_of_the_target_that_lost_are_not_in_memory_during_the_main_run(
    config: Config, trained: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, copies, alive = stage.load_target, [], []

    def watched(settings: TargetConfig, layers: Any = ()) -> Target:
        found = load(settings, layers)
        if found is not target:
            vars(found)["itself"] = found  # as hooks and caches make one: it does not go by itself
            copies.append(weakref.ref(found.model))
        return found

    def main(self: Any, *more: Any) -> Any:
        alive.append(sum(copy() is not None for copy in copies))
        return measure_main(self, *more)

    measure_main = measuring._Evaluation._main
    monkeypatch.setattr(stage, "load_target", watched)
    # the fastest is one that needs no copy
    monkeypatch.setattr(ways, "transformers_decode", lambda of: took(1e-9 if of is target else 1e3))
    monkeypatch.setattr(measuring._Evaluation, "_main", main)
    stage.run(config)
    assert len(copies) == 2 and alive == [0]


def took(seconds: float) -> Any:
    """A decoder of that speed."""
    return lambda request: Result(request.id, [5, 6], "length", 1.0, seconds)


def test_sampled_outputs_are_not_compared(config: Config, trained: Path) -> None:
    config.decode.temperature = 1.0
    config.evaluate.sweep = []
    config.evaluate.repeats = 2
    stage.run(config)
    result = load_result(trained / "evaluation" / "result.json")
    assert result.conditions.k == 2 and result.conditions.rule == "block"
    assert [record.equal for record in result.records] == [None] * 4
    assert all(len(record.speculative) == 2 for record in result.records)


class Wrong(Engine):
    """An engine that loses its way when it drafts."""

    def generate(self, requests: Any, on_result: Any = None) -> list[Result]:
        results = super().generate(requests, on_result)
        if self.draft is not None:
            for result in results:
                result.tokens = [*result.tokens[:3], (result.tokens[3] + 1) % VOCAB, *result.tokens[4:]]
        return results


def test_a_decoder_that_is_not_lossless_fails_after_writing(
    config: Config, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ways, "Engine", Wrong)
    config.evaluate.baselines = False
    with pytest.raises(UserError, match="not lossless"):
        stage.run(config)
    result = load_result(trained / "evaluation" / "result.json")
    assert result.summary.equality.unproven == 4
    assert all(record.tie is not None and record.tie.position == 3 for record in result.records)
    assert 'class="alarm"' in (trained / "evaluation" / "report.html").read_text(encoding="utf-8")
    with pytest.raises(UserError, match="not lossless"):  # and it stays a failure when asked again
        stage.run(config)


def test_a_missing_draft_names_the_command(config: Config, target: Target) -> None:
    with pytest.raises(UserError, match=r"-m deepspec\.train"):
        stage.run(config)


@pytest.mark.parametrize(
    ("node", "key", "value"),
    [
        ("decode", "k", 0),
        ("evaluate", "sweep", [2, 0]),
        ("evaluate", "max_prompts", 0),
        ("evaluate", "repeats", 0),
        ("decode", "max_new_tokens", 1),
    ],
)
def test_settings_that_cannot_be_measured_stop_by_name(
    config: Config, node: str, key: str, value: Any
) -> None:
    setattr(getattr(config, node), key, value)
    with pytest.raises(UserError, match=rf"{node}\.{key}"):
        stage.run(config)


def test_transformers_baseline_is_plain_decoding() -> None:
    target = tiny_target("qwen3")
    ours, theirs = Engine(target), transformers_decode(target)
    for tokens in prompts(4):
        request = Request(tokens, 16, Sampling(), 0, target.eos)
        (expected,) = ours.generate([request])
        found = theirs(request)
        assert (found.tokens, found.finish) == (expected.tokens, expected.finish)
        assert found.prefill_seconds > 0 and found.decode_seconds >= 0


def test_a_checkpoints_own_generation_settings_do_not_reach_the_baseline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tiny_target("qwen3")
    own = GenerationConfig(no_repeat_ngram_size=1, suppress_tokens=list(range(0, VOCAB, 2)))
    monkeypatch.setattr(target.model, "generation_config", own)  # the model is every test's
    request = Request(prompts(1)[0], 24, Sampling(), 0, target.eos)
    assert transformers_decode(target)(request).tokens == Engine(target).generate([request])[0].tokens
    assert target.model.generation_config is own


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 7])
def test_logits_two_ways_are_a_plain_forwards(length: int) -> None:
    target, (prompt, answer) = (
        tiny_target("llama"),
        ([5, 6, 7, 8], prompts(1, seed=4, longest=40)[0][:length]),
    )
    answer += [9] * (length - len(answer))
    one, other = logits_two_ways(target, 2)(prompt, answer)
    plain = tiny_model("llama")(torch.tensor([prompt + answer])).logits[0, -1]
    torch.testing.assert_close(one, plain)
    torch.testing.assert_close(other, plain)
