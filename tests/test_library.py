"""`SpeculativeDecoder`: what transformers' `generate` gives, from a program's side."""

import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import deepspec
from deepspec import SpeculativeDecoder, load_draft
from deepspec.drafts.contract import StaticTree
from deepspec.drafts.options import Eagle3Options
from deepspec.drafts.registry import new_draft
from deepspec.errors import UserError
from deepspec.target import Target
from tests.config.processes import ROOT, environment
from tests.data.toy_tokenizers import chatml
from tests.models import tiny_model


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny target and a random draft of it, on disk."""
    target, draft = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft")
    tokenizer, model = chatml(), copy.deepcopy(tiny_model("llama"))
    torch.manual_seed(0)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    new_draft(Eagle3Options(vocab_size=None), Target(model, None, "tiny"), None).double().save_pretrained(
        draft
    )
    return target, draft


@pytest.fixture(scope="module")
def decoder(places: tuple[Path, Path]) -> SpeculativeDecoder:
    target, draft = places
    return SpeculativeDecoder.from_pretrained(target, draft, dtype="float64", device="cpu", k=3)


def test_greedy_ids_are_those_of_transformers(decoder: SpeculativeDecoder) -> None:
    ids = torch.tensor([[5, 17, 40, 9, 66, 21]])
    expected = decoder.target.model.generate(ids, max_new_tokens=30, do_sample=False)
    assert torch.equal(decoder.generate(ids, max_new_tokens=30), expected)
    assert decoder.results[0].rounds and sum(r.drafted for r in decoder.results[0].rounds) > 0


def test_a_padded_batch_is_that_of_transformers(decoder: SpeculativeDecoder) -> None:
    ids = torch.tensor([[0, 0, 40, 9, 66, 21], [5, 17, 40, 9, 66, 22]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    model = decoder.target.model
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
    assert torch.equal(decoder.generate(ids, attention_mask=mask, max_new_tokens=20), expected)


def test_the_usual_ways_to_call_it(decoder: SpeculativeDecoder) -> None:
    """A tokenizer's output, a generation config, and a length that counts the prompt."""
    model, tokenizer = decoder.target.model, decoder.target.tokenizer
    given = tokenizer("Hello there", return_tensors="pt")
    settings = transformers.GenerationConfig(max_new_tokens=9, do_sample=False, pad_token_id=0)
    expected = model.generate(**given, generation_config=settings)
    assert torch.equal(decoder.generate(**given, generation_config=settings), expected)
    longest = given["input_ids"].shape[1] + 7
    expected = model.generate(**given, max_length=longest, do_sample=False, pad_token_id=3)
    found = decoder.generate(**given, max_length=longest, pad_token_id=3, use_cache=True, num_beams=1)
    assert torch.equal(found, expected)
    for wrong, words in (
        ({"max_length": 2}, "max_length=2 leaves nothing"),
        ({"num_beams": 4}, r"generate\(num_beams=4\) is not done here"),
        ({"prefix_allowed_tokens_fn": len}, "prefix_allowed_tokens_fn"),
        ({"inputs": "a text"}, "either inputs or input_ids"),
    ):
        with pytest.raises(UserError, match=words):
            decoder.generate(**given, **wrong)


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_texts_ends_and_penalties(decoder: SpeculativeDecoder, penalty: float) -> None:
    tokenizer, model = decoder.target.tokenizer, decoder.target.model
    ids = tokenizer("Hello there", return_tensors="pt")["input_ids"]
    free = model.generate(ids, max_new_tokens=16, do_sample=False, repetition_penalty=penalty)
    end = int(free[0, ids.shape[1] + 5])
    settings: dict[str, Any] = {
        "max_new_tokens": 16,
        "do_sample": False,
        "repetition_penalty": penalty,
        "eos_token_id": end,
    }
    expected = model.generate(ids, **settings)[0, ids.shape[1] :]
    found = decoder.generate("Hello there", **settings)
    assert found == tokenizer.decode(expected, skip_special_tokens=True)
    assert decoder.generate(["Hello there"], **settings) == [found]


