"""`deepspec.generate`: the text as it comes, its colours, and what stands at its end."""

import io
import re
from pathlib import Path

import pytest
import torch

from deepspec import generate
from deepspec.decoding import Engine, Request, Round
from deepspec.errors import UserError
from tests.talking import QUESTIONS, talking_run, talking_target

ESCAPES = re.compile("\x1b\\[[0-9]*m")


def plain_text(question: str, count: int) -> str:
    """The answer's text by `transformers.generate` and the tokenizer's own decoding."""
    target = talking_target()
    ids = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    out = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
    )[0, ids.shape[1] :]
    return target.tokenizer.decode([t for t in out.tolist() if t not in target.eos])


def test_the_shown_text_is_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = talking_run(tmp_path, monkeypatch)
    config.prompt, config.compare = QUESTIONS[1], True
    generate.run(config)
    shown = capsys.readouterr().out
    text = plain_text(QUESTIONS[1], 24)
    assert shown.count(text + "\n") == 2
    assert "\x1b" not in shown  # no terminal
    assert re.search(
        r"τ \d\.\d\d over \d+ rounds, \d+ drafted tokens accepted among 24; [\d.]+ tokens/s", shown
    )
    assert "the same text, token for token" in shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Script:
    """An engine that commits given rounds."""

    def __init__(self, pieces: list[tuple[list[int], int | None]]) -> None:
        self.pieces = pieces

    def stream(self, request):
        for tokens, accepted in self.pieces:
            count = len(tokens)
            yield tokens, None if accepted is None else Round(3, 3, accepted, count, False, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("no_color", [False, True])
def test_accepted_tokens_are_coloured_on_a_terminal(monkeypatch: pytest.MonkeyPatch, no_color: bool) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    target = talking_target()
    words = {text: target.tokenizer(text, add_special_tokens=False)["input_ids"] for text in "abcd"}
    a, b, c, d = (ids[0] for ids in words.values())
    eos = target.eos[0]
    script = Script([([a], None), ([b, c], 1), ([d, eos], 1)])
    out = Terminal()
    answer = generate.watch(script, Request([1], 9, eos=target.eos), target, out)
    expected = "a\x1b[32mb\x1b[0mc\x1b[32md\x1b[0m"
    assert out.getvalue() == ("abcd" if no_color else expected)
    assert answer.tokens == [a, b, c, d, eos]
    assert answer.tau == 2.0


def test_a_character_waits_for_its_last_byte() -> None:
    tokenizer = talking_target().tokenizer
    text = "héllo — 你好\nnext 🙂 line\n\nend"
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(tokens) > len(text)  # some characters take several tokens
    stream = generate.TextStream(tokenizer.decode)
    pieces = [stream.add(token) for token in tokens]
    assert "".join(pieces) + stream.rest() == text
    assert not any("\ufffd" in piece for piece in pieces)
    cut = generate.TextStream(tokenizer.decode)
    shown = "".join(cut.add(token) for token in tokenizer("🙂", add_special_tokens=False)["input_ids"][:-1])
    assert shown == "" and cut.rest() == "\ufffd"


def test_another_text_is_not_called_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = talking_target()
    request = Request(target.tokenizer("Hello", add_special_tokens=False)["input_ids"], 8, eos=target.eos)
    right = Engine(target).generate([request])[0].tokens
    wrong = [*right[:3], (right[3] + 1) % target.vocab_size, *right[4:]]
    said = generate.comparison(generate.Answer(wrong), generate.Answer(right), request, target, 3)
    assert "part at token 4 and rounding is not the reason" in said


@pytest.mark.parametrize("prompt", [None, "  "])
def test_no_prompt_is_said_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompt: str | None
) -> None:
    config = talking_run(tmp_path, monkeypatch)
    config.prompt = prompt
    monkeypatch.setattr(generate, "find_draft", None)
    with pytest.raises(UserError, match="give a prompt"):
        generate.run(config)


def test_no_draft_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = talking_run(tmp_path, monkeypatch)
    config.out, config.prompt = str(tmp_path / "empty"), "Hello?"
    with pytest.raises(UserError, match=r"-m deepspec\.train"):
        generate.run(config)
