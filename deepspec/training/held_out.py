"""Evaluation during training: the loss and the offline acceptance length on held-out rows."""

from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator

from deepspec.drafts.contract import DraftLoss
from deepspec.drafts.walk import Walk, greedy_accepts, keyed_uniforms, sampled_accepts, walk
from deepspec.training.batches import Plan, RowBatch, Rows, windows
from deepspec.training.meters import Meter, total
from deepspec.training.sources import FeatureSource, draft_batch


@dataclass(frozen=True)
class HeldOut:
    """What is evaluated and how.

    rows: at most this many, spread evenly over all. steps: K of the walk. temperature: at which the target
    wrote the text (0: greedily).
    """

    rows: int
    steps: int
    temperature: float
    seed: int
    batch_size: int

    @property
    def why_no_tau(self) -> str | None:
        """None where the text can be walked: the draft's probabilities are those of temperature 1."""
        if self.temperature in (0, 1):
            return None
        return (
            f"the answers were drawn at temperature {self.temperature:g}; offline τ is known at 0 and 1 only"
        )


class _Spread:
    """`count` rows at even distances."""

    def __init__(self, rows: Rows, count: int) -> None:
        self.rows, self.count = rows, min(count, len(rows))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.rows[index * len(self.rows) // self.count]


@torch.no_grad()
def evaluate_held_out(
    model: torch.nn.Module,
    rows: Rows,
    how: HeldOut,
    *,
    source: FeatureSource,
    coefficients: dict[str, float],
    accelerator: Accelerator,
) -> dict[str, Any]:
    """Loss, accuracy, tau and acceptance by position, with the counts they are made of.

    Where no tau can be known it is null, the counts are 0 and `tau_reason` says why.
    """
    chosen = _Spread(rows, how.rows)
    plan = Plan(len(chosen), how.batch_size, ranks=accelerator.num_processes)
    meter, walked = Meter(), Walk.from_counts([0] * (4 + 3 * how.steps))
    training = model.training
    model.eval()
    for (batch,) in windows(chosen, plan, accelerator.process_index, seed=None):
        loss = model(draft_batch(batch, source, how.steps, tuple(coefficients)))
        meter.add(loss, batch.token_count, batch.counted)
        if batch.counted and how.why_no_tau is None:
            walked += _walk(batch, loss, how)
    model.train(training)
    meter = meter.over_all(accelerator)
    walked = Walk.from_counts([round(count) for count in total(accelerator, walked.counts())])
    return {
        "held_out_rows": len(chosen),
        "held_out_tokens": int(meter.tokens),
        **{f"held_out_{name}": value for name, value in meter.record(coefficients).items()},
        "k": how.steps,
        "tau": walked.tau,
        **({"tau_reason": how.why_no_tau} if how.why_no_tau else {}),
        "acceptance": walked.conditional,
        "acceptance_unconditional": walked.unconditional,
        "rounds": walked.rounds,
        "committed": walked.committed,
        "cut_rounds": walked.cut,
        "answers": walked.answers,
    }


def _walk(batch: RowBatch, loss: DraftLoss, how: HeldOut) -> Walk:
    if loss.valid is None:
        raise ValueError("The draft's forward gave no `valid`.")
    if how.temperature > 0:
        accepts = sampled_accepts(loss, keyed_uniforms(how.seed, batch.ids, batch.tokens.shape[1]))
    else:
        accepts = greedy_accepts(loss)
    return walk(accepts, loss.valid, batch.loss_mask, batch.documents)