class Streamer:
    def __init__(self) -> None:
        self.seen: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.seen += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_a_streamer_gets_what_transformers_would_give_it(decoder: SpeculativeDecoder) -> None:
    ids = torch.tensor([[5, 17, 40]])
    theirs, ours = Streamer(), Streamer()
    expected = decoder.target.model.generate(ids, max_new_tokens=12, do_sample=False, streamer=theirs)
    assert torch.equal(decoder.generate(ids, max_new_tokens=12, streamer=ours), expected)
    assert (ours.seen, ours.ended) == (theirs.seen, theirs.ended)
    with pytest.raises(UserError, match="one row; there are 2"):
        decoder.generate(ids.repeat(2, 1), streamer=ours)


def test_sampling_is_the_targets_own(decoder: SpeculativeDecoder) -> None:
    """The first two tokens' joint counts of 600 samples against the model's own probabilities (χ²)."""
    ids, top_k, draws = torch.tensor([[5, 17, 40]]), 3, 600
    expected: dict[tuple[int, int], float] = {}

    def law(text: torch.Tensor) -> list[tuple[int, float]]:
        logits = decoder.target.model(text).logits[0, -1] / 1.5
        best = logits.topk(top_k)
        return list(zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True))

    for first, p in law(ids):
        for second, q in law(torch.cat([ids, torch.tensor([[first]])], 1)):
            expected[first, second] = p * q
    found = decoder.generate(
        ids.repeat(draws, 1),
        max_new_tokens=2,
        do_sample=True,
        temperature=1.5,
        top_k=top_k,
        seed=3,
        eos_token_id=[],
    )
    counts = dict.fromkeys(expected, 0)
    for first, second in found[:, 3:].tolist():
        counts[first, second] += 1
    likely = {key: p for key, p in expected.items() if p * draws >= 5}
    statistic = sum((counts[key] - draws * p) ** 2 / (draws * p) for key, p in likely.items())
    assert len(likely) >= 2 and statistic < 26.1  # χ² with 8 degrees: 0.999


def test_the_same_seed_gives_the_same_text(decoder: SpeculativeDecoder) -> None:
    ids = torch.tensor([[5, 17, 40]])

    def drawn(seed: int | None) -> torch.Tensor:
        return decoder.generate(ids, max_new_tokens=20, do_sample=True, seed=seed, eos_token_id=[])

    assert torch.equal(drawn(1), drawn(1)) and not torch.equal(drawn(1), drawn(2))
    torch.manual_seed(0)
    first, second = drawn(None), drawn(None)
    torch.manual_seed(0)
    assert torch.equal(drawn(None), first) and not torch.equal(first, second)


def test_a_loaded_model_and_a_target_of_other_sizes(places: tuple[Path, Path]) -> None:
    target, draft = places
    model = copy.deepcopy(tiny_model("llama"))
    with pytest.raises(UserError, match=r"vocab_size .*cannot work together"):
        SpeculativeDecoder.from_pretrained(model, draft)
    import transformers

    right = transformers.AutoModelForCausalLM.from_pretrained(target)
    ids = torch.tensor([[5, 17, 40]])
    decoder = SpeculativeDecoder.from_pretrained(right, draft)
    expected = right.generate(ids, max_new_tokens=9, do_sample=False)
    assert torch.equal(decoder.generate(ids, max_new_tokens=9), expected)
    with pytest.raises(UserError, match="no tokenizer"):
        decoder.generate("Hello")


