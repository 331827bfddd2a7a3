"""Quality: metrics against the libraries they wrap, answers and programs judged, repetition, two samples."""

import os
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st
from rouge_score import rouge_scorer

from deepspec.errors import UserError
from deepspec.evaluation.quality.answers import is_right, last_boxed, same, value
from deepspec.evaluation.quality.code import code_of, passes, run
from deepspec.evaluation.quality.metrics import SHIPPED, LoadedMetric, compute, load_metric, metric_path
from deepspec.evaluation.quality.repetition import repetition_rate
from deepspec.evaluation.quality.two_sample import two_sample
from deepspec.evaluation.tasks.item import Check

PREDICTIONS = ["the cat sat on the mat today", "a refund was sent", "no"]
REFERENCES = [
    ["the cat sat on a mat", "a cat was sitting on the mat today"],
    ["your refund and its invoice"],
    [" no\n"],
]


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LoadedMetric]]:
    import evaluate

    before = evaluate.config.HF_MODULES_CACHE
    os.environ["HF_HUB_OFFLINE"] = "1"
    yield {name: load_metric(name) for name in ("bleu", "rouge", "exact_match", "term_accuracy")}
    assert before == evaluate.config.HF_MODULES_CACHE


def test_bleu_is_sacrebleus(shipped: dict[str, LoadedMetric]) -> None:
    found = compute("bleu", shipped["bleu"], PREDICTIONS[:2], [REFERENCES[0], REFERENCES[1] * 2])
    streams = [[REFERENCES[0][k], REFERENCES[1][0]] for k in range(2)]
    assert found == {"bleu": pytest.approx(sacrebleu.corpus_bleu(PREDICTIONS[:2], streams).score)}
    alone = compute("bleu", shipped["bleu"], PREDICTIONS[:1], REFERENCES[:1])
    assert alone["bleu"] == pytest.approx(sacrebleu.sentence_bleu(PREDICTIONS[0], REFERENCES[0]).score)


def test_rouge_is_rouge_scores(shipped: dict[str, LoadedMetric]) -> None:
    found = compute("rouge", shipped["rouge"], PREDICTIONS, REFERENCES)
    scorer = rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL"])
    for kind, number in found.items():
        best = [
            max(scorer.score(text, prediction)[kind].fmeasure for text in texts)
            for prediction, texts in zip(PREDICTIONS, REFERENCES, strict=True)
        ]
        assert number == pytest.approx(np.mean(best))
    assert set(found) == {"rouge1", "rouge2", "rougeL"}


def test_exact_match_and_the_example_of_terms(shipped: dict[str, LoadedMetric]) -> None:
    assert compute("exact_match", shipped["exact_match"], PREDICTIONS, REFERENCES)["exact_match"] == 1 / 3
    # The second reference uses two terms, the answer one of them; the others' use none.
    found = compute("term_accuracy", shipped["term_accuracy"], PREDICTIONS, REFERENCES)
    assert found["term_accuracy"] == pytest.approx((1 + 0.5 + 1) / 3)


def test_a_users_own_metric_is_a_file_or_a_folder(tmp_path: Path) -> None:
    text = (SHIPPED / "exact_match.py").read_text(encoding="utf-8").replace("ExactMatch", "Mine")
    file = tmp_path / "mine.py"
    file.write_text(text, encoding="utf-8")
    folder = tmp_path / "ours"
    folder.mkdir()
    (folder / "ours.py").write_text(text.replace("Mine", "Ours"), encoding="utf-8")
    for name in (str(file), str(folder)):
        assert compute(name, load_metric(name), ["a", "b"], [["a"], ["c"]]) == {"exact_match": 0.5}


def test_metrics_that_are_none_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'blue' is neither .*bleu"):
        metric_path("blue")
    broken = tmp_path / "broken.py"
    broken.write_text("import datasets\nraise RuntimeError('mine')\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"broken\.py cannot be loaded"):
        load_metric(str(broken))
    wrong = tmp_path / "wrong.py"
    text = (SHIPPED / "exact_match.py").read_text(encoding="utf-8")
    wrong.write_text(text.replace('return {"exact_match"', 'return {"words": "x", **{}} or {"a"'))
    with pytest.raises(UserError, match="returned no number"):
        compute("wrong", load_metric(str(wrong)), ["a"], [["a"]])


@pytest.mark.parametrize(
    ("answer", "expected", "kind", "right"),
    [
        ("so \\boxed{42}", "42", "number", True),
        ("first \\boxed{1}, no: \\boxed{2}", "2", "number", True),
        ("She has 1,200 apples.", "1200", "number", True),
        ("5 + 3 = 8. The answer is 8.", "8", "number", True),
        ("It is 8 or 9", "8", "number", False),
        ("nothing", "0", "number", False),
        ("\\boxed{\\dfrac{1}{2}}", "\\frac12", "math", True),
        ("\\boxed{0.5}", "\\frac{1}{2}", "math", True),
        ("\\boxed{x = 3}", "3", "math", True),
        ("\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}", "(3,\\frac{\\pi}{2})", "math", True),
        ("\\boxed{(1,2)}", "(12)", "math", False),
        ("\\boxed{10\\%}", "10", "math", True),
        ("\\boxed{\\text{Evelyn}}", "Evelyn", "math", True),
        ("The answer is 7.", "7", "math", True),
        ("seven is what I get, 7", "7", "math", False),
        ("cut off: \\boxed{12", "12", "math", False),
        ("\\boxed{}", "", "math", False),
    ],
)
def test_final_answers(answer: str, expected: str, kind: str, right: bool) -> None:
    assert is_right(answer, expected, kind) is right


@given(st.fractions(), st.integers(0, 3))
def test_equal_values_are_the_same(number: Fraction, style: int) -> None:
    plain = str(number)
    written = [plain, f" {plain}. ", f"${plain}$", f"x = {plain}"][style]
    assert same(written, plain) and value(plain) == number
    assert not same(written, str(number + 1))


@given(st.text(alphabet="{}\\boxed1", max_size=40))
def test_boxes_are_balanced(text: str) -> None:
    found = last_boxed(text + "\\boxed{a{b}c}")
    assert found == "a{b}c"
    inside = last_boxed(text)
    assert inside is None or inside.count("{") == inside.count("}")


HEAD = "import math\n\ndef half(x):\n    '''Half of x.'''\n"
HALF = Check("code", tests="assert half(4) == 2\nassert math.pi > 3", head=HEAD, entry="half")


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ("Here:\n```python\ndef half(x):\n    return x // 2\n```\nDone.", "passed"),
        ("    return x // 2\n", "passed"),  # the body alone completes the prompt
        ("```python\n    return x // 2\n", "passed"),  # a block that was cut off
        ("```python\ndef half(x):\n    return x\n```", "failed"),
        ("I would rather not.", "failed"),
        ("```python\ndef half(x):\n    while True: pass\n```", "timeout"),
        ("```python\ndef half(x):\n    import time; time.sleep(60)\n```", "timeout"),
        ("```python\ndef half(x):\n    bytearray(1 << 33)\n    return 2\n```", "failed"),
    ],
)
def test_programs_are_judged_by_their_tests(answer: str, outcome: str) -> None:
    assert passes(answer, HALF, 1.0).outcome == outcome


