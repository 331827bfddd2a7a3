"""What this machine computes with, by name."""

import platform
from pathlib import Path

import torch


def device_name(device: torch.device) -> str:
    """The accelerator's own name, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def cpu_name() -> str:
    """The processor's model name as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith(("model name", "Model", "Hardware")):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
