"""Machines that `conf/hardware` describes, found by what a device calls itself."""

from typing import Any

from omegaconf import OmegaConf

from deepspec.config.search import shipped


def flops_of(device_name: str) -> float | None:
    """Dense operations a second of the described device whose name is in `device_name` (`NVIDIA H100 80GB HBM3`), the
    longest such name; None: it is not described."""
    written = "".join(letter for letter in device_name.lower() if letter.isalnum())
    described: list[Any] = [OmegaConf.load(path) for path in (shipped("conf") / "hardware").glob("*.yaml")]
    found = [
        one for one in described if one.get("devices", 1) == 1 and one.get("flops") and one.name in written
    ]
    return float(max(found, key=lambda one: len(one.name)).flops) if found else None
