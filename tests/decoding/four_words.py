"""A target of four words, whose texts can be counted, and the test of counts against exact probabilities."""

import functools
import itertools
from collections.abc import Callable

import torch
import transformers
from torch import Tensor

from deepspec.decoding import Engine, Request, Sampling
from deepspec.target import Target

WORDS = 4
PROMPT = [1, 3]
Text = tuple[int, ...]


class Primed(Target):
    """Reads `PROMPT` once and hands every further request a copy: thousands of them are what takes the time."""

    def forward(self, tokens, state, layout, logits_at=0, layers=()):
        if state.lengths != [0] or tokens.tolist() != [PROMPT]:
            return super().forward(tokens, state, layout, logits_at, layers)
        read = self.__dict__.setdefault("read", {})
        if tuple(layers) not in read:
            output = super().forward(tokens, state, layout, logits_at, layers)
            count = len(PROMPT)
            kept = [(layer.keys[:, :, :count], layer.values[:, :, :count]) for layer in state.buffers]
            read[tuple(layers)] = output, [(keys.clone(), values.clone()) for keys, values in kept]
        output, kept = read[tuple(layers)]
        state.plan(layout)
        for layer, (keys, values) in zip(state.buffers, kept, strict=True):
            layer.update(keys, values)
        return output


@functools.cache
def target() -> Target:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.4)
    return Primed(model, None, "four words")


@functools.cache
def table() -> Tensor:
    """A fair draft's: the target's own logits after each word alone, and noise."""
    with torch.no_grad():
        logits = target().model(torch.arange(WORDS)[:, None], use_cache=False).logits[:, -1]
    noise = torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return logits + noise


def exact(sampling: Sampling, length: int) -> dict[Text, float]:
    """Exact probabilities of every continuation, by plain forwards and processors of the library alone."""
    processors = transformers.LogitsProcessorList(
        [
            transformers.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty),
            transformers.TemperatureLogitsWarper(sampling.temperature),
        ]
    )
    found: dict[Text, float] = {(): 1.0}
    for _ in range(length):
        texts = torch.tensor([[*PROMPT, *text] for text in found])
        with torch.no_grad():
            logits = target().model(texts, use_cache=False).logits[:, -1]
        p = processors(texts, logits).softmax(-1)
        found = {
            (*text, token): chance * float(p[row, token])
            for row, (text, chance) in enumerate(found.items())
            for token in range(WORDS)
        }
    return found


def p_value(counts: dict[Text, int], expected: dict[Text, float]) -> float:
    """Pearson's chi-square; cells with fewer than 5 expected are pooled."""
    runs = sum(counts.values())
    cells, rest = [], [0.0, 0.0]
    for text, chance in expected.items():
        if chance * runs >= 5:
            cells.append((counts.get(text, 0), chance * runs))
        else:
            rest = [rest[0] + counts.get(text, 0), rest[1] + chance * runs]
    cells += [tuple(rest)] if rest[1] > 0 else []
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def p_values(engine: Engine, sampling: Sampling, runs: int, length: int = 4) -> list[float]:
    """Of the joint distribution of `length` tokens, and of each token's alone, which sees small shifts better."""
    requests = [Request(PROMPT, length, sampling, seed=seed) for seed in range(runs)]
    texts = [tuple(result.tokens) for result in engine.generate(requests)]
    joint = exact(sampling, length)
    views: list[Callable[[Text], Text]] = [lambda text: text]
    views += [lambda text, i=i: text[i : i + 1] for i in range(length)]
    found = []
    for view in views:
        counts: dict[Text, int] = {}
        expected: dict[Text, float] = {}
        for text in texts:
            counts[view(text)] = counts.get(view(text), 0) + 1
        for text in itertools.product(range(WORDS), repeat=length):
            expected[view(text)] = expected.get(view(text), 0.0) + joint[text]
        found.append(p_value(counts, expected))
    return found
