"""A target and a draft small enough to reason about, with real losses."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from deepspec.drafts.contract import DraftBatch, DraftLoss, TrainableDraft
from deepspec.drafts.losses import overlap, prob_of, smooth_l1, soft_cross_entropy, teacher_on_vocab

V, H = 13, 8


@dataclass
class FakeCaptured:
    features: Tensor
    last_hidden: Tensor


class FakeTarget:
    """p(t_{j+1}) depends on t_j, t_{j−1} and j, within a document."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        draw = torch.Generator().manual_seed(0)
        self.hidden_size, self.vocab_size, self.num_layers = H, V, 4
        self.device, self.dtype = torch.device("cpu"), dtype
        self.table = torch.randn(V, H, generator=draw, dtype=torch.float64).to(dtype)
        self.places = 0.3 * torch.randn(512, H, generator=draw, dtype=torch.float64).to(dtype)
        self.out = torch.randn(H, V, generator=draw, dtype=torch.float64).to(dtype)
        self.captures = 0

    def embed(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]

    def norm(self, hidden: Tensor) -> Tensor:
        return hidden

    def head(self, normed: Tensor) -> Tensor:
        return normed @ self.out

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)

    def capture(self, tokens: Tensor, positions: Tensor, documents: Tensor, layers: Any) -> FakeCaptured:
        self.captures += 1
        before = torch.zeros_like(self.table[tokens])
        before[:, 1:] = self.table[tokens[:, :-1]] * (documents[:, 1:] == documents[:, :-1])[..., None]
        hidden = torch.tanh(self.table[tokens] + 0.5 * before + self.places[positions])
        return FakeCaptured(torch.cat([hidden * (1 + layer) for layer in layers], -1), hidden)


class FakeConfig(PreTrainedConfig):
    model_type = "deepspec_fake"

    def __init__(self, steps: int = 3, dropout: float = 0.0, **more: Any) -> None:
        self.steps, self.dropout, self.capture_layers = steps, dropout, [0, 2]
        super().__init__(**more)


class FakeDraft(TrainableDraft):
    """Row i = a − 1 sees features up to i and the tokens t_a … t_{a+k−1}, one more a step."""

    config_class = FakeConfig
    default_loss: ClassVar[dict[str, float]] = {"ce": 1.0, "hidden": 0.5}
    loss_parts = ("ce", "hidden")

    def __init__(self, config: FakeConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(2 * H, H)
        self.token = nn.Linear(H, H, bias=False)
        self.lm_head = nn.Linear(H, V, bias=False)
        self.drop = nn.Dropout(config.dropout)
        self.post_init()

    def forward(self, batch: DraftBatch) -> DraftLoss:
        target, steps = batch.context.target, batch.steps or self.config.steps
        supervised = batch.loss_mask & (batch.documents >= 0)
        state = torch.tanh(self.fc(batch.features.to(self.fc.weight.dtype)))
        loss = DraftLoss(sums={"ce": 0.0, "hidden": 0.0}, weights={"ce": 0.0, "hidden": 0.0})
        names = ("valid", "hits", "match", "overlap", "q_text", "p_text")
        columns: dict[str, list[Tensor]] = {name: [] for name in names}
        ok = torch.roll(supervised, -1, 1)  # the anchor, at row i = a − 1
        for k in range(1, steps + 1):
            state = torch.tanh(
                self.drop(state) + self.token(target.embed(batch.tokens.roll(-k, 1)).to(state.dtype))
            )
            same = (batch.documents.roll(-k - 1, 1) == batch.documents) & (batch.documents >= 0)
            in_row = torch.arange(ok.shape[1]) < ok.shape[1] - k - 1
            ok = ok & supervised.roll(-k - 1, 1) & same & in_row
            text = batch.tokens.roll(-k - 1, 1)
            teacher = teacher_on_vocab(target.logits, batch.last_hidden.roll(-k, 1)[ok], text=text[ok])
            logits = self.lm_head(state[ok])
            parts = {"ce": soft_cross_entropy(logits, teacher.log_probs, teacher.kept_mass, 0.8**k)}
            if k == 1:
                parts["hidden"] = smooth_l1(state[ok], batch.last_hidden.roll(-k, 1)[ok])
            for name, (total, weight) in parts.items():
                loss.sums[name] = loss.sums[name] + total
                loss.weights[name] = loss.weights[name] + weight
            with torch.no_grad():
                best, q = logits.argmax(-1), logits.log_softmax(-1)
                found = {
                    "hits": best == text[ok],
                    "match": best == teacher.argmax,
                    "q_text": prob_of(q, text[ok]),
                    "p_text": teacher.text_prob,
                    "overlap": overlap(logits, teacher.log_probs),
                }
                columns["valid"].append(ok)
                for name, values in found.items():
                    column = torch.zeros(ok.shape, dtype=values.dtype)
                    column[ok] = values
                    columns[name].append(column)
        for name, steps_of in columns.items():
            setattr(loss, name, torch.stack(steps_of, -1).roll(1, 1))
        return loss


def answer(target: FakeTarget, prompt: list[int], length: int) -> list[int]:
    """The prompt and `length` greedy tokens of the target."""
    text = list(prompt)
    for _ in range(length):
        tokens = torch.tensor([text])
        hidden = target.capture(
            tokens, torch.arange(len(text))[None], torch.zeros_like(tokens), [0]
        ).last_hidden
        text.append(int(target.logits(hidden[0, -1:]).argmax()))
    return text


def rows(count: int, seed: int = 0, length: int = 24) -> list[dict[str, list[int]]]:
    """Packed rows of greedy answers; supervision is very uneven, some rows are short of `length`."""
    target, draw = FakeTarget(), torch.Generator().manual_seed(seed)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=draw))

    made = []
    for index in range(count):
        row: dict[str, list[int]] = {"tokens": [], "loss_mask": [], "documents": [], "positions": []}
        document = 0
        while len(row["tokens"]) < length - 4:
            room = length - len(row["tokens"])
            prompt = [pick(0, V) for _ in range(pick(1, 4))]
            said = min(room - len(prompt), 2 if index % 3 == 0 else pick(3, 20))
            text = answer(target, prompt, said)
            row["tokens"] += text
            row["loss_mask"] += [0] * len(prompt) + [int(index % 5 != 4 or document > 0)] * said
            row["documents"] += [document] * len(text)
            row["positions"] += list(range(len(text)))
            document += 1
        made.append(row)
    return made
