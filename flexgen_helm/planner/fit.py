"""Where the weights of a model fit on a machine, without a plan of a run. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Literal

from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.planner.machine import Machine
from flexgen_helm.planner.placement import StorageSizes, Tier
from flexgen_helm.planner.weight_placement import least_run_bytes, place_weights
from flexgen_helm.quant.precisions import Precision

Fit = Literal["in GPU memory", "in memory", "offloaded to disk", "too large for the memory", "too large for the disk"]
# Of a published value, and of a value in the compute dtype: float32 on a CPU.
_STORED_BYTES, _COMPUTE_DTYPES = 2, {"gpu": "float16", "cpu": "float32"}
_BOUNDLESS = 1 << 62


# Reads tensor sizes once; tunes of a model share them.
_storage = cache(StorageSizes)


@cache
def weight_bytes(config: ModelConfig, precision: Precision) -> int:
    """Return the bytes of all weights as stored."""
    storage = _storage(config, precision)
    return sum(storage.matrices.values()) + storage.vector_bytes(_STORED_BYTES)


def fit(config: ModelConfig, precision: Precision, limits: Mapping[Tier, int], fetched_bytes: int = 0) -> Fit:
    """Return the slowest tier that takes a share of the weights, by the engine's rule of thumb.

    limits: bytes of each tier; 0 on a machine without a gpu.
    fetched_bytes: that a download takes of the disk first.
    """
    offloaded = _offloaded_bytes(config, precision, limits["gpu"], limits["cpu"])
    if offloaded is None:
        return "too large for the memory"
    if offloaded["disk"] + fetched_bytes > limits["disk"]:
        return "too large for the disk"
    if offloaded["disk"]:
        return "offloaded to disk"
    return "in GPU memory" if limits["gpu"] and not offloaded["cpu"] else "in memory"


@cache
def _offloaded_bytes(config: ModelConfig, precision: Precision, gpu: int, cpu: int) -> dict[Tier, int] | None:
    """Return the bytes of weights in host memory and on the disk; None if the memory is too small to stage them."""
    compute_tier: Tier = "gpu" if gpu else "cpu"
    storage = _storage(config, precision)
    limits: dict[Tier, int] = {"gpu": gpu, "cpu": cpu, "disk": _BOUNDLESS}
    machine, sizes = Machine(limits, compute_tier, _COMPUTE_DTYPES[compute_tier]), storage.matrices
    # As `place_weights` decides; most models end here.
    beside = storage.vector_bytes(machine.compute_bytes) + least_run_bytes(storage, machine.compute_bytes)
    if sum(sizes.values()) + beside <= (gpu or cpu):
        return {"cpu": 0, "disk": 0}
    try:
        placed = place_weights(storage, machine).weights
    except MemoryLimitError:
        return None
    tiers: tuple[Tier, ...] = ("cpu", "disk")
    return {tier: sum(size for name, size in sizes.items() if placed[name] == tier) for tier in tiers}
