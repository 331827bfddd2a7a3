"""The stage itself on tiny random targets of three families: no code of ours knows which."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import load_from_disk

from deepspec import prepare
from deepspec.config.schema import Answers, Config, DataConfig, Dtype, TargetConfig
from deepspec.data import load_draft_vocab, load_prompts, load_rows
from deepspec.drafts.options import Eagle3Options
from deepspec.errors import UserError
from tests.data.toy_tokenizers import chatml, gemma, llama3

COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
FAMILIES: dict[str, tuple[str, Any, str]] = {
    "qwen3": ("Qwen3Config", chatml, "<|im_end|>"),
    "llama": ("LlamaConfig", llama3, "<|eot_id|>"),
    "gemma": ("Gemma2Config", gemma, "<end_of_turn>"),
}


def save_target(folder: Path, family: str) -> Path:
    """A random model whose generation config names the end of a turn beside EOS, as real ones do."""
    name, make_tokenizer, end = FAMILIES[family]
    tokenizer = make_tokenizer()
    ends = tokenizer.convert_tokens_to_ids([tokenizer.eos_token, end])
    config = getattr(transformers, name)(**COMMON, vocab_size=len(tokenizer) + 4, eos_token_id=ends[0])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = ends
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def configuration(tmp_path: Path, target: Path, **data: Any) -> Config:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"Count from {number} to ten.\n" for number in range(14)))
    settings: dict[str, Any] = {
        "prompts": str(prompts),
        "held_out_prompts": 3,
        "max_length": 96,
        "max_new_tokens": 8,
        "batch_size": 4,
        **data,
    }
    return Config(
        name="tiny",
        target=TargetConfig(name="tiny", path=str(target), dtype=Dtype.float32),
        draft=Eagle3Options(vocab_size=300),
        data=DataConfig(**settings),
        out=str(tmp_path / "run"),
    )


@pytest.mark.parametrize("family", list(FAMILIES))
def test_answers_are_the_targets_own_greedy_text(tmp_path: Path, family: str) -> None:
    target = save_target(tmp_path / "target", family)
    folder = prepare.run(configuration(tmp_path, target))
    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    rows = list(load_from_disk(str(folder / "conversations")))
    assert len(rows) == 14
    for row in rows:
        question = json.loads(row["messages"])[:1]
        prompt = tokenizer.apply_chat_template(
            question, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        expected = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0].tolist()
        start = prompt["input_ids"].shape[1]
        assert row["tokens"] == expected
        assert row["loss_mask"] == [0] * start + [1] * (len(expected) - start)
    assert len(load_prompts(folder)) == 3 and len(load_rows(folder, "train")) > 0
    vocab = load_draft_vocab(folder)
    assert vocab is not None and len(vocab) == 300


def test_sampled_answers_repeat_with_the_seed(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target", "qwen3")

    def tokens(out: str, **data: Any) -> list[list[int]]:
        config = configuration(tmp_path, target, temperature=1.0, **data)
        config.out = str(tmp_path / out)
        return [row["tokens"] for row in load_from_disk(str(prepare.run(config) / "conversations"))]

    assert tokens("a") == tokens("b")
    assert tokens("a") != tokens("c", seed=1)


def test_a_measured_number_format_is_kept_for_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = save_target(tmp_path / "target", "qwen3")
    config = configuration(tmp_path, target)
    config.target.dtype = Dtype.auto
    measured = iter([torch.float32, torch.bfloat16])
    monkeypatch.setattr("deepspec.target.load.probe_dtype", lambda *_: next(measured))
    first = json.loads((prepare.run(config) / "manifest.json").read_text())
    again = json.loads((prepare.run(config) / "manifest.json").read_text())
    assert first == again and next(measured) == torch.bfloat16


def test_a_bad_file_is_known_before_the_target_is_loaded(tmp_path: Path) -> None:
    config = configuration(tmp_path, tmp_path / "no target here", answers=Answers.given)
    Path(config.data.prompts or "").write_bytes(b"\xff\n")
    with pytest.raises(UserError, match=r"prompts\.txt, line 1: not UTF-8"):
        prepare.run(config)
    assert not list(tmp_path.rglob("*.work"))


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        ("draft", "capture_layers", [0, 7], "Layer 7 does not exist"),
        ("train", "loss", {"soft_cd": 1.0}, r"train\.loss\.soft_cd: .* soft_ce"),
        ("decode", "max_new_tokens", 256, r"decode\.max_new_tokens=256 leaves no room"),
    ],
)
def test_what_later_stages_ask_of_the_target_is_checked_before_answers_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str, key: str, value: Any, words: str
) -> None:
    config = configuration(tmp_path, save_target(tmp_path / "target", "llama"))
    setattr(getattr(config, section), key, value)
    monkeypatch.setattr(prepare, "build", None)  # nothing may be built
    work = Path(config.out) / ".data.work"
    with pytest.raises(UserError, match=words):
        prepare.run(config)
    assert not work.exists()
    work.mkdir()
    (work / "0123.json").write_text("[[3]]")  # answers of a run that was stopped
    with pytest.raises(UserError, match=words):
        prepare.run(config)
    assert {path.name for path in work.iterdir()} == {"0123.json", "target.json"}


def test_a_target_without_features_is_refused_before_answers_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration(tmp_path, save_target(tmp_path / "target", "llama"))
    lacks = {"chain": "", "tree": "", "ragged": "", "features": "its logits differ"}
    monkeypatch.setattr("deepspec.target.probe.probe", lambda _: lacks)
    monkeypatch.setattr(prepare, "build", None)
    with pytest.raises(UserError, match="cannot be used for features: its logits differ"):
        prepare.run(config)
