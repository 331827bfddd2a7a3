"""Training speed and memory of each draft family: `python -m benchmarks.train [--tiny] [--families eagle3]`.

Each measurement has a process of its own, so that its peak memory is its own. `ours` is the family's forward and
backward; `plain` is EAGLE-3's training-time test as one would first write it: every position at every step, one
dense mask over all steps' keys, logits over all positions. Both learn from the same packed rows and features.
Prints a table and writes JSON (--out).
"""

import argparse
import json
import math
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from deepspec.drafts.contract import DraftBatch, DraftContext
from deepspec.drafts.registry import new_draft, option_classes
from deepspec.drafts.unrolled import supervised
from deepspec.target import Target

TINY = {"hidden": 64, "layers": 4, "vocab": 512, "length": 128, "rows": 2}
SMALL = {"hidden": 576, "layers": 6, "vocab": 49152, "length": 512, "rows": 2}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", default=sorted(option_classes()))
    parser.add_argument("--tiny", action="store_true", help="a model of seconds, to see that it runs")
    parser.add_argument("--steps", type=int, default=5, help="measured optimiser steps")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", nargs=2, metavar=("FAMILY", "HOW"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(*options.child, TINY if options.tiny else SMALL, options.steps)))
        return
    found = []
    for family in options.families:
        for how in ("ours", "plain") if family == "eagle3" else ("ours",):
            found.append(_in_child(family, how, options))
            one = found[-1]
            print(f"{family:12} {how:6} {one['tokens_per_second']:10.0f} tokens/s {one['peak_gib']:7.2f} GiB")
    if options.out:
        record = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
        record |= {"threads": torch.get_num_threads(), "measured": found}
        options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _in_child(family: str, how: str, options: argparse.Namespace) -> dict[str, Any]:
    call = [sys.executable, "-m", "benchmarks.train", "--child", family, how, "--steps", str(options.steps)]
    call += ["--tiny"] if options.tiny else []
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{family} ({how}) failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(family: str, how: str, size: dict[str, int], steps: int) -> dict[str, Any]:
    """Median seconds of forward, backward and optimiser step, after one that is not counted."""
    torch.manual_seed(0)
    target = _target(size)
    draft = new_draft(option_classes()[family](), target, None).to(target.device).train()
    batch = _batch(target, draft.capture_layers, size)
    optimiser = torch.optim.AdamW(draft.parameters(), lr=1e-4)
    loss_of: Callable[[], Tensor] = (
        (lambda: plain_eagle3(draft, batch)) if how == "plain" else (lambda: _mean(draft, batch))
    )
    seconds = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        loss = loss_of()
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        value = loss.item()  # waits for a GPU
        seconds.append(time.perf_counter() - start)
    middle = sorted(seconds[1:])[len(seconds[1:]) // 2]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if target.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
    return {
        "family": family,
        "how": how,
        "device": target.device.type,
        "tokens_per_second": batch.tokens.numel() / middle,
        "peak_gib": peak / 2**30,
        "step_seconds": seconds[1:],
        "last_loss": value,
    }


def _target(size: dict[str, int]) -> Target:
    config = transformers.LlamaConfig(
        vocab_size=size["vocab"],
        hidden_size=size["hidden"],
        intermediate_size=size["hidden"] * 8 // 3,
        num_hidden_layers=size["layers"],
        num_attention_heads=max(1, size["hidden"] // 64),
        num_key_value_heads=max(1, size["hidden"] // 192),
        max_position_embeddings=4096,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Target(transformers.LlamaForCausalLM(config).to(device).eval(), None, "random Llama")


@torch.no_grad()
def _batch(target: Target, layers: list[int], size: dict[str, int]) -> DraftBatch:
    """Random tokens, four documents a row, the last two thirds of each supervised."""
    shape, quarter = (size["rows"], size["length"]), size["length"] // 4
    tokens = torch.randint(size["vocab"], shape, device=target.device)
    place = torch.arange(size["length"], device=target.device).expand(shape)
    documents, positions = place // quarter, place % quarter
    captured = target.capture(tokens, positions, documents, layers)
    mask = positions > quarter // 3
    context = DraftContext(target)
    seeds = torch.arange(size["rows"])
    return DraftBatch(
        context, tokens, mask, documents, positions, captured.features, captured.last_hidden, seeds=seeds
    )


def _mean(draft: Any, batch: DraftBatch) -> Tensor:
    loss = draft(batch)
    return sum(weight * loss.sums[name] / loss.weights[name] for name, weight in draft.default_loss.items())


def plain_eagle3(draft: Any, batch: DraftBatch) -> Tensor:
    """EAGLE-3's loss (Li et al. 2025) on every position: the same value as ours, without its savings."""
    target, steps = batch.context.target, draft.config.ttt_steps
    valid = supervised(batch.loss_mask, batch.documents, steps).roll(-1, 1)
    valid[:, -1] = False
    width = batch.tokens.shape[1]
    own = torch.eye(width, dtype=torch.bool, device=batch.tokens.device)[None]
    causal = torch.ones(width, width, dtype=torch.bool, device=own.device).tril()
    mask = causal & (batch.documents[:, :, None] == batch.documents[:, None, :])
    hidden, keys, values = draft.fc(batch.features), [], []
    (layer,) = draft.layers
    total, weight = hidden.new_zeros(()), 0.0
    for step in range(steps):
        embeddings = target.embed(batch.tokens.roll(-step - 1, 1))
        rotary = draft.rotary(hidden, batch.positions + step)
        x = layer.read(hidden, embeddings)
        key, value = layer.self_attn.keys_values(x, rotary)
        query = layer.self_attn.queries(x, rotary)
        keys.append(key.repeat_interleave(query.shape[1] // key.shape[1], 1))
        values.append(value.repeat_interleave(query.shape[1] // value.shape[1], 1))
        if step > 0:
            mask = torch.cat([mask, own.expand(len(mask), -1, -1)], -1)
        scores = query @ torch.cat(keys, 2).transpose(-1, -2) / math.sqrt(query.shape[-1])
        attended = scores.masked_fill(~mask[:, None], -math.inf).softmax(-1) @ torch.cat(values, 2)
        hidden = layer.finish(hidden, layer.self_attn.output(attended))
        normed = draft.norm(hidden)
        teacher = target.logits(batch.last_hidden.roll(-step - 1, 1).flatten(0, 1)).softmax(-1)
        cross = -(teacher * draft.lm_head(normed).flatten(0, 1).log_softmax(-1)).sum(-1)
        chosen = valid[..., step].flatten()
        decay = draft.config.step_decay**step
        total = total + decay * (cross * chosen).sum()
        weight += decay * float(chosen.sum())
    return total / weight


if __name__ == "__main__":
    main()
