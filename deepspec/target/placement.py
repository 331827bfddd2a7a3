"""A target that is larger than one device: which module goes where, by accelerate's own accounting.

The embedding, what stands around the decoder layers and the head stay on the first device, where the draft lives too:
a draft asks for them all the time. Only decoder layers go to other devices, to memory that is loaded when needed
(`cpu` beside GPUs) or to disk.
"""

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import infer_auto_device_map, init_empty_weights
from accelerate.utils import convert_file_size_to_int, get_balanced_memory, get_max_memory
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from deepspec.errors import UserError

Places = dict[str, int | str]


def places(
    model_config: Any, dtype: torch.dtype, asked: Mapping[str, str], *, balanced: bool, remote_code: bool
) -> Places:
    """Module name → device, for `from_pretrained(device_map=...)`.

    asked: most memory by device ("0", "cpu", ...), as accelerate writes it ("70GiB"); devices that are not named get
    what is free. balanced: fill all GPUs alike instead of one after the other. `UserError` where the first device
    cannot even hold what must be there.
    """
    model = empty_model(model_config, remote_code)
    decoder = model.get_decoder()
    prefix = _name_of(model, decoder)
    layers = _layers(decoder, model_config.get_text_config(decoder=True).num_hidden_layers)
    whole = [type(layers[0]).__name__]
    memory = _memory(asked)
    if balanced:
        memory = get_balanced_memory(model, memory, no_split_module_classes=whole, dtype=dtype)
    first = next(iter(memory))
    edges = _edges(model, decoder, layers, prefix)
    needed = _bytes([model.get_submodule(name) for name in edges], dtype)
    if memory[first] <= needed:
        raise UserError(
            f"target.device_map: embedding, norm and head of the target need {needed / 2**30:.2f} GiB on device {first}, "
            f"which may hold {memory[first] / 2**30:.2f} GiB. Raise target.max_memory.{first}."
        )
    found = infer_auto_device_map(
        layers, {**memory, first: memory[first] - needed}, no_split_module_classes=whole, dtype=dtype
    )
    base = _name_of(model, layers)
    return {name: first for name in edges} | {f"{base}.{name}": place for name, place in found.items()}


def empty_model(model_config: Any, remote_code: bool) -> PreTrainedModel:
    """The family's own model without weights, on the meta device; tied weights are tied."""
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=remote_code)
    model.tie_weights()
    return model


def _memory(asked: Mapping[str, str]) -> dict[Any, int]:
    """Bytes by device, the first one first."""
    named: dict[int | str, int] = {}
    for name, size in asked.items():
        try:
            named[int(name) if name.isdecimal() else name] = (
                int(size) if size.isdecimal() else convert_file_size_to_int(size)
            )
        except ValueError as error:
            raise UserError(
                f"target.max_memory.{name}={size} is no size of memory; write it like 70GiB or 500MB."
            ) from error
    free = get_max_memory()
    unknown = [name for name in named if name not in free]
    if unknown:
        raise UserError(
            f"target.max_memory names device {unknown[0]}, which is not here: there are "
            f"{', '.join(map(str, free))}."
        )
    return free | named


def _edges(model: nn.Module, decoder: nn.Module, layers: nn.Module, prefix: str) -> list[str]:
    """What is neither a decoder layer nor above them: children of the decoder and of the model, by name."""
    names = [f"{prefix}.{name}" for name, child in decoder.named_children() if child is not layers]
    below = {id(part) for part in decoder.modules()}
    names += [
        name
        for name, child in model.named_children()
        if id(child) not in below and not any(part is decoder for part in child.modules())
    ]
    return names


def _layers(decoder: nn.Module, count: int) -> nn.ModuleList:
    for child in decoder.children():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            return child
    raise UserError(
        f"target.device_map: {type(decoder).__name__} does not hold its {count} layers in a list of its own; this "
        "family cannot be spread over devices here."
    )


def _name_of(model: nn.Module, module: nn.Module) -> str:
    return next(name for name, part in model.named_modules() if part is module)


def _bytes(modules: list[nn.Module], dtype: torch.dtype) -> int:
    """Tied weights count once."""
    weights = {id(p): p.numel() for module in modules for p in module.parameters()}
    return sum(weights.values()) * torch.empty(0, dtype=dtype).element_size()
