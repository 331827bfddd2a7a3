"""Which number format is faster here: measured in about a second, not guessed from a processor's name."""

import time

import torch


def probe_dtype(device: torch.device, hidden: int = 576, inner: int = 1536, rows: int = 64) -> torch.dtype:
    """bfloat16 or float32, whichever multiplies `rows` × hidden × inner faster on `device` (alternating runs).

    rows = 64 stands for prefill, capture and verification, where the formats differ; one token at a time is
    limited by memory, where bfloat16 is never behind by much.
    """
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    best: dict[torch.dtype, float] = {}
    operands = {
        dtype: (
            torch.ones(rows, hidden, dtype=dtype, device=device),
            torch.ones(inner, hidden, dtype=dtype, device=device),
        )
        for dtype in (torch.float32, torch.bfloat16)
    }
    for _ in range(8):
        for dtype, (left, right) in operands.items():
            start = time.perf_counter()
            for _ in range(20):
                torch.nn.functional.linear(left, right)
            seconds = time.perf_counter() - start
            best[dtype] = min(best.get(dtype, seconds), seconds)
    return min(best, key=lambda dtype: best[dtype])
