"""Which formats there are, what each carries, and how a folder's own is recognised."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from deepspec.drafts.contract import TrainableDraft
from deepspec.errors import UserError
from deepspec.interop import block, eagle, eagle3, language_model, mtp, peagle
from deepspec.interop.files import read_config, read_tensors
from deepspec.interop.layout import Checkpoint, Serving
from deepspec.target import Target

Write = Callable[[Any, Target, Serving], Checkpoint]
Read = Callable[[dict[str, Any], dict[str, Tensor], Target], TrainableDraft]

GGUF = "gguf"
# format → model_type of our draft → what writes it. vLLM serves the layout of speculators.
WRITERS: dict[str, dict[str, Write]] = {
    "speculators": {
        "deepspec_eagle3": eagle3.to_speculators,
        "deepspec_mtp": mtp.to_speculators,
        "deepspec_peagle": peagle.to_speculators,
        "deepspec_dflash": block.to_speculators,
        "deepspec_dspark": block.to_speculators,
    },
    "vllm": {
        "deepspec_eagle3": eagle3.to_speculators,
        "deepspec_eagle": eagle.to_vllm,
        "deepspec_peagle": peagle.to_vllm,
        "deepspec_dflash": block.to_vllm,
        "deepspec_dspark": block.to_vllm,
        "deepspec_standalone": language_model.to_folder,
    },
    "sglang": {
        "deepspec_eagle3": eagle3.to_sglang,
        "deepspec_eagle": eagle.to_sglang,
        "deepspec_dflash": block.to_sglang,
        "deepspec_dspark": block.to_sglang,
        "deepspec_standalone": language_model.to_folder,
    },
    "deepspec": {
        "deepspec_eagle3": eagle3.to_deepspec,
        "deepspec_dflash": block.dflash_to_deepspec,
        "deepspec_dspark": block.to_deepspec,
    },
}


@dataclass(frozen=True)
class Known:
    """A recognised layout: its name for people, and what reads it."""

    name: str
    read: Read


def write(draft: TrainableDraft, form: str, target: Target, serving: Serving) -> Checkpoint:
    """`draft` in another project's layout; `UserError` with the reason and the nearest thing that works."""
    kind = str(draft.config.model_type)
    if form == GGUF:
        raise language_model.refuse_gguf(kind.removeprefix("deepspec_"))
    if kind not in WRITERS[form]:
        other = [name for name, known in WRITERS.items() if kind in known]
        raise UserError(
            f"format={form} has no place for a draft of this kind ({kind.removeprefix('deepspec_')}). It can be "
            f"exported with format={' or format='.join([*other, 'hf'])}."
        )
    return WRITERS[form][kind](draft, target, serving)


# speculators_model_type → what reads it
SPECULATORS: dict[str, Known] = {
    "eagle3": Known("EAGLE-3 of speculators", eagle3.from_speculators),
    "peagle": Known("P-EAGLE of speculators", peagle.from_speculators),
    "dflash": Known("DFlash of speculators", block.from_speculators),
    "dspark": Known("DSpark of speculators", block.from_speculators),
    "mtp": Known("MTP of speculators", mtp.from_speculators),
}
# the first of `architectures` → what reads it
ARCHITECTURES: dict[str, Known] = {
    "Qwen3Eagle3Model": Known("EAGLE-3 of DeepSpec", eagle3.from_deepspec),
    "Qwen3DSparkModel": Known("DSpark or DFlash of DeepSpec", block.from_deepspec),
    "DFlashDraftModel": Known("DFlash of its authors and SpecForge", block.from_authors),
    "DSparkDraftModel": Known("DSpark of SpecForge", block.from_authors),
}


def recognise(config: dict[str, Any], names: set[str]) -> Known:
    """The layout of a checkpoint with this configuration and these tensors; `UserError` for an unknown one."""
    speculators = config.get("speculators_model_type")
    architecture = str((config.get("architectures") or [""])[0])
    if speculators in SPECULATORS:
        return SPECULATORS[speculators]
    if architecture in ARCHITECTURES:
        return ARCHITECTURES[architecture]
    if not speculators and any("midlayer." in name for name in names):
        return Known("EAGLE-3 of SafeAILab and SGLang", eagle3.from_sglang)
    bare = {name.removeprefix("model.") for name in names}
    eagle_has, block_has = {"fc.weight", "layers.0.mlp.up_proj.weight"}, "hidden_norm.weight"
    if not speculators and eagle_has <= bare and block_has not in bare:
        return Known("EAGLE of SafeAILab", eagle.from_published)
    if not speculators and architecture.endswith("ForCausalLM") and "fc.weight" not in bare:
        return Known("a language model", language_model.from_folder)
    what = speculators or architecture or config.get("model_type") or "nothing that says what it is"
    raise UserError(
        f"The checkpoint is of no draft that can be brought over ({what}). Known are EAGLE-3 (SafeAILab, SpecForge, "
        "AngelSlim, SGLang, speculators, DeepSpec), EAGLE (SafeAILab), DFlash (its authors, SpecForge, speculators, "
        "DeepSpec), DSpark (SpecForge, speculators, DeepSpec), P-EAGLE and MTP (speculators), and language models."
    )


def read(folder: Path, target: Target) -> tuple[TrainableDraft, str]:
    """The draft in `folder`, made ours for `target`, and the name of its layout."""
    config, tensors = read_config(folder), read_tensors(folder)
    if str(config.get("model_type", "")).startswith("deepspec_"):
        raise UserError(f"{folder} is a draft of deepspec already: draft.init_from={folder} starts from it.")
    known = recognise(config, set(tensors))
    try:
        return known.read(config, tensors, target), known.name
    except KeyError as error:
        raise UserError(f"{folder / 'config.json'} lacks {error}, which {known.name} needs.") from error
