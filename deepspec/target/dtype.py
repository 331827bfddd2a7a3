"""Which number format is faster here: measured in about a second, not guessed from a processor's name."""

import time

import torch

CALLS = 20  # of the multiplication, in each timing


def probe_dtype(device: torch.device, hidden: int = 576, inner: int = 1536, rows: int = 64) -> torch.dtype:
    """bfloat16 or float32, whichever multiplies `rows` × hidden × inner faster on `device` (alternating runs).

    Prints one line with what was measured.

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
            for _ in range(CALLS):
                torch.nn.functional.linear(left, right)
            seconds = time.perf_counter() - start
            best[dtype] = min(best.get(dtype, seconds), seconds)
    fastest = min(best, key=lambda dtype: best[dtype])
    times = ", ".join(f"{_name(dtype)} {1e3 * seconds / CALLS:.2f} ms" for dtype, seconds in best.items())
    print(
        f"target.dtype=auto: {times} for {rows} rows × {hidden} × {inner}; taking {_name(fastest)}",
        flush=True,
    )
    return fastest


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
