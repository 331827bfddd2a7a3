"""EAGLE and MTP against the library's own decoder layers and plain loops."""

import copy

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from deepspec.drafts.eagle import EagleDraft, EagleOptions, uniforms
from deepspec.drafts.mtp import MtpDraft, MtpOptions
from deepspec.drafts.registry import new_draft
from deepspec.errors import UserError
from deepspec.target import Target
from tests.drafts.conformance import decoding_logits, training_steps
from tests.drafts.packed import batch_of
from tests.models import VOCAB, prompts, tiny_target

IDS = torch.arange(0, VOCAB, 2)


def perturbed(draft):
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return draft.double().eval()


def eagle(target: Target, **options) -> EagleDraft:
    return perturbed(new_draft(EagleOptions(**options), target, None))


def library_layer(kind: type, target: Target, mine: nn.Module) -> nn.Module:
    """The library's layer with the draft layer's weights, which must be all it has."""
    config = copy.deepcopy(target.config)
    config._attn_implementation = "eager"
    layer = kind(config, 0).double()
    if mine.input_layernorm is None:
        layer.input_layernorm = nn.Identity()
    layer.load_state_dict(mine.state_dict())
    return layer


def run_layer(layer: nn.Module, target: Target, x: torch.Tensor) -> torch.Tensor:
    count = x.shape[1]
    positions = torch.arange(count)[None]
    mask = torch.full((count, count), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)[None, None]
    rotary = target.decoder.rotary_emb(x, positions)
    out = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
    return out[0] if isinstance(out, tuple) else out