def test_programs_that_read_and_print() -> None:
    check = Check("code", cases=(("3 4\n", "7\n"), ("1 1\n", "2\n")))
    good = "```python\nprint(sum(map(int, input().split())))\n```"
    assert passes(good, check, 5).outcome == "passed"
    assert passes(good.replace("sum", "max"), check, 5).outcome == "failed"


def test_programs_are_confined() -> None:
    network = "import socket\nsocket.create_connection(('127.0.0.1', 9), 1)\n"
    assert run(network, "", 5).outcome == "failed"
    assert "KeyError" in run("import os\nos.environ['PYTHONPATH']", "", 5).output
    assert run("import os\nprint(os.listdir())", "", 5).output.count("'") == 6  # program, input, output
    endless = run("while True: print('x' * 1000)", "", 5)
    assert endless.outcome in ("failed", "timeout") and len(endless.output) <= 16 << 20
    started = run("import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'input()'])", "", 5)
    assert started.outcome == "passed"


def test_code_without_a_block_is_all_of_it() -> None:
    assert code_of("x = 1", Check("code")) == "x = 1"
    assert code_of("```\na\n```\n```py\nb\n```", Check("code")) == "b\n"


@settings(max_examples=60)
@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 5), st.integers(1, 12))
def test_repetition_is_a_loop_over_all_pairs(tokens: list[int], n: int, window: int) -> None:
    ends = range(n, len(tokens) + 1)
    hits = [any(tokens[e - n : e] == tokens[b - n : b] for b in ends if e - window <= b < e) for e in ends]
    expected = sum(hits) / len(hits) if hits else None
    assert repetition_rate(tokens, n, window) == expected


def texts(generator: np.random.Generator, prompts: int, tilt: float) -> list[list[list[int]]]:
    shares = np.ones(20) / 20 + tilt * np.array([1, -1] * 10) / 20
    return [[generator.choice(20, 40, p=shares).tolist()] for _ in range(prompts)]


def test_two_samples_of_one_distribution_are_rarely_told_apart() -> None:
    generator = np.random.default_rng(3)
    p = [
        two_sample(texts(generator, 12, 0), texts(generator, 12, 0), 99, simulations=0, seed=s).p_value
        for s in range(60)
    ]
    assert np.mean(np.array(p) <= 0.05) <= 0.15  # 3 of 60 expected; 9 has a chance below 0.5%
    assert 0.3 < np.mean(p) < 0.7


def test_two_samples_of_two_distributions_are_told_apart_and_power_grows() -> None:
    generator = np.random.default_rng(4)
    found = two_sample(texts(generator, 24, 0.0), texts(generator, 24, 0.5), 199, simulations=20)
    assert found.p_value <= 0.01 and found.prompts == 24 and found.answers == 48
    # Damage is by tokens of the same pool: a text of one kind of token only cannot be damaged by it.
    ordered = [[list(range(p, p + 40))] for p in range(24)]
    power = two_sample(ordered, ordered, 99, simulations=20).power
    assert power["0.5"] >= 0.9 > power["0.01"] + 0.5
    assert two_sample(ordered, ordered, 99, simulations=0).p_value == 1.0


def test_a_program_that_ends_before_its_tests_has_not_passed_them() -> None:
    check = Check("code", tests="assert add(1, 2) == 3", head="", entry="add")
    wrong = "```python\nimport sys\ndef add(a, b):\n    return a - b\nsys.exit(0)\n```"
    right = "```python\ndef add(a, b):\n    return a + b\n```"
    assert passes(wrong, check, 10).outcome == "failed"
    assert passes(right, check, 10).outcome == "passed"


def test_a_comma_behind_the_answer_is_none_of_it() -> None:
    assert is_right("So the answer is 18, which is final.", "18", "number")
    assert is_right("It is 1,234.", "1234", "number")
