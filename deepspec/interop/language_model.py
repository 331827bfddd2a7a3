"""A standalone draft as what it is: a language model of its own, which every engine loads beside the target."""

from typing import Any

from torch import Tensor

from deepspec.drafts.contract import TrainableDraft
from deepspec.drafts.standalone import StandaloneConfig, StandaloneDraft
from deepspec.errors import UserError
from deepspec.interop.layout import Checkpoint, Serving, exported_tensors, loaded, refuse
from deepspec.target import Target

OURS = "model."  # the prefix of a standalone draft's tensors
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def to_folder(draft: StandaloneDraft, target: Target, serving: Serving) -> Checkpoint:
    """The folder of a transformers model, with the target's tokenizer. `UserError` for a reduced vocabulary."""
    reason = "A language model proposes any of its tokens, and this draft has learnt some of them only"
    refuse(
        "Train it with draft.vocab_size=null, or export it with format=hf",
        (draft.target_ids is not None, reason),
    )
    ours, notes = exported_tensors(draft)
    tensors = {name.removeprefix(OURS): tensor for name, tensor in ours.items()}
    settings = draft.model.config.to_dict()
    if draft.model.config.tie_word_embeddings:
        del tensors[HEAD]
    settings |= {
        "architectures": [type(draft.model).__name__],
        "dtype": str(draft.dtype).removeprefix("torch."),
        "_name_or_path": "",
    }
    return Checkpoint(settings, tensors, notes, target.tokenizer)


def from_folder(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> TrainableDraft:
    """A language model with the target's tokens → a standalone draft."""
    lm = {
        key: value for key, value in config.items() if key not in ("architectures", "dtype", "_name_or_path")
    }
    attention = "eager" if target.model.config._attn_implementation == "eager" else "sdpa"
    draft = StandaloneDraft(StandaloneConfig(lm=lm, attention=attention))
    if (rows := draft.model.get_output_embeddings().weight.shape[0]) != target.vocab_size:
        raise UserError(
            f"The language model has {rows} tokens and {target.name} {target.vocab_size}: a draft must have its target's "
            "tokenizer."
        )
    given = dict(tensors)
    if draft.model.config.tie_word_embeddings and EMBEDDING in given:
        given.setdefault(HEAD, given[EMBEDDING])
    return loaded(draft, {OURS + name: tensor for name, tensor in given.items()}, "the language model")


def refuse_gguf(kind: str) -> UserError:
    """Why nothing is written as GGUF yet, and what works."""
    if kind == "standalone":
        return UserError(
            "format=gguf is not written yet: GGUF names a tokenizer's splitting rule, and only llama.cpp's converter "
            "knows which rule a tokenizer has. Export with format=vllm, whose folder is a plain language model, and give "
            "that to llama.cpp's convert_hf_to_gguf.py."
        )
    return UserError(
        f"format=gguf is not written yet: of the drafts trained here llama.cpp runs language models of their own "
        f"(draft=standalone), not {kind}. Export with format=vllm, sglang or hf."
    )
