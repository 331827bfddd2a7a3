"""Try every causal language model family of the installed transformers as a target, tiny and random.

`python scripts/families.py [--write docs/families.md] [FAMILY ...]` prints a Markdown table: what each family's state
can do (`deepspec.target.probe`), or why it is refused. Takes a few minutes.
"""

import argparse
import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from deepspec.errors import UserError
from deepspec.target import Target
from deepspec.target.probe import probe

VOCABULARY = 97
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "head_dim": 8,
    "sliding_window": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,  # families that can be either
    # experts
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"num_key_value_heads": 4, "head_dim": None},
)
LARGEST = 20_000_000  # parameters; what stays larger is not tried
ABILITIES = ("chain", "tree", "ragged", "features")
HEADER = """# Target families

What the causal language models of transformers {version} can do as a target, each built tiny and random and tried by
the probe that also runs when a target is loaded: a **chain** is verified and partly taken back, a **tree** of drafted
tokens, **ragged** rows of different lengths in one batch, and captured **features** that give the model's own logits
through its final norm and head. Made by `python scripts/families.py --write docs/families.md`. A family that needs
code, kernels or packages of its own, or cannot be made small by the usual settings, is not judged.

{works} of {tried} families that could be tried do all four; {chains} decode chains.

"""


@dataclass
class Found:
    """abilities: each one's complaint, empty = works; None: not tried, for `reason`."""

    family: str
    abilities: dict[str, str] | None
    reason: str = ""


def try_family(family: str) -> Found:
    """Build the family's smallest model and probe it."""
    try:
        model = _tiny(family)
    except _NotTried as error:
        return Found(family, None, str(error))
    try:
        target = Target(model, None, f"tiny {family}")
    except UserError as error:
        return Found(family, dict.fromkeys(ABILITIES, _short(error)))
    except Exception as error:
        return Found(family, dict.fromkeys(ABILITIES, f"{type(error).__name__}: {_short(error)}"))
    return Found(family, {name: complaint.replace("|", "/") for name, complaint in probe(target).items()})


class _NotTried(Exception):
    pass


def _tiny(family: str) -> transformers.PreTrainedModel:
    """The first variant of the small settings that runs; where none does, what the first one says."""
    complaints: list[_NotTried] = []
    for variant in VARIANTS:
        settings = {name: value for name, value in {**SMALL, **variant}.items() if value is not None}
        try:
            return _running(family, settings)
        except _NotTried as error:
            complaints.append(error)
    raise complaints[0]


def _running(family: str, settings: dict[str, Any]) -> transformers.PreTrainedModel:
    try:
        whole = transformers.AutoConfig.for_model(family)
        if whole.is_encoder_decoder:
            raise ValueError("an encoder and a decoder")
        kind = type(whole.get_text_config())
        known = kind()
        config = kind(**{name: value for name, value in settings.items() if hasattr(known, name)})
        config._experts_implementation = "eager"  # the grouped kernel has no float64
        with torch.device("meta"):
            size = sum(one.numel() for one in _model(config).parameters())
        if size > LARGEST:
            raise ValueError(f"{size:,} parameters")
        torch.manual_seed(0)
        model = _model(config)
        with torch.no_grad():
            for name, one in model.named_parameters():
                if one.dim() > 1:
                    one.normal_(std=0.3)
                elif "norm" in name:
                    one.uniform_(0.5, 1.5)
            model.eval()(torch.tensor([[5, 9, 30]]))
    except Exception as error:
        raise _NotTried(f"{type(error).__name__}: {_short(error)}") from error
    return model


def _model(config: Any) -> transformers.PreTrainedModel:
    try:
        return transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="sdpa", dtype=torch.float64
        )
    except ValueError:  # the family has its own attention only
        return transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float64
        )


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:110].replace("|", "/")


def table(found: list[Found]) -> str:
    """Markdown: families that were tried, then those that were not."""
    lines = ["| family | " + " | ".join(ABILITIES) + " | why not |", "|---" * (len(ABILITIES) + 2) + "|"]
    for one in found:
        if one.abilities is None:
            continue
        complaints = dict.fromkeys(complaint for complaint in one.abilities.values() if complaint)
        marks = " | ".join("yes" if not one.abilities[name] else "no" for name in ABILITIES)
        lines.append(f"| {one.family} | {marks} | {'; '.join(complaints)} |")
    lines += ["", "Not tried:", "", "| family | reason |", "|---|---|"]
    lines += [f"| {one.family} | {one.reason} |" for one in found if one.abilities is None]
    return "\n".join(lines) + "\n"


def page(found: list[Found]) -> str:
    """The whole page of `--write`."""
    tried = [one.abilities for one in found if one.abilities is not None]
    header = HEADER.format(
        version=transformers.__version__,
        works=sum(not any(one.values()) for one in tried),
        chains=sum(not one["chain"] for one in tried),
        tried=len(tried),
    )
    return header + table(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable()
    found = []
    for family in options.families or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        found.append(try_family(family))
        print(table(found[-1:]).splitlines()[2 if found[-1].abilities else -1], flush=True)
    if options.write:
        options.write.write_text(page(found), encoding="utf-8")
    else:
        print(table(found))


if __name__ == "__main__":
    main()
