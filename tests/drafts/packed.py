"""Packed rows of given texts, and a draft taught just enough for its tokens to be accepted."""

import torch

from deepspec.drafts.contract import DraftBatch, DraftContext, TrainableDraft
from deepspec.target import Target


def batch_of(
    target: Target,
    draft: TrainableDraft,
    texts: list[list[int]],
    answers_from: list[int],
    steps: int | None = None,
) -> DraftBatch:
    """One packed row of the texts; everything from `answers_from[d]` on is the assistant's."""
    tokens = torch.tensor([[token for text in texts for token in text]])
    documents = torch.tensor([[d for d, text in enumerate(texts) for _ in text]])
    positions = torch.tensor([[i for text in texts for i in range(len(text))]])
    mask = torch.tensor([[i >= answers_from[d] for d, text in enumerate(texts) for i in range(len(text))]])
    captured = target.capture(tokens, positions, documents, draft.capture_layers)
    context = DraftContext(target)
    return DraftBatch(
        context, tokens, mask, documents, positions, captured.features, captured.last_hidden, steps
    )


def fit(
    draft: TrainableDraft,
    target: Target,
    prompts: list[list[int]],
    answers: list[list[int]],
    steps: int = 60,
) -> None:
    """Overfit on these answers, so that decoding them meets long, partial and no acceptance."""
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    batch = batch_of(target, draft, texts, [len(prompt) for prompt in prompts])
    optimiser = torch.optim.Adam(draft.parameters(), lr=1e-2)
    for _ in range(steps):
        loss = draft(batch)
        sum(w * loss.sums[name] / loss.weights[name] for name, w in draft.default_loss.items()).backward()
        optimiser.step()
        optimiser.zero_grad()
