"""An MTP draft that starts from the target's own module, in the published layouts, against the library's own layer."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from deepspec.drafts.mtp import MtpDraft
from deepspec.drafts.native_mtp import _norm_offset
from deepspec.drafts.options import MtpOptions
from deepspec.drafts.registry import new_draft
from deepspec.errors import UserError
from deepspec.target import Target
from tests.drafts.conformance import decoding_logits
from tests.models import prompts, tiny_model, tiny_target

# prefix, names of (embedding norm, hidden norm, projection, final norm), prefix of the layer, embedding first
LAYOUTS = {
    "deepseek": ("model.layers.4.", ("enorm", "hnorm", "eh_proj", "shared_head.norm"), "", True),
    "mimo": (
        "model.mtp_layers.0.",
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        "",
        False,
    ),
    "qwen": ("mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), "layers.0.", True),
}


class Module(nn.Module):
    """The published module, made of the library's own parts."""

    def __init__(self, target: Target, kind: type) -> None:
        super().__init__()
        config, hidden = target.model.config, target.hidden_size
        self.norms = nn.ModuleList(LlamaRMSNorm(hidden, config.rms_norm_eps) for _ in range(3))
        self.proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = kind(config, 0)
        self.rotary = copy.deepcopy(target.decoder.rotary_emb)
        self.double()
        draw = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for one in self.parameters():
                noise = torch.randn(one.shape, generator=draw)
                one.copy_(1 + 0.3 * noise if one.dim() == 1 else 0.2 * noise)

    def forward(self, target: Target, text: list[int], embedding_first: bool) -> Tensor:
        """Logits [V] of the token behind `text`, whose last one is pending."""
        tokens, positions = torch.tensor([text]), torch.arange(len(text))[None]
        hidden = target.capture(
            tokens[:, :-1], positions[:, :-1], torch.zeros_like(tokens[:, :-1]), []
        ).last_hidden
        halves = [self.norms[0](target.model.get_input_embeddings()(tokens[:, 1:])), self.norms[1](hidden)]
        x = self.proj(torch.cat(halves if embedding_first else halves[::-1], -1))
        count = x.shape[1]
        mask = torch.full((count, count), float("-inf"), dtype=x.dtype).triu(1)[None, None]
        found = self.layer(x, attention_mask=mask, position_embeddings=self.rotary(x, positions[:, :-1]))
        y = found if isinstance(found, Tensor) else found[0]
        return target.model.get_output_embeddings()(self.norms[2](y))[0, -1]


def saved(
    folder: Path, target: Target, module: Module, layout: str, extra: dict[str, Tensor] | None = None
) -> Target:
    """The target's checkpoint with the module's tensors in it, and the target loaded from there."""
    prefix, names, layer, _ = LAYOUTS[layout]
    target.model.save_pretrained(folder)
    file = folder / "model.safetensors"
    own = {
        f"{prefix}{names[0]}.weight": module.norms[0].weight,
        f"{prefix}{names[1]}.weight": module.norms[1].weight,
        f"{prefix}{names[2]}.weight": module.proj.weight,
        f"{prefix}{names[3]}.weight": module.norms[2].weight,
        **{f"{prefix}{layer}{name}": one for name, one in module.layer.state_dict().items()},
        **{f"{prefix}{name}": one for name, one in (extra or {}).items()},
    }
    content = {name: one.detach().clone().contiguous() for name, one in own.items()}
    save_file(load_file(file) | content, file, metadata={"format": "pt"})
    target.model.name_or_path = str(folder)
    return target


def fresh(family: str) -> Target:
    return Target(copy.deepcopy(tiny_model(family)), None, family)


def drafted(target: Target, **more: Any) -> MtpDraft:
    options = MtpOptions(start="target", vocab_size=None, **more)
    return new_draft(options, target, None).double().eval()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("family", "kind"), [("llama", LlamaDecoderLayer), ("qwen3", Qwen3DecoderLayer)])
def test_the_draft_is_the_module(family: str, kind: type, layout: str, tmp_path: Path) -> None:
    target = fresh(family)
    module = Module(target, kind)
    target = saved(tmp_path, target, module, layout, {"embed_tokens.weight": torch.zeros(3, 2)})
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        draft = drafted(target)
    finally:
        torch.set_default_dtype(before)
    for words in prompts(3, seed=4, longest=12):
        text = [*words, 5, 9, 11]
        anchor = len(text) - 2
        expected = module(target, text[: anchor + 1], LAYOUTS[layout][3])
        torch.testing.assert_close(
            decoding_logits(draft, target, text, anchor, 1)[0], expected, rtol=1e-6, atol=1e-6
        )
    assert draft.config.started_from[-1].startswith("(1 without a place: embed_tokens")


def test_of_latent_attention_and_experts_only_norms_and_projection_are_taken(tmp_path: Path) -> None:
    target = fresh("deepseek_v3")
    module = Module(fresh("llama"), LlamaDecoderLayer)
    module.layer = copy.deepcopy(target.decoder.layers[-1])
    draft = drafted(saved(tmp_path, target, module, "deepseek"))
    copied = [name for name in draft.config.started_from if not name.startswith("(")]
    assert sorted(copied) == ["embedding_norm.weight", "hidden_norm.weight", "norm.weight", "proj.weight"]
    assert torch.equal(draft.proj.weight.float(), module.proj.weight.float())
    assert "without a place" in draft.config.started_from[-1]


def test_a_checkpoint_without_such_a_module_is_named(tmp_path: Path) -> None:
    target = fresh("llama")
    target.model.save_pretrained(tmp_path)
    target.model.name_or_path = str(tmp_path)
    with pytest.raises(
        UserError, match=r"no multi-token-prediction weights \(looked for model\.layers\.4\..*random"
    ):
        drafted(target)
    wrong = saved(tmp_path, target, Module(target, LlamaDecoderLayer), "deepseek")
    file = tmp_path / "model.safetensors"
    save_file(
        {**load_file(file), "model.layers.4.eh_proj.weight": torch.zeros(3, 5)},
        file,
        metadata={"format": "pt"},
    )
    with pytest.raises(UserError, match="own eh_proj does not fit the draft's proj"):
        drafted(wrong)


@pytest.mark.parametrize("change", ["rotation", "quantised"])
def test_what_would_mean_something_else_here_is_left_out(change: str, tmp_path: Path) -> None:
    target = fresh("llama")
    target = saved(tmp_path, target, Module(target, LlamaDecoderLayer), "deepseek")
    if change == "rotation":
        target.config.rope_parameters = {**target.config.rope_parameters, "partial_rotary_factor": 0.5}
    else:
        file = tmp_path / "model.safetensors"
        content = load_file(file)
        name = "model.layers.4.self_attn.q_proj.weight"
        save_file({**content, name: content[name].to(torch.float8_e4m3fn)}, file, metadata={"format": "pt"})
    copied = drafted(target).config.started_from
    assert not [name for name in copied if "self_attn" in name and not name.startswith("(")]
    assert "layers.0.mlp.up_proj.weight" in copied and "proj.weight" in copied


@pytest.mark.parametrize(("family", "offset"), [("llama", 0.0), ("qwen3", 0.0), ("gemma3", 1.0)])
def test_families_that_store_a_norm_less_one(family: str, offset: float) -> None:
    assert _norm_offset(tiny_target(family)) == offset
