"""Where weights fit: the rule of `plan_memory` for the whole catalog, and sizes that agree with published ones."""

from __future__ import annotations

import pytest

from flexgen_helm.checkpoint.catalog import CATALOG
from flexgen_helm.models.config import tensor_shapes
from flexgen_helm.planner.placement import Tier
from flexgen_helm.planner.weight_placement import fit, weight_bytes
from flexgen_helm.quant.packing import quantize
from flexgen_helm.quant.precisions import PRECISIONS

GIB = 1 << 30
MACHINES: list[dict[Tier, int]] = [
    {"gpu": 0, "cpu": 4 * GIB, "disk": 60 * GIB},
    {"gpu": 0, "cpu": 60 * GIB, "disk": 400 * GIB},
    {"gpu": 15 * GIB, "cpu": 40 * GIB, "disk": 200 * GIB},
    {"gpu": 0, "cpu": 1 << 20, "disk": GIB},
]


@pytest.mark.parametrize(
    "name, precision, machine, expected",
    [
        ("opt-125m", "fp16", 0, "in memory"),
        ("opt-6.7b", "fp16", 0, "offloaded to disk"),
        ("opt-66b", "fp16", 0, "too large for the disk"),
        ("opt-125m", "fp16", 3, "too large for the memory"),
        ("opt-6.7b", "fp16", 2, "in GPU memory"),
        ("opt-30b", "4bit", 2, "in memory"),
        ("opt-66b", "fp16", 2, "offloaded to disk"),
    ],
)
def test_it_is_the_slowest_tier_with_a_share(name: str, precision: str, machine: int, expected: str) -> None:
    assert fit(CATALOG[name].config, PRECISIONS[precision], MACHINES[machine]) == expected


@pytest.mark.slow
def test_sizes_are_those_of_the_bytes_that_are_stored() -> None:
    """Two bytes a parameter, and in 4 bits what packing the real tensors takes."""
    torch = pytest.importorskip("torch")
    config = CATALOG["opt-125m"].config
    assert weight_bytes(config, PRECISIONS["fp16"]) == 2 * config.num_parameters
    precision, total = PRECISIONS["4bit"], 0
    for name, shape in tensor_shapes(config).items():
        fmt = precision.format_of(name) if len(shape) == 2 else None
        weights = torch.zeros(shape)
        total += 2 * weights.numel() if fmt is None else quantize(weights, fmt).nbytes
    assert weight_bytes(config, precision) == total