def plain_features(target: Target, text: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The last hidden state before and after the final norm, and the next-token distributions [T, V]."""
    before: list[torch.Tensor] = []
    handle = target.decoder.norm.register_forward_pre_hook(lambda m, inputs: before.append(inputs[0]))
    with torch.no_grad():
        output = target.model(torch.tensor([text]), use_cache=False, output_hidden_states=True)
    handle.remove()
    return before[0][0], target.decoder.norm(before[0][0]), output.logits[0].softmax(-1)


def test_eagles_first_step_is_a_library_layer_on_normed_features() -> None:
    target = tiny_target("llama")
    draft, text = eagle(target), [*prompts(1, seed=41)[0], *range(3, 12)]
    _, normed, p = plain_features(target, text)
    with torch.no_grad():
        embeddings = target.model.get_input_embeddings()(torch.tensor(text))
        x = draft.fc(torch.cat([embeddings[1:], normed[:-1]], -1))[None]
        predicted = run_layer(library_layer(LlamaDecoderLayer, target, draft.layers[0]), target, x)[0]
        logits = target.model.lm_head(predicted)
    start = 3
    loss = draft(batch_of(target, draft, [text], [start]))
    regress = entropy = 0.0
    for row in range(start - 1, len(text) - 2):  # row i predicts t_{i+2}, taught by P(i+1) and f_{i+1}
        gap = (predicted[row] - normed[row + 1]).abs()
        regress += float(torch.where(gap < 1, gap * gap / 2, gap - 0.5).mean())
        entropy -= float((p[row + 1] * logits[row].log_softmax(-1)).sum())
        torch.testing.assert_close(
            decoding_logits(draft, target, text, row + 1, 1)[0], logits[row], rtol=1e-5, atol=1e-5
        )
    count = len(text) - 1 - start
    assert loss.sums["smooth_l1"].item() == pytest.approx(regress, rel=1e-5)
    assert loss.sums["soft_ce"].item() == pytest.approx(entropy, rel=1e-5)
    assert loss.weights["smooth_l1"].item() == loss.weights["soft_ce"].item() == pytest.approx(count)
    assert draft.default_loss == {"smooth_l1": 1.0, "soft_ce": 0.1}


def test_eagles_second_step_regresses_to_the_next_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    """f̂ read back from the full-vocabulary logits it gives: the head has more rows than columns."""
    target = tiny_target("llama")
    draft, text = eagle(target, ttt_steps=2, step_decay=0.5), [5, 9, 30, 40, 7, 8, 11, 90]
    loss, seen = training_steps(draft, batch_of(target, draft, [text], [2]), monkeypatch)
    _, normed, _ = plain_features(target, text)
    expected = weight = 0.0
    for step in (0, 1):
        for index, anchor in enumerate(torch.nonzero(loss.valid[0, :, step])[:, 0].tolist()):
            logits = seen[step][0][index]
            predicted = torch.linalg.lstsq(target.model.lm_head.weight, logits[:, None]).solution[:, 0]
            gap = (predicted - normed[anchor + step]).abs()
            expected += 0.5**step * float(torch.where(gap < 1, gap * gap / 2, gap - 0.5).mean())
            weight += 0.5**step
    assert loss.sums["smooth_l1"].item() == pytest.approx(expected, rel=1e-5)
    assert loss.weights["smooth_l1"].item() == pytest.approx(weight)


@pytest.mark.parametrize("norm_input", ["before", "after"])
@pytest.mark.parametrize(("family", "kind"), [("llama", LlamaDecoderLayer), ("qwen3", Qwen3DecoderLayer)])
def test_mtps_first_step_is_a_layer_of_the_targets_kind(family: str, kind: type, norm_input: str) -> None:
    target = tiny_target(family)
    draft: MtpDraft = perturbed(new_draft(MtpOptions(norm_input=norm_input), target, None))
    text = [*prompts(1, seed=42)[0], *range(3, 12)]
    before, after, _ = plain_features(target, text)
    hidden = before if norm_input == "before" else after
    eps = draft.config.rms_norm_eps

    def rms(x: torch.Tensor, norm: nn.RMSNorm) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * norm.weight

    with torch.no_grad():
        embeddings = target.model.get_input_embeddings()(torch.tensor(text))
        pair = torch.cat([rms(embeddings[1:], draft.embedding_norm), rms(hidden[:-1], draft.hidden_norm)], -1)
        y = run_layer(library_layer(kind, target, draft.layers[0]), target, draft.proj(pair)[None])[0]
        logits = target.model.lm_head(rms(y, draft.norm))
    for anchor in range(2, len(text) - 1, 3):
        found = decoding_logits(draft, target, text, anchor, 1)[0]
        torch.testing.assert_close(found, logits[anchor - 1], rtol=1e-5, atol=1e-5)


def test_mtp_has_the_targets_biases_and_refuses_other_words() -> None:
    target = tiny_target("qwen2")
    assert new_draft(MtpOptions(), target, None).layers[0].self_attn.q_proj.bias is not None
    with pytest.raises(UserError, match=r"draft\.norm_input is 'middle'"):
        new_draft(MtpOptions(norm_input="middle"), target, None)


def test_noise_is_a_function_of_the_rows_seed_and_of_nothing_else() -> None:
    seeds = torch.tensor([3, 11])
    both = uniforms(seeds, torch.zeros(2, 9, 4))
    assert torch.equal(uniforms(seeds[1:], torch.zeros(1, 9, 4))[0], both[1])
    assert torch.equal(uniforms(seeds, torch.zeros(2, 13, 4))[:, :9], both)  # padding changes nothing
    assert not torch.equal(both[0], both[1])
    wide = uniforms(seeds[:1], torch.zeros(1, 100, 64))
    assert 0 <= wide.min() < 0.01
    assert 0.99 < wide.max() < 1
    assert wide.mean().item() == pytest.approx(0.5, abs=0.02)


def test_noise_comes_in_training_only_and_grows_as_documents_shorten() -> None:
    target = tiny_target("llama")
    draft = eagle(target, noise=0.01)
    texts = [list(range(3, 11)), list(range(20, 36))]
    batch = batch_of(target, draft, texts, [1, 1])
    clean = draft.training_inputs(batch)
    batch.seeds = torch.tensor([7])
    assert torch.equal(draft.training_inputs(batch), clean)  # eval
    draft.train()
    noise = (draft.training_inputs(batch) - clean)[0]
    for document, length in ((slice(0, 8), 8), (slice(8, 24), 16)):
        bound = 0.01 * 512 / length
        assert 0.9 * bound < noise[document].abs().max() <= bound
    batch.seeds = None
    assert torch.equal(draft.training_inputs(batch), clean)
