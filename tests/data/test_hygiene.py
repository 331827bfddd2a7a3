"""What is cleaned away, against plain set arithmetic and hand-made cases; every row left out is counted."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspec.config.schema import Answers, DataConfig
from deepspec.data import build, gather
from deepspec.data.hygiene import NearDuplicates, redact, signature_of
from deepspec.data.store import Store
from deepspec.errors import UserError
from tests.data.test_build_data import conversations, supervised
from tests.data.toy_target import ToyAnswers, toy_facts


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def kept(settings: DataConfig) -> Iterator[str]:
    return (item.messages[0]["content"] for _, item in gather(settings).store.conversations())


def jaccard(one: str, other: str) -> float:
    a, b = ({text[at : at + 5] for at in range(max(1, len(text) - 4))} for text in (one, other))
    return len(a & b) / len(a | b)


TEXT = "the quick brown fox jumps over a lazy dog while seven wizards boil cheap plum jam every other day"
WORDS = re.findall(r"\w+", TEXT)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from(WORDS), min_size=20, max_size=40), st.integers(0, 19), st.booleans())
def test_near_duplicates_are_those_of_high_jaccard_similarity(words: list[str], at: int, whole: bool) -> None:
    one = " ".join(words)
    other = " ".join(reversed(words)) if whole else " ".join([*words[:at], "zzz", *words[at + 1 :]])
    is_near = NearDuplicates(Store(), 0.7)
    assert not is_near(signature_of(one).tobytes().hex())
    exact = jaccard(one, other)
    if exact > 0.87:  # three standard deviations of the estimate from 128 permutations
        assert is_near(signature_of(other).tobytes().hex())
    elif exact < 0.53:
        assert not is_near(signature_of(other).tobytes().hex())
    assert is_near(signature_of(one.upper()).tobytes().hex())


TEXTS = {
    "en": "Could you please explain to me how the heating in this flat can be switched on in the evening?",
    "de": "Könnten Sie mir bitte erklären, wie man die Heizung in dieser Wohnung am Abend einschaltet?",
    "fr": "Pourriez-vous m'expliquer comment allumer le chauffage de cet appartement dans la soirée ?",
    "es": "¿Podría explicarme cómo se enciende la calefacción de este piso por la noche, por favor?",
    "ja": "このアパートの暖房を夜につけるにはどうすればいいのか、どうか詳しく教えていただけませんでしょうか。",
}


def test_prompts_of_other_languages_are_left_out_and_counted_by_language(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [{"prompt": text} for text in [*TEXTS.values(), "Hallo!"]])
    wanted = DataConfig(prompts=path, languages=["en", "ja"])
    assert list(kept(wanted)) == [TEXTS["en"], TEXTS["ja"], "Hallo!"]
    tally = gather(wanted).tally
    assert tally.counts == {f"language {code}, not of data.languages": 1 for code in ("de", "fr", "es")}
    assert tally.notes["language not certain"] == 1
    assert len(list(kept(DataConfig(prompts=path)))) == 6
    with pytest.raises(UserError, match=r"data\.languages: 'english' .* Known are .*\ben\b"):
        gather(DataConfig(prompts=path, languages=["english"]))


def test_near_duplicates_in_a_file_leave_the_first(tmp_path: Path) -> None:
    text = "Please explain in a few sentences how a bicycle stays upright while it is moving forward"
    rows = [{"prompt": text}, {"prompt": text + "?"}, {"prompt": "Something else altogether, about tea"}]
    config = DataConfig(prompts=write(tmp_path / "p.jsonl", rows), near_duplicates=0.8)
    assert list(kept(config)) == [rows[0]["prompt"], rows[2]["prompt"]]
    assert gather(config).tally.counts == {"near-duplicate": 1}
    config.near_duplicates = None
    assert len(list(kept(config))) == 3


def test_what_evaluation_asks_is_not_trained_on_and_the_overlaps_are_listed(tmp_path: Path) -> None:
    asked = "Janet has sixteen ducks. They lay eggs every day, and she eats three for breakfast each morning."
    tests = write(
        tmp_path / "test.jsonl", [{"question": asked, "answer": "13"}, {"question": "What is 2 + 2?"}]
    )
    rows = [
        {"prompt": f"Here is a riddle: {asked.upper()} How many are left?", "response": "a"},
        {"prompt": "What is 2 + 2", "response": "short, but just these words"},
        {"prompt": "Tell me: what is 2 + 2?", "response": "short and inside others"},
        {"prompt": "Solve it.", "response": f"Well: {asked}"},
        *({"prompt": f"question {n}", "response": f"answer {n}"} for n in range(8)),
    ]
    config = DataConfig(
        prompts=write(tmp_path / "p.jsonl", rows),
        decontaminate=[tests],
        decontaminate_words=8,
        answers=Answers.given,
        held_out_prompts=0,
        max_length=256,
    )
    gathered = gather(config)
    assert gathered.tally.counts == {"shares words with an evaluation prompt": 3}
    assert [item["line"] for item in gathered.overlaps] == [1, 2, 4]
    target = toy_facts()
    made = build(
        tmp_path / "data", config, gathered, target, draft_vocab_size=None, generate=ToyAnswers(target)
    )
    listed = [json.loads(line) for line in (tmp_path / "data" / "overlaps.jsonl").read_text().splitlines()]
    assert listed[0]["words"] == "janet has sixteen ducks they lay eggs every"
    assert listed[0]["evaluation"] == "test.jsonl, line 1" and listed[1]["evaluation"] == "test.jsonl, line 2"
    counts = made["counts"]
    assert counts["read"] == 12 == counts["train"]["documents"] + sum(counts["left_out"].values())
    Path(tests).write_text('{"question": "another"}\n')
    again = gather(config)
    assert again.sources != gathered.sources and not again.overlaps


def test_a_missing_evaluation_file_is_an_error(tmp_path: Path) -> None:
    config = DataConfig(
        prompts=write(tmp_path / "p.jsonl", [{"prompt": "a"}]), decontaminate=["nowhere.jsonl"]
    )
    with pytest.raises(UserError, match=r"nowhere.jsonl does not exist"):
        gather(config)


def test_lengths(tmp_path: Path) -> None:
    rows = [{"prompt": "x" * n} for n in (2, 5, 9, 10)]
    config = DataConfig(prompts=write(tmp_path / "p.jsonl", rows), min_characters=5, max_characters=9)
    assert [len(text) for text in kept(config)] == [5, 9]
    assert gather(config).tally.counts == {
        "shorter than data.min_characters": 1,
        "longer than data.max_characters": 1,
    }


SECRETS = [
    ("write to jo.doe+x@mail.example.org now", "write to [EMAIL] now"),
    ("key sk-proj-abcdefghij0123456789ABCD, ok", "key [SECRET], ok"),
    ("AKIAIOSFODNN7EXAMPLE", "[SECRET]"),
    ("ghp_" + "a1B2" * 9, "[SECRET]"),
    ("card 4111 1111 1111 1111.", "card [NUMBER]."),
    ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----", "[SECRET]"),
]


@pytest.mark.parametrize(("text", "expected"), SECRETS, ids=[str(n) for n in range(len(SECRETS))])
def test_secrets_are_replaced(text: str, expected: str) -> None:
    assert redact(text) == (expected, 1)


@pytest.mark.parametrize(
    "text",
    ["order 4111 1111 1111 1112", "a@b", "x = 12345678901234", "task-oriented", "def f(a): return a @ b.T"],
)
def test_other_text_stays(text: str) -> None:
    assert redact(text) == (text, 0)


def test_redaction_is_on_request_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [{"prompt": "I am a@b.org", "response": "Hello a@b.org"}])
    found = gather(DataConfig(prompts=path, redact=True))
    (item,) = (item for _, item in found.store.conversations())
    assert [message["content"] for message in item.messages] == ["I am [EMAIL]", "Hello [EMAIL]"]
    assert found.tally.notes["secrets redacted"] == 2
    assert list(kept(DataConfig(prompts=path))) == ["I am a@b.org"]


def made(tmp_path: Path, rows: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"held_out_prompts": 2, "max_length": 64, "batch_size": 4, **options}
    config = DataConfig(prompts=write(tmp_path / "p.jsonl", rows), **given)
    target = toy_facts()
    return build(
        tmp_path / "data", config, gather(config), target, draft_vocab_size=None, generate=ToyAnswers(target)
    )


def test_ready_made_tokens_are_trained_on_as_they_are_and_never_held_out(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"q {n}", "response": f"a {n}"} for n in range(8)]
    rows += [{"tokens": [9, 8, 7, 6 + n], "loss_mask": [0, 1, 1, 0], "id": f"t{n}"} for n in range(4)]
    rows += [{"tokens": [9, 100_000], "loss_mask": [1, 1], "id": "wrong"}]
    with pytest.raises(UserError, match=r"p.jsonl, line 13: not the target's tokens: 100000"):
        made(tmp_path, rows, answers=Answers.given)
    counts = made(tmp_path, rows[:-1], answers=Answers.given)["counts"]
    found = {row["id"]: row for row in conversations(tmp_path / "data")}
    for n in range(4):
        row = found[f"t{n}"]
        assert (row["tokens"], row["loss_mask"], row["split"]) == ([9, 8, 7, 6 + n], [0, 1, 1, 0], "train")
    assert counts["held_out"]["documents"] == 2 and counts["shapes"] == {
        "`prompt` and `response`": 8,
        "tokens": 4,
    }


def test_several_answers_to_a_prompt_and_only_the_last_one_learned(tmp_path: Path) -> None:
    rows = [{"prompt": f"q {n}"} for n in range(8)]
    with pytest.raises(UserError, match=r"data.samples above 1 needs data.temperature above 0"):
        made(tmp_path, rows, samples=3)
    counts = made(tmp_path, rows, samples=3, temperature=1.0)["counts"]
    found = conversations(tmp_path / "data")
    assert len(found) == 6 * 3 + 2 and counts["train"]["conversations"] == 6
    assert len({supervised(row) for row in found}) > 15


def test_a_note_says_what_the_file_has_that_is_not_used(tmp_path: Path) -> None:
    rows = [{"prompt": f"q {n}", "response": "a b c", "score": n} for n in range(3)]
    rows += [
        {
            "messages": [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": "y z"},
                {"role": "user", "content": "w"},
            ]
        }
    ]
    counts = made(tmp_path, rows, answers=Answers.given, held_out_prompts=0)["counts"]
    assert counts["noted"]["column not used: score"] == 3
    assert counts["noted"]["messages after the last given answer, not learned from"] == 1
    assert counts["train"]["mean_answer_tokens"] == pytest.approx(
        counts["train"]["supervised_tokens"] / 4, abs=0.05
    )
