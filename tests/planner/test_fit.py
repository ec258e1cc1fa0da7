"""Where weights fit: the rule of `plan_memory` for the whole catalog, and sizes that agree with
published ones.
"""

from math import prod

import pytest

from flexgen_helm.checkpoint.catalog import CATALOG
from flexgen_helm.checkpoint.names import planned_precision
from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.models.config import expert_of, tensor_shapes
from flexgen_helm.planner.fit import fit, weight_bytes
from flexgen_helm.planner.machine import Machine
from flexgen_helm.planner.staging import expert_slot_bytes
from flexgen_helm.planner.storage_sizes import StorageSizes, storage_sizes
from flexgen_helm.planner.weight_placement import place_weights
from flexgen_helm.quant.precisions import PRECISIONS
from flexgen_helm.tiers import UNLIMITED

GIB = 1 << 30
MACHINES = [
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
def test_it_is_the_slowest_tier_with_a_share(name, precision, machine, expected):
    assert fit(CATALOG[name].config, PRECISIONS[precision], MACHINES[machine]) == expected


def _cases():
    """Return the distinct models of the catalog in two precisions, with the formats of published
    ones.
    """
    cases = {
        (entry.config, planned_precision(name, precision)): None
        for name, entry in CATALOG.items()
        for precision in ("fp16", "4bit")
    }
    return list(cases)


@pytest.mark.slow
def test_sizes_by_kind_of_layer_are_those_of_the_single_tensors():
    for config, precision in _cases():
        sizes, shapes = StorageSizes(config, precision), tensor_shapes(config)
        matrices = {
            name: sizes.num_bytes(name, shape) for name, shape in shapes.items() if len(shape) > 1
        }
        vectors = {name: shape[0] for name, shape in shapes.items() if len(shape) == 1}
        slots = {}
        for name, size in matrices.items():
            if expert := expert_of(name):
                slots[expert] = slots.get(expert, 0) + (size + 2 * 4096 - 1) // 4096 * 4096
        assert weight_bytes(config, precision) == sizes.matrix_bytes + sizes.vector_bytes(2)
        assert sizes.matrix_bytes == sum(matrices.values())
        assert sizes.largest_matrix == max(matrices.values())
        assert sizes.num_values == sum(prod(shapes[name]) for name in matrices)
        assert sizes.vector_bytes(2) == sum(
            (4 if config.has_float32(name) else 2) * n for name, n in vectors.items()
        )
        assert config.num_parameters == sizes.num_values + sum(vectors.values())
        assert expert_slot_bytes(sizes) == max(slots.values(), default=0)


@pytest.mark.slow
@pytest.mark.parametrize("limits", MACHINES)
def test_it_is_where_placing_every_matrix_leaves_them(limits):
    tier = "gpu" if limits["gpu"] else "cpu"
    machine = Machine(
        {**limits, "disk": UNLIMITED}, tier, "float16" if limits["gpu"] else "float32"
    )
    for config, precision in _cases():
        try:
            placed = place_weights(storage_sizes(config, precision), machine)
        except MemoryLimitError:
            expected = "too large for the memory"
        else:
            num_bytes = sum(placed.bytes_on("disk").values())
            in_memory = (
                "in GPU memory" if limits["gpu"] and not placed.bytes_on("cpu") else "in memory"
            )
            expected = "offloaded to disk" if num_bytes else in_memory
            expected = "too large for the disk" if num_bytes > limits["disk"] else expected
        assert fit(config, precision, limits) == expected, config
