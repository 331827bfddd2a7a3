"""The whole of preparing data on a toy target: what is in the artifact, and what a kill leaves."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import load_from_disk

from deepspec.artifacts import fingerprint
from deepspec.config.schema import Answers, DataConfig, OnError
from deepspec.data import TargetFacts, build, gather, load_draft_vocab, load_prompts, load_rows
from deepspec.errors import UserError
from tests.data.toy_target import END, ToyAnswers, toy_facts


def prompts_file(folder: Path, count: int = 40, answered: int = 40) -> Path:
    rows: list[dict[str, Any]] = []
    for index in range(count):
        row: dict[str, Any] = {
            "prompt": f"question {index}",
            "category": f"c{index % 3}",
            "group": f"g{index // 2}",
        }
        if index < answered:
            row["response"] = f"given answer {index}"
        rows.append(row)
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make(
    folder: Path,
    toy: ToyAnswers | None = None,
    draft_vocab_size: int = 300,
    overwrite: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    facts = toy_facts()
    given: dict[str, Any] = {"held_out_prompts": 6, "max_length": 64, "batch_size": 4, **settings}
    config = DataConfig(**given)
    return build(
        folder,
        config,
        gather(config),
        facts,
        draft_vocab_size=draft_vocab_size,
        generate=toy or ToyAnswers(facts),
        say=lambda _: None,
        overwrite=overwrite,
    )


def conversations(folder: Path) -> list[dict[str, Any]]:
    return list(load_from_disk(str(folder / "conversations")))


def supervised(row: dict[str, Any]) -> str:
    ids = [token for token, mask in zip(row["tokens"], row["loss_mask"], strict=True) if mask]
    return str(toy_facts().tokenizer.decode(ids))


def test_regenerated_rows_are_the_prompts_tokens_and_the_generated_ones(tmp_path: Path) -> None:
    answers = ToyAnswers(toy_facts())
    make(tmp_path / "data", answers, prompts=str(prompts_file(tmp_path)))
    expected = {}
    for prompt, seed in zip((p for batch in answers.batches for p in batch), answers.seeds, strict=True):
        answer = answers.answer(prompt, seed)
        expected[tuple(prompt + answer)] = [0] * len(prompt) + [1] * len(answer)
    rows = conversations(tmp_path / "data")
    assert len(rows) == len({tuple(row["tokens"]) for row in rows})
    for row in rows:
        assert expected[tuple(row["tokens"])] == row["loss_mask"]
        assert row["origin"] == "regenerated"
        assert row["truncated"] == (row["tokens"][-1] != toy_facts().eos[0])
        assert json.loads(row["messages"])[1]["content"] == supervised(row).removesuffix(END)
    assert {row["truncated"] for row in rows} == {True, False}
    assert all(len(batch) <= 4 for batch in answers.batches)


def test_packed_rows_hold_the_conversations_of_their_split(tmp_path: Path) -> None:
    manifest = make(tmp_path / "data", prompts=str(prompts_file(tmp_path)))
    rows = conversations(tmp_path / "data")
    for split in ("train", "held_out"):
        packed = load_rows(tmp_path / "data", split)
        found = []
        for row in packed:
            assert row["tokens"].dtype == torch.int64 and row["tokens"].shape == (64,)
            for number in range(int(row["documents"].max()) + 1):
                own = row["documents"] == number
                found.append((row["tokens"][own].tolist(), row["loss_mask"][own].tolist()))
                assert row["positions"][own].tolist() == list(range(int(own.sum())))
        own_rows = [(row["tokens"], row["loss_mask"]) for row in rows if row["split"] == split]
        assert sorted(found) == sorted(own_rows)
        counts = manifest["counts"][split]
        assert counts["documents"] == len(own_rows) and counts["rows"] == len(packed)
        assert counts["supervised_tokens"] == sum(sum(mask) for _, mask in own_rows)


def test_held_out_prompts_share_no_group_with_train_and_are_spread_over_categories(tmp_path: Path) -> None:
    manifest = make(tmp_path / "data", prompts=str(prompts_file(tmp_path)), answers=Answers.given)
    rows = conversations(tmp_path / "data")
    held = [row for row in rows if row["split"] == "held_out"]
    train = [row for row in rows if row["split"] == "train"]
    assert Counter(row["category"] for row in held) == {"c0": 2, "c1": 2, "c2": 2}
    assert {row["origin"] for row in held} == {"regenerated"} and {row["origin"] for row in train} == {
        "given"
    }
    assert not {row["group"] for row in held} & {row["group"] for row in train}
    left = manifest["counts"]["left_out"].get("shares its group with a held-out prompt", 0)
    assert len(held) + len(train) + left == 40
    prompts = load_prompts(tmp_path / "data")
    assert sorted(prompt["id"] for prompt in prompts) == sorted(row["id"] for row in held)
    tokenizer = toy_facts().tokenizer
    for prompt in prompts:
        assert prompt["tokens"] == tokenizer.apply_chat_template(
            prompt["messages"], add_generation_prompt=True, return_dict=False
        )


def test_mixed_answers(tmp_path: Path) -> None:
    path = prompts_file(tmp_path, count=40, answered=25)
    manifest = make(tmp_path / "data", prompts=str(path), answers=Answers.mixed, regenerated_prompts=9)
    train = [row for row in conversations(tmp_path / "data") if row["split"] == "train"]
    anew = [row for row in train if row["origin"] == "regenerated"]
    assert len(anew) == 9
    numbers = [int(json.loads(row["messages"])[0]["content"].split()[1]) for row in anew]
    assert all(number >= 25 for number in numbers)  # those without a given answer come first
    for row in train:
        if row["origin"] == "given":
            index = json.loads(row["messages"])[0]["content"].split()[1]
            assert supervised(row) == f"given answer {index}{END}"
    left = manifest["counts"]["left_out"]
    assert left["no given answer, and not regenerated"] > 0
    assert len(train) + 6 + sum(left.values()) == 40


def test_several_turns_are_answered_one_after_the_other(tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    talks = [
        {
            "messages": [
                {"role": role, "content": f"{role} {index} {turn}"} for turn in range(2) for role in ROLES
            ]
        }
        for index in range(12)
    ]
    path.write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    answers = ToyAnswers(toy_facts())
    make(tmp_path / "data", answers, prompts=str(path), max_length=256, held_out_prompts=2)
    tokenizer = toy_facts().tokenizer
    told = {tuple(prompt) for batch in answers.batches for prompt in batch}
    by_id: dict[str, list[dict[str, Any]]] = {}
    for row in conversations(tmp_path / "data"):
        by_id.setdefault(row["id"], []).append(row)
    lengths = set()
    for rows in by_id.values():
        messages = json.loads(rows[0]["messages"])
        lengths.add(len(messages))
        assert messages[0]["content"].startswith("user") and "assistant" not in messages[1]["content"]
        for end in range(1, len(messages), 2):
            prompt = tokenizer.apply_chat_template(
                messages[:end], add_generation_prompt=True, return_dict=False
            )
            assert tuple(prompt) in told
        texts = [text for row in rows for text in supervised(row).split(END) if text]
        assert texts == [message["content"] for message in messages[1::2]]
    assert 4 in lengths


ROLES = ("user", "assistant")


def test_the_same_command_again_does_nothing(tmp_path: Path) -> None:
    path = str(prompts_file(tmp_path))
    first = make(tmp_path / "data", prompts=path)
    idle = ToyAnswers(toy_facts())
    assert make(tmp_path / "data", idle, prompts=path)["fingerprint"] == first["fingerprint"]
    assert idle.batches == []


def test_data_of_other_settings_stay_unless_asked(tmp_path: Path) -> None:
    path, folder = str(prompts_file(tmp_path)), tmp_path / "data"
    first = make(folder, prompts=path)
    before, idle = tree(folder), ToyAnswers(toy_facts())
    with pytest.raises(UserError, match=rf"{folder} was .*data\.seed was 0, is 1.*out=.*overwrite=true"):
        make(folder, idle, prompts=path, seed=1)
    assert tree(folder) == before and idle.batches == []
    other = make(folder, prompts=path, seed=1, overwrite=True)
    assert other["fingerprint"] != first["fingerprint"]
    Path(path).write_text(Path(path).read_text() + '{"prompt": "one more"}\n')
    with pytest.raises(UserError, match=r"sources\.prompts was"):
        make(folder, prompts=path, seed=1)
    assert make(folder, prompts=path, seed=1, overwrite=True)["fingerprint"] != other["fingerprint"]


def test_complete_data_with_a_damaged_file_are_not_complete(tmp_path: Path) -> None:
    path = str(prompts_file(tmp_path))
    make(tmp_path / "data", prompts=path)
    rows = tmp_path / "data" / "held_out" / "data-00000-of-00001.arrow"
    rows.write_bytes(rows.read_bytes()[:-8] + b"\0" * 8)
    with pytest.raises(
        UserError, match=rf"{rows} is damaged.*Remove {tmp_path / 'data'} .*deepspec\.prepare"
    ):
        make(tmp_path / "data", prompts=path)


def test_another_draft_vocabulary_keeps_the_answers(tmp_path: Path) -> None:
    path, folder = str(prompts_file(tmp_path)), tmp_path / "data"
    make(folder, prompts=path)
    before, idle = conversations(folder), ToyAnswers(toy_facts())
    with pytest.raises(UserError, match=r"draft\.vocab_size was 300, is 280"):
        make(folder, idle, prompts=path, draft_vocab_size=280)
    make(folder, idle, prompts=path, draft_vocab_size=280, overwrite=True)
    vocab = load_draft_vocab(folder)
    assert vocab is not None and len(vocab) == 280
    assert conversations(folder) == before and idle.batches == []
    make(folder, idle, prompts=path, temperature=1.0, overwrite=True)
    assert idle.batches


def test_another_name_of_the_same_target_makes_nothing_anew(tmp_path: Path) -> None:
    path = str(prompts_file(tmp_path))
    config = DataConfig(prompts=path, held_out_prompts=6, max_length=64, batch_size=4)

    def made(folder: str, facts: TargetFacts, toy: ToyAnswers, most: int | None = None) -> dict[str, Any]:
        def generate(prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
            if len(toy.batches) == most:
                raise KeyboardInterrupt
            return toy(prompts, seeds)

        return build(
            tmp_path / folder,
            config,
            gather(config),
            facts,
            draft_vocab_size=300,
            generate=generate,
            overwrite=True,
        )

    first, idle = toy_facts(), ToyAnswers(toy_facts())
    moved = replace(first, identity={**first.identity, "name": "/elsewhere/toy"})
    made("data", first, ToyAnswers(first))
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_text())
    assert manifest["inputs"]["target"]["name"] == "toy"
    assert made("data", moved, idle) == manifest and idle.batches == []
    # as written when the name was still part of what is hashed
    old = {**manifest, "fingerprint": fingerprint(manifest["inputs"])}
    (tmp_path / "data" / "manifest.json").write_text(json.dumps(old))
    assert made("data", moved, idle) == old and idle.batches == []
    with pytest.raises(KeyboardInterrupt):
        made("stopped", first, ToyAnswers(first), most=4)
    made("stopped", moved, idle)
    whole = ToyAnswers(first)
    made("whole", first, whole)
    assert len(idle.batches) == len(whole.batches) - 4
    other = replace(first, identity={**first.identity, "weights": "1" * 64})
    made("data", other, idle)
    assert len(idle.batches) == 2 * len(whole.batches) - 4


def test_order_of_the_file_changes_no_row(tmp_path: Path) -> None:
    path = prompts_file(tmp_path)
    make(tmp_path / "a", prompts=str(path))
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    make(tmp_path / "b", prompts=str(path))
    columns = ("id", "split", "tokens", "loss_mask")
    one, two = ([[row[key] for key in columns] for row in conversations(tmp_path / name)] for name in "ab")
    assert sorted(one) == sorted(two)


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs POSIX signals")
def test_a_killed_run_goes_on_where_it_stopped_and_ends_in_the_same_bytes(tmp_path: Path) -> None:
    prompts = prompts_file(tmp_path)
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}

    def run(folder: str, kill_at: str) -> subprocess.CompletedProcess[str]:
        arguments = [str(tmp_path / folder), str(prompts), kill_at]
        command = [sys.executable, "-m", "tests.data.toy_target", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    toy = ToyAnswers(toy_facts())
    make(tmp_path / "whole", toy, prompts=str(prompts), max_length=128)
    killed = run("killed", "3")
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed").exists()
    again = run("killed", "never")
    assert int(again.stdout.split("batches made:")[1]) == len(toy.batches) - 3
    assert tree(tmp_path / "killed") == tree(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed", "prompts.jsonl", "whole"]


def test_bad_rows_are_counted_into_the_artifact(tmp_path: Path) -> None:
    path = prompts_file(tmp_path)
    path.write_text(path.read_text() + '{"prompt": \n' + json.dumps({"prompt": "long " * 200}) + "\n")
    path.write_text(
        path.read_text() + json.dumps({"prompt": "question 1", "response": "given answer 1"}) + "\n"
    )
    with pytest.raises(UserError, match="line 41: broken JSON"):
        make(tmp_path / "data", prompts=str(path))
    manifest = make(tmp_path / "data", prompts=str(path), on_error=OnError.skip, answers=Answers.given)
    left = manifest["counts"]["left_out"]
    assert (left["broken JSON"], left["prompt longer than data.max_length"], left["duplicate"]) == (1, 1, 1)
    rejects = [json.loads(line) for line in (tmp_path / "data" / "rejects.jsonl").read_text().splitlines()]
    assert {(row["line"], row["reason"].split(":")[0]) for row in rejects} >= {
        (41, "broken JSON"),
        (42, "prompt longer than data.max_length"),
        (43, "duplicate"),
    }


def test_draft_vocabulary_of_the_artifact(tmp_path: Path) -> None:
    manifest = make(tmp_path / "data", prompts=str(prompts_file(tmp_path)))
    vocab = load_draft_vocab(tmp_path / "data")
    assert vocab is not None and vocab.tolist() == sorted(set(vocab.tolist())) and len(vocab) == 300
    train = [row for row in conversations(tmp_path / "data") if row["split"] == "train"]
    used = {t for row in train for t, mask in zip(row["tokens"], row["loss_mask"], strict=True) if mask}
    assert used <= set(vocab.tolist()) and manifest["draft_vocab"]["coverage_train"] == 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompts": None}, "There are no prompts"),
        ({"max_length": 1000}, "longer than the 512 positions"),
        ({"answers": Answers.mixed}, "needs data.regenerated_prompts"),
        (
            {"max_length": 16, "system": "a long system prompt that fills the row"},
            "No prompt is left after filtering",
        ),
    ],
)
def test_settings_that_cannot_work_stop_before_anything_is_generated(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    answers = ToyAnswers(toy_facts())
    with pytest.raises(UserError, match=message):
        make(tmp_path / "data", answers, **{"prompts": str(prompts_file(tmp_path)), **settings})
    assert answers.batches == [] and not (tmp_path / "data").exists()


def test_mixed_answers_with_none_regenerated_are_the_given_ones(tmp_path: Path) -> None:
    path = str(prompts_file(tmp_path))
    make(tmp_path / "mixed", prompts=path, answers=Answers.mixed, regenerated_prompts=0)
    make(tmp_path / "given", prompts=path, answers=Answers.given)
    assert conversations(tmp_path / "mixed") == conversations(tmp_path / "given")


def test_a_draft_vocabulary_that_is_too_small_stops_before_anything_is_generated(tmp_path: Path) -> None:
    toy = ToyAnswers(toy_facts())
    config = DataConfig(prompts=str(prompts_file(tmp_path)), max_length=64)
    with pytest.raises(UserError, match=r"draft.vocab_size=200 is too small"):
        build(tmp_path / "data", config, gather(config), toy_facts(), draft_vocab_size=200, generate=toy)
    assert toy.batches == []


def test_prompts_of_one_group_or_too_few_cannot_be_split(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"q{i}", "group": "one"}) + "\n" for i in range(8)))
    with pytest.raises(UserError, match="none is left for training"):
        make(tmp_path / "data", prompts=str(path))
    path.write_text('{"prompt": "only"}\n')
    with pytest.raises(UserError, match="too few to hold any out"):
        make(tmp_path / "data", prompts=str(path))
    assert make(tmp_path / "data", prompts=str(path), held_out_prompts=0)["counts"]["train"]["documents"] == 1
    assert len(load_rows(tmp_path / "data", "held_out")) == 0


def test_answers_of_one_token_leave_nothing_to_learn(tmp_path: Path) -> None:
    facts = toy_facts()
    settings = DataConfig(prompts=str(prompts_file(tmp_path)), held_out_prompts=0, max_length=64)
    with pytest.raises(
        UserError, match=r"No prompt leaves a token to learn from.*40 × answer of fewer than two"
    ):
        build(
            tmp_path / "data",
            settings,
            gather(settings),
            facts,
            draft_vocab_size=None,
            generate=lambda prompts, seeds: [[facts.eos[0]] for _ in prompts],
        )


def test_a_damaged_or_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a complete folder of packed rows"):
        load_rows(tmp_path, "train")
    with pytest.raises(UserError, match="is missing"):
        load_prompts(tmp_path)
