"""From a configuration to a loaded target, with one clear sentence for everything that can go wrong."""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from deepspec.artifacts import MANIFEST
from deepspec.config.schema import DeviceMap, Dtype, TargetConfig
from deepspec.errors import UserError
from deepspec.target.builtin import builtin_folder
from deepspec.target.dtype import probe_dtype
from deepspec.target.edges import Edges, shallow
from deepspec.target.model import Target
from deepspec.target.outline import Outline
from deepspec.target.placement import places
from deepspec.target.shards import fewer_files

BUILTIN = "builtin:"
HUB_RETRIES = "huggingface_hub.utils._http"  # the logger that prints each of them
Made = TypeVar("Made")
CONFIGURATION = ("config.json", "generation_config.json")


def load_target(config: TargetConfig, layers: Sequence[int] = ()) -> Target:
    """Load weights and tokenizer. `layers` are checked to exist.

    Errors: an unreachable hub name, a folder without a model, remote code that was not asked for, a family
    without decoder layers.
    """
    model, tokenizer, _, path = _loaded(config)
    target = _made(
        config, lambda: Target(model, tokenizer, config.name, _identity(model, tokenizer, config, path))
    )
    target.check_layers(layers)
    return target


def load_outline(config: TargetConfig, dtype: Callable[[Any], torch.dtype]) -> Outline:
    """What configuration and tokenizer say of the target, without its weights, whatever its size.

    dtype: the model's configuration → the number format it would run in.

    Errors: as `load_target`.
    """

    def load() -> Outline:
        path, common = _path(config), _where(config)
        with _one_line_for_the_hub(path):
            model_config = AutoConfig.from_pretrained(path, **common)
            tokenizer = _tokenizer(path, config, common)
        _check_vocabulary(config, tokenizer, model_config)
        return Outline(model_config, tokenizer, config.name, dtype(model_config), config.trust_remote_code)

    return _made(config, load)


def load_edges(config: TargetConfig, first_layers: Callable[[int], int] = lambda count: 1) -> Edges:
    """The target without its decoder layers: embedding, final norm and head, all that a draft trained on stored
    features needs of it.

    first_layers: how many layers there are → how many of the first ones are loaded, until `release_layers`; a fresh
    draft may start from them.

    Errors: as `load_target`.
    """
    model, tokenizer, model_config, path = _loaded(config, first_layers)
    identity = _identity(model, tokenizer, config, path)
    full = model_config.get_text_config(decoder=True)
    identity["num_layers"] = full.num_hidden_layers
    return _made(config, lambda: Edges(model, tokenizer, config.name, identity, full))


def _loaded(
    config: TargetConfig, first_layers: Callable[[int], int] | None = None
) -> tuple[PreTrainedModel, Any, Any, str]:
    """Model, tokenizer, the whole model's configuration, and where they lie."""
    transformers.utils.logging.disable_progress_bar()  # a local load takes seconds; the stages have their own bars
    path = _path(config)
    device = _device(config.device)
    common = _where(config)

    def load() -> tuple[PreTrainedModel, Any, Any, str]:
        with _one_line_for_the_hub(path):
            model_config = AutoConfig.from_pretrained(path, **common)
            tokenizer = _tokenizer(path, config, common)
            _check_vocabulary(config, tokenizer, model_config)
            dtype = resolve_dtype(config.dtype, device, model_config)
            if first_layers is not None:
                count = first_layers(model_config.get_text_config(decoder=True).num_hidden_layers)
                few = max(count, 1)
                with _silent(), fewer_files(path, few, common) as files:  # silent about the tensors left out
                    model = _model(files, config, dtype, common | {"config": shallow(model_config, few)})
            elif config.device_map is not None:
                return _spread(path, config, model_config, dtype, common), tokenizer, model_config, path
            else:
                model = _model(path, config, dtype, common)
        model.to(device)  # type: ignore[arg-type]
        model.name_or_path = path  # whichever of its files it was made of
        return model, tokenizer, model_config, path

    return _made(config, load)


def _tokenizer(path: str, config: TargetConfig, common: dict[str, Any]) -> Any:
    """The target's, with `target.chat_template` in place of its own template."""
    tokenizer = AutoTokenizer.from_pretrained(path, **common)
    if config.chat_template is not None:
        try:
            tokenizer.chat_template = Path(config.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"target.chat_template={config.chat_template} cannot be read ({error}): name a file with a Jinja chat "
                "template, or leave it out for the tokenizer's own."
            ) from error
    return tokenizer


def _where(config: TargetConfig) -> dict[str, Any]:
    """What the library's loaders are told beside the path."""
    return {"revision": config.revision, "trust_remote_code": config.trust_remote_code}


