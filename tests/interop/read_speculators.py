"""Run by the reader's own Python, without deepspec: load an export with speculators and print its logits.

Arguments: the exported folder; a safetensors file with `features` [P, F] and `tokens` [P + 1 + K]; where to
write `logits` [K, Vd].
"""

import sys

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig


def recorded(module, seen: list) -> None:
    module.register_forward_hook(lambda _, inputs, output: seen.append(output.detach()))


def eagle3(model, given: dict) -> torch.Tensor:
    """Row i pairs the features at i with the token at i + 1; its last row is the one that drafts."""
    features, tokens = given["features"][None], given["tokens"][None]
    rows = features.shape[1]
    steps = tokens.shape[1] - rows - 1
    seen: list[torch.Tensor] = []
    recorded(model.lm_head, seen)
    # its own steps take the next given token, where drafting takes the drafted one: row i of step s holds t_{i+1+s}
    padded = torch.cat([tokens[:, 1:], tokens.new_zeros(1, 1)], 1)
    length = rows + steps - 1
    documents = torch.zeros(1, length, dtype=torch.long)
    filled = torch.cat([features, features.new_zeros(1, steps - 1, features.shape[2])], 1)
    model(filled, padded[:, :length], documents, ttt_steps=steps)
    return torch.stack([logits[0, rows - 1] for logits in seen])


def mtp(model, given: dict) -> torch.Tensor:
    """Its first step at the last row of the prompt; later ones attend otherwise than a decoding cache does."""
    seen: list[torch.Tensor] = []
    recorded(model.lm_head, seen)
    tokens, hidden = given["tokens"][None], given["features"][None]
    steps = model.config.num_speculative_steps
    rows = hidden.shape[1]
    short = tokens.shape[1] - rows
    hidden = torch.cat([hidden, hidden.new_zeros(1, short, hidden.shape[2])], 1)
    more = torch.zeros(1, steps, dtype=torch.long)
    model(torch.cat([tokens, more], 1), torch.cat([hidden, hidden.new_zeros(1, steps, hidden.shape[2])], 1))
    return seen[0][0, rows - 1][None]


def block(model, given: dict) -> torch.Tensor:
    """One block, anchored at the pending token; what its slots say once the given tokens stand before them."""
    features, tokens = given["features"][None], given["tokens"][None]
    anchor, length = features.shape[1], tokens.shape[1]
    size = model.block_size
    longer = max(length, anchor + size + 1)
    seen: list[torch.Tensor] = []
    recorded(model.lm_head, seen)
    hidden: list[torch.Tensor] = []
    recorded(model.norm, hidden)
    last = torch.zeros(1, longer, model.config.transformer_layer_config.hidden_size)
    loss_mask = torch.zeros(1, longer, dtype=torch.long)
    loss_mask[0, anchor] = 1
    model._backbone_forward(
        torch.cat([features, features.new_zeros(1, longer - anchor, features.shape[2])], 1),
        torch.cat([tokens, tokens.new_zeros(1, longer - length)], 1),
        loss_mask,
        last,
        torch.zeros(1, longer, dtype=torch.long),
        max_anchors=1,
    )
    logits = seen[0].view(size, -1)
    if not model.config.sample_from_anchor:
        logits = logits[1:]
    steps = length - anchor - 1
    if getattr(model, "markov_head", None) is not None:
        before = tokens[:, anchor : anchor + steps]
        bias = model.markov_head.block_bias(
            prev_token_ids=before, hidden_states=hidden[0].view(1, size, -1)[:, :steps]
        )
        return logits[:steps] + bias[0]
    return logits[:steps]


def peagle(model, given: dict) -> torch.Tensor:
    """All depths behind the last row of the prompt, which its own sampling of rows is made to keep."""
    from speculators.models.peagle import core

    features, tokens = given["features"][None], given["tokens"][None]
    rows = features.shape[1]
    steps = tokens.shape[1] - rows - 1
    anchors = torch.cat([torch.arange(rows), torch.full((steps - 1,), rows - 1)])
    depths = torch.cat([torch.zeros(rows, dtype=torch.long), torch.arange(1, steps)])
    core.generate_cod_sample_indices = lambda **_: (anchors, depths)
    length = rows + steps - 1
    seen: list[torch.Tensor] = []
    recorded(model.lm_head, seen)
    model(
        torch.cat([features, features.new_zeros(1, steps - 1, features.shape[2])], 1),
        tokens[:, 1 : length + 1],
        torch.zeros(1, length, dtype=torch.long),
        verifier_last_hidden_states=torch.zeros(1, length, model.hidden_size),
        num_depths=steps,
        loss_config=core.resolve_loss_config("ce", "eager"),
    )
    return seen[0][0, rows - 1 :]


RUN = {"eagle3": eagle3, "mtp": mtp, "dflash": block, "dspark": block, "peagle": peagle}


def main(folder: str, asked: str, answer: str) -> None:
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"  # flex attention needs a compiler
    model = SpeculatorModel.from_pretrained(folder, config=config, dtype=torch.float32)
    given = load_file(asked)
    with torch.no_grad():
        run = RUN[model.config.speculators_model_type]
        save_file({"logits": run(model, given).contiguous()}, answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
