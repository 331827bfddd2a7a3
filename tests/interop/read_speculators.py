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


def main(folder: str, asked: str, answer: str) -> None:
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"  # flex attention needs a compiler
    model = SpeculatorModel.from_pretrained(folder, config=config, dtype=torch.float32)
    given = load_file(asked)
    with torch.no_grad():
        run = {"eagle3": eagle3, "mtp": mtp}[model.config.speculators_model_type]
        save_file({"logits": run(model, given).contiguous()}, answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
