"""A device's own name finds the machine that describes it."""

import pytest

from deepspec.config.machines import flops_of


@pytest.mark.parametrize(
    ("name", "flops"),
    [  # dense bfloat16, as NVIDIA's data sheets have it
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("Tesla T4", None),
    ],
)
def test_the_rate_of_a_named_device(name: str, flops: float | None) -> None:
    assert flops_of(name) == (flops if flops is None else pytest.approx(flops, rel=0.01))