def _spread(
    path: str, config: TargetConfig, model_config: Any, dtype: torch.dtype, common: dict[str, Any]
) -> PreTrainedModel:
    """The model over several devices, memory and disk (`target.device_map`)."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(
            "target.device_map spreads one target over all devices of this machine, for one process: start it without "
            "a launcher, or leave target.device_map out so that each process has a device of its own."
        )
    balanced = config.device_map is DeviceMap.balanced
    found = places(
        model_config, dtype, config.max_memory, balanced=balanced, remote_code=config.trust_remote_code
    )
    with _silent():  # about parameters that lie elsewhere, which was asked for
        return _model(
            path, config, dtype, common | {"device_map": found, "offload_folder": config.offload_folder}
        )


def _made(config: TargetConfig, make: Callable[[], Made]) -> Made:
    try:
        return make()
    except UserError:
        raise
    except Exception as error:  # a checkpoint's own code, or a family nobody has tried, may raise anything
        raise UserError(_explain(config, error)) from error


@contextmanager
def _silent() -> Iterator[None]:
    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.utils.logging.set_verbosity(before)


@contextmanager
def _one_line_for_the_hub(path: str) -> Iterator[None]:
    """What is waited for, said once; the hub's library would print every retry, twice."""
    if Path(path).is_dir():
        yield
        return
    if os.environ.get("RANK", "0") == "0":
        print(f"Asking the Hugging Face hub for {path} ...", flush=True)
    logger = logging.getLogger(HUB_RETRIES)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _check_vocabulary(config: TargetConfig, tokenizer: Any, model_config: Any) -> None:
    """`UserError` if the tokenizer makes ids of text for which the model has no embedding.

    Special tokens may lie outside: some families' tokenizers know one of a larger sibling, and no text has it.
    """
    rows = getattr(model_config.get_text_config(decoder=True), "vocab_size", None)
    special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    highest = max((id for id in tokenizer.get_vocab().values() if id not in special), default=-1)
    if rows is not None and highest >= rows:
        raise UserError(
            f"The target {config.path}: its tokenizer has ids up to {highest}, its model embeds {rows} tokens "
            f"(0 to {rows - 1}). They do not belong together: give a folder whose tokenizer is the model's own."
        )


def resolve_dtype(dtype: Dtype, device: torch.device, model_config: Any = None) -> torch.dtype:
    """The torch dtype of a configured one; `auto` is measured with the model's own sizes."""
    if dtype is not Dtype.auto:
        return getattr(torch, dtype.value)
    text = model_config.get_text_config(decoder=True) if model_config is not None else None
    hidden = getattr(text, "hidden_size", 576)
    return probe_dtype(device, hidden, getattr(text, "intermediate_size", None) or 4 * hidden)


def _device(name: str) -> torch.device:
    """The torch device of `target.device`, tried with one number."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        there = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
        raise UserError(
            f"target.device={name} cannot be used on this machine. It is auto or one of {', '.join(there)}."
        ) from error
    return device


def _path(config: TargetConfig) -> str:
    if config.path.startswith(BUILTIN):
        return str(builtin_folder(config.path.removeprefix(BUILTIN)))
    local = Path(config.path).expanduser()
    if config.path.startswith((".", "/", "~")) and not (local / "config.json").is_file():
        raise UserError(
            f"target.path: {config.path} holds no model (no config.json). Give a model folder or a hub name."
        )
    return str(local) if local.is_dir() else config.path


def _model(path: str, config: TargetConfig, dtype: torch.dtype, common: dict[str, Any]) -> PreTrainedModel:
    # sdpa is exact with our masks and faster; some families have only eager and say so with a ValueError.
    wanted = ["sdpa", "eager"] if config.attention == "auto" else [config.attention]
    for attention in wanted[:-1]:
        try:
            return AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, attn_implementation=attention, **common
            )
        except ValueError as error:
            if "attention" not in str(error).lower():
                raise
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=wanted[-1], **common)


def _explain(config: TargetConfig, error: Exception) -> str:
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        return (
            f"The target {config.path} brings its own Python code. If you trust it, run again with "
            "target.trust_remote_code=true (it will be recorded in every manifest)."
        )
    if "couldn't connect to" in text:
        return (
            f"The target {config.path!r} is no folder here, and the Hugging Face hub cannot be reached. Check the name "
            "and the network, or give a local model folder (target.path=./FOLDER)."
        )
    reason = text[:300] or type(error).__name__
    return f"The target {config.path!r} could not be loaded: {reason} (target.path is a hub name or a local folder.)"


def _identity(model: PreTrainedModel, tokenizer: Any, config: TargetConfig, path: str) -> dict[str, Any]:
    """What decides this target's behaviour, for manifests and fingerprints."""
    text = model.config.get_text_config(decoder=True)
    words = {"vocab": sorted(tokenizer.get_vocab().items()), "template": tokenizer.chat_template}
    return {
        "name": config.name,
        "weights": getattr(model.config, "_commit_hash", None) or _weights_of(Path(path)),
        "architecture": type(model).__name__,
        "hidden_size": text.hidden_size,
        "num_layers": text.num_hidden_layers,
        "vocab_size": model.get_output_embeddings().weight.shape[0],
        "tokenizer": hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()[:16],
        "dtype": str(model.dtype).removeprefix("torch."),
        "trust_remote_code": config.trust_remote_code,
    }


def _weights_of(folder: Path) -> str:
    """A converted target's source checksum, else sha256 over a local folder's weights and configuration.

    Files in name order; the configuration, because another rope or end token gives other answers. A
    conversion's own files may differ in bytes from one library version to the next, its source does not.
    """
    if source := _converted_from(folder):
        return source[:16]
    digest = hashlib.sha256()
    settings = [file for name in CONFIGURATION if (file := folder / name).is_file()]
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin"), *settings]):
        with file.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()[:16]


def _converted_from(folder: Path) -> str | None:
    """The sha256 of what a built-in target was converted from; other folders may have a manifest of anything."""
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    source = content.get("gguf_sha256") if isinstance(content, dict) else None
    return source if isinstance(source, str) else None
