"""Where the rule of thumb leaves the weights of each model on a machine: for lists of models, which
plan no run. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Literal

from flexgen_helm.models.config import ModelConfig
from flexgen_helm.planner.least_memory import sequence_bytes
from flexgen_helm.planner.machine import Machine
from flexgen_helm.planner.staging import staging_sizes
from flexgen_helm.planner.storage_sizes import storage_sizes
from flexgen_helm.planner.weight_placement import left_beside_all, missing_bytes, rule_of_thumb
from flexgen_helm.quant.precisions import Precision
from flexgen_helm.tiers import UNLIMITED, Tier

Fit = Literal[
    "in GPU memory",
    "in memory",
    "offloaded to disk",
    "too large for the memory",
    "too large for the disk",
]
# Bytes of a published value.
_STORED_BYTES = 2
_COMPUTE_DTYPES = {"gpu": "float16", "cpu": "float32"}


@cache
def weight_bytes(config: ModelConfig, precision: Precision) -> int:
    """Return the bytes of all weights as stored."""
    storage = storage_sizes(config, precision)
    return storage.matrix_bytes + storage.vector_bytes(_STORED_BYTES)


def fit(
    config: ModelConfig, precision: Precision, limits: Mapping[Tier, int], fetched_bytes: int = 0
) -> Fit:
    """Say which tier is the slowest that takes weights, by the engine's rule of thumb.

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
def _offloaded_bytes(
    config: ModelConfig, precision: Precision, gpu: int, cpu: int
) -> dict[Tier, int] | None:
    """Return the bytes of weights in host memory and on the disk; None if the memory is too small
    to stage them.
    """
    compute_tier: Tier = "gpu" if gpu else "cpu"
    model = storage_sizes(config, precision)
    limits: dict[Tier, int] = {"gpu": gpu, "cpu": cpu, "disk": UNLIMITED}
    machine = Machine(limits, compute_tier, _COMPUTE_DTYPES[compute_tier])
    nothing: dict[Tier, int] = {"cpu": 0, "disk": 0}
    # As `place_weights` decides, but for one matrix; most models need no rule of thumb.
    left = left_beside_all(model, machine)
    if left >= sequence_bytes(model, machine.compute_bytes):
        return nothing
    shares = rule_of_thumb(model, machine)
    bytes_by_tier = {tier: int(share * model.matrix_bytes) for tier, share in shares.items()}
    staging = staging_sizes(model, machine.compute_limit).num_bytes
    if missing_bytes(model, machine, bytes_by_tier, staging):
        return nothing if left >= 0 else None  # they fit, only without room for a sequence
    return {"cpu": bytes_by_tier["cpu"] if machine.has_gpu else 0, "disk": bytes_by_tier["disk"]}
