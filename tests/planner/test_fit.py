"""Where weights fit: the rule of `plan_memory` for the whole catalog, and sizes that agree with published ones."""

from __future__ import annotations

import pytest

from flexgen_helm.checkpoint.catalog import CATALOG
from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.models.config import tensor_shapes
from flexgen_helm.planner.placement import Machine, StorageSizes, Tier
from flexgen_helm.planner.weight_placement import fit, place_weights, weight_bytes
from flexgen_helm.quant.packing import quantize
from flexgen_helm.quant.precisions import PRECISIONS
from tests.helpers.shares import share

GIB = 1 << 30
MACHINES: list[dict[Tier, int]] = [
    {"gpu": 0, "cpu": 4 * GIB, "disk": 60 * GIB},
    {"gpu": 0, "cpu": 60 * GIB, "disk": 400 * GIB},
    {"gpu": 15 * GIB, "cpu": 40 * GIB, "disk": 200 * GIB},
    {"gpu": 0, "cpu": 1 << 20, "disk": GIB},
]


@pytest.mark.fast(1)
@pytest.mark.parametrize("limits", MACHINES)
@pytest.mark.parametrize("precision", ["fp16", pytest.param("4bit", marks=pytest.mark.slow)])
def test_it_is_what_the_engine_would_do(limits: dict[Tier, int], precision: str) -> None:
    seen = set()
    distinct = [name for name in CATALOG if not name.endswith(("-it", "-base", "-instruct", "-chat", "-deduped"))]
    for name in share(distinct, 3):
        config = CATALOG[name].config
        found = fit(config, PRECISIONS[precision], limits)
        seen.add(found)
        compute: Tier = "gpu" if limits["gpu"] else "cpu"
        storage = StorageSizes(config, PRECISIONS[precision])
        try:
            machine = Machine(limits, compute, "float16" if limits["gpu"] else "float32")
            used = set(place_weights(storage, machine).weights.values())
        except MemoryLimitError as error:
            assert found == ("too large for the disk" if "the disk tier" in str(error) else "too large for the memory")
        else:
            slowest = "disk" if "disk" in used else "cpu" if "cpu" in used else "gpu"
            assert found == {"disk": "offloaded to disk", "cpu": "in memory", "gpu": "in GPU memory"}[slowest], name
    assert len(seen) > 1 or limits["cpu"] < GIB


def test_a_download_takes_its_room_on_the_disk() -> None:
    config, limits = CATALOG["opt-6.7b"].config, MACHINES[1]
    assert fit(config, PRECISIONS["fp16"], limits, 300 * GIB) == "in memory"
    assert fit(config, PRECISIONS["fp16"], limits, 401 * GIB) == "too large for the disk"


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
