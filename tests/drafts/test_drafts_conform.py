"""Every trained family of drafts on small targets of five families: the contract they all keep."""

from pathlib import Path

import pytest
import torch

from deepspec.drafts.contract import DynamicTree, StaticTree
from deepspec.drafts.options import (
    DFlashOptions,
    DSparkOptions,
    Eagle3Options,
    EagleOptions,
    MedusaOptions,
    MtpOptions,
    PEagleOptions,
    StandaloneOptions,
)
from deepspec.drafts.registry import new_draft
from deepspec.target import Target
from tests.drafts.conformance import (
    check_dynamic_trees,
    check_offline_is_the_engine,
    check_packed_is_the_sum,
    check_rows_are_alone,
    check_saved_is_loaded,
    check_static_trees,
    check_training_is_decoding,
)
from tests.models import VOCAB, prompts, tiny_target

FAMILIES = ["llama", "qwen3", "gemma3", "deepseek_v3", "gpt_oss"]
IDS = torch.arange(0, VOCAB, 2)
STEPS = 4
VARIANTS = {
    "eagle": (EagleOptions, {"ttt_steps": STEPS}),
    "eagle, two layers": (EagleOptions, {"ttt_steps": STEPS, "layers": 2}),
    "eagle3": (Eagle3Options, {"ttt_steps": STEPS}),
    "eagle3, two layers": (Eagle3Options, {"ttt_steps": STEPS, "layers": 2}),
    "eagle3.1, frozen head": (
        Eagle3Options,
        {"ttt_steps": STEPS, "norm_layers": True, "normalised_feedback": True, "head": "frozen"},
    ),
    "mtp": (MtpOptions, {"ttt_steps": STEPS}),
    "mtp, normed input": (MtpOptions, {"ttt_steps": STEPS, "norm_input": "after", "layers": 2}),
    "standalone": (StandaloneOptions, {"layers": 2}),
    "standalone, fresh": (StandaloneOptions, {"layers": 2, "start": "random", "hidden_size": 16}),
    "dflash": (DFlashOptions, {"block_tokens": STEPS, "layers": 2}),
    "dflash, trained head": (
        DFlashOptions,
        {"block_tokens": STEPS, "layers": 1, "head": "trained", "head_norms": False},
    ),
    "dspark": (DSparkOptions, {"block_tokens": STEPS, "layers": 2, "rank": 6, "confidence": False}),
    "dspark, rnn": (
        DSparkOptions,
        {"block_tokens": STEPS, "layers": 1, "rank": 6, "sequential": "rnn", "confidence": False},
    ),
    "dspark, no head": (DSparkOptions, {"block_tokens": STEPS, "layers": 1, "rank": 0}),
    "medusa": (MedusaOptions, {"heads": STEPS}),
    "medusa, frozen head": (MedusaOptions, {"heads": STEPS, "head": "frozen"}),
    "peagle": (PEagleOptions, {"ttt_steps": STEPS}),
    "peagle, two layers": (
        PEagleOptions,
        {"ttt_steps": STEPS, "layers": 2, "head": "frozen", "norm_layers": True},
    ),
}
ONE_EACH = ["eagle", "eagle3", "mtp", "standalone", "dflash", "dspark", "medusa", "peagle"]


def make(target: Target, variant: str, reduced: bool = True, dtype=torch.float64, **more):
    """A draft no parameter of which is a neutral start."""
    options, settings = VARIANTS[variant]
    chosen = options(vocab_size=len(IDS) if reduced else None, **{**settings, **more})
    torch.manual_seed(0)
    draft = new_draft(chosen, target, IDS if reduced else None).to(dtype).eval()
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    if hasattr(draft, "model"):
        draft.model.config._experts_implementation = "eager"  # the grouped kernel has no float64
    return draft


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        # every draft on every kind of target; its variants elsewhere than on Llama with `pytest -m slow`
        pytest.param(
            family, variant, marks=() if variant in ONE_EACH or family == "llama" else pytest.mark.slow
        )
        for family in FAMILIES
        for variant in sorted(VARIANTS)
    ],
)
def test_training_logits_are_decoding_logits(
    family: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target(family)
    texts = [[*text, *range(3, 15)] for text in prompts(2, seed=12, longest=20)]
    draft = make(target, variant, confidence=True)
    check_training_is_decoding(draft, target, texts, [2, 3], STEPS, monkeypatch)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("variant", ONE_EACH)
def test_a_row_in_a_batch_is_that_row_alone(family: str, variant: str) -> None:
    target = tiny_target(family)
    check_rows_are_alone(make(target, variant), target, STEPS)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_a_packed_batch_is_the_sum_of_its_documents(variant: str) -> None:
    target = tiny_target("llama")
    check_packed_is_the_sum(make(target, variant, confidence=True), target)


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        *(("llama", variant) for variant in ONE_EACH if variant not in ("dflash", "medusa", "peagle")),
        ("qwen3", "mtp"),
        ("gemma3", "standalone"),
        ("deepseek_v3", "eagle"),
        ("gpt_oss", "eagle3"),
        ("qwen3", "dspark, rnn"),
        ("gemma3", "dflash"),
        ("deepseek_v3", "medusa"),
        ("gpt_oss", "peagle"),
    ],
)
def test_offline_hits_are_the_engines_rounds(family: str, variant: str) -> None:
    target = tiny_target(family)
    check_offline_is_the_engine(make(target, variant, reduced=False), target)


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        *(("qwen3", variant) for variant in sorted(VARIANTS)),
        ("deepseek_v3", "standalone"),
        ("gemma3", "standalone"),
    ],
)
def test_saved_and_loaded_drafts_propose_the_same(family: str, variant: str, tmp_path: Path) -> None:
    target = tiny_target(family)
    check_saved_is_loaded(make(target, variant, dtype=torch.float32, confidence=True), target, tmp_path)


@pytest.mark.parametrize(("family", "variant"), [("llama", v) for v in ONE_EACH] + [("gemma3", "standalone")])
@pytest.mark.parametrize(
    "tree", [DynamicTree(2, 3, 8), DynamicTree(3, 2, 50), DynamicTree(1, 4, 3)], ids=["some", "all", "few"]
)
def test_dynamic_trees_are_eagle_2s(
    family: str, variant: str, tree: DynamicTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target(family)
    check_dynamic_trees(make(target, variant), target, tree, IDS, monkeypatch)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize("variant", ONE_EACH)
@pytest.mark.parametrize(
    "parents", [(-1, -1, 0, 0, 1, 2, 2, 5), (-1, 0, -1, 1, 2)], ids=["by level", "by path"]
)
def test_a_static_trees_nodes_are_their_paths(
    family: str, variant: str, parents: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target(family)
    check_static_trees(make(target, variant), target, StaticTree(parents), monkeypatch)