def test_a_target_of_another_tokenizer(places: tuple[Path, Path], tmp_path: Path) -> None:
    """Of the same sizes: only the manifest knows."""
    target, draft = places
    identity = SpeculativeDecoder.from_pretrained(target, draft, device="cpu").target.identity()
    shutil.copytree(draft, tmp_path / "draft")
    manifest = tmp_path / "draft" / "manifest.json"
    manifest.write_text(json.dumps({"target": {**identity, "tokenizer": "another"}}))
    with pytest.raises(UserError, match=r"with tokenizer 'another'.*cannot work together"):
        SpeculativeDecoder.from_pretrained(target, tmp_path / "draft", device="cpu", allow_other_target=True)
    manifest.write_text(json.dumps({"target": {**identity, "weights": "others"}}))
    with pytest.raises(UserError, match="made for other weights"):
        SpeculativeDecoder.from_pretrained(target, tmp_path / "draft", device="cpu")
    SpeculativeDecoder.from_pretrained(target, tmp_path / "draft", device="cpu", allow_other_target=True)


@pytest.mark.parametrize(
    ("inputs", "mask", "words"),
    [
        (torch.tensor([5, 17]), None, r"shape \[2\]"),
        (torch.tensor([[5.0, 17.0]]), None, "whole numbers"),
        ([5, 17], None, "torch.tensor"),
        ([[5, 17]], None, "torch.tensor"),
        (None, None, "either inputs or input_ids"),
        ([], None, "no rows"),
        (torch.empty(0, 3, dtype=torch.long), None, "no rows"),
        (torch.empty(1, 0, dtype=torch.long), None, "empty prompt"),
        ("", None, "empty prompt"),
        (torch.tensor([[5, 17]]), torch.zeros(1, 2), "empty prompt"),
        (torch.tensor([[5, 17]]), torch.ones(1, 3), "both need the same"),
        (torch.tensor([[5, 17]]), torch.ones(2, 2), "both need the same"),
        (torch.full((1, 256), 5), None, "Shorten the prompt"),
        (torch.tensor([[5, 99999]]), None, "another tokenizer"),
    ],
)
def test_inputs_that_are_none_are_said(
    decoder: SpeculativeDecoder, inputs: Any, mask: Any, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        decoder.generate(inputs, attention_mask=mask, max_new_tokens=4)


@pytest.mark.parametrize(
    "settings", [{"k": 1000}, {"tree": StaticTree(tuple(range(-1, 300)))}], ids=["k", "tree"]
)
def test_more_drafted_than_the_context_has_left_changes_nothing(
    places: tuple[Path, Path], decoder: SpeculativeDecoder, settings: Any
) -> None:
    ids = torch.randint(5, 200, (1, 240), generator=torch.Generator().manual_seed(1))
    large = SpeculativeDecoder.from_pretrained(*places, dtype="float64", device="cpu", **settings)
    found = large.generate(ids, max_new_tokens=500, eos_token_id=[])
    model = decoder.target.model
    expected = model.generate(ids, max_new_tokens=16, do_sample=False, eos_token_id=None)
    assert torch.equal(found, expected)


def test_a_format_that_is_none_is_said(places: tuple[Path, Path]) -> None:
    with pytest.raises(UserError, match=r"dtype='half'.*bfloat16"):
        SpeculativeDecoder.from_pretrained(*places, dtype="half")


def test_what_generate_would_do_and_this_does_not_is_refused(decoder: SpeculativeDecoder) -> None:
    given = decoder.target.model.generation_config
    given.num_beams = 4
    try:
        with pytest.raises(UserError, match="num_beams=4"):
            decoder.generate(torch.tensor([[5]]))
    finally:
        given.num_beams = 1


def test_load_draft_is_the_librarys(places: tuple[Path, Path]) -> None:
    assert load_draft(places[1]).config.model_type == "deepspec_eagle3"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        deepspec.nothing  # noqa: B018


def test_importing_the_package_waits_for_nothing() -> None:
    code = "import sys, deepspec; print(sorted({'torch', 'transformers', 'hydra'} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(ROOT), capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n" and (ROOT / "deepspec" / "py.typed").is_file()
