"""Memory limits, and the policies that fill them, of benchmarks that compare runs under the same limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.planner.placement import Machine, StorageSizes, Tier
from flexgen_helm.planner.policy import Policy
from flexgen_helm.planner.weight_placement import place_weights

STORAGE_BYTES, COMPUTE_BYTES = 2, 4  # of a weight's and an activation's element
_NO_LIMIT = 1 << 50


def offload_setting(
    config: ModelConfig, rows: int, prompt: int, output: int, share: float, batches: int = 1
) -> tuple[int, Policy]:
    """Return a limit of host memory, `share` of the weights plus the cache of `rows` sequences, and a policy for it.

    The staging ring and hidden states take their memory from the weights' part; hidden states that do not fit wait on
    disk.
    """
    cache = block_cache_bytes(config, rows, prompt + output - 1)
    hidden = hidden_bytes(config, rows, prompt)
    limit = int(share * config.num_parameters * STORAGE_BYTES) + cache
    policy = Policy(math.ceil(rows / batches), batches, wc=0.0, hc=0.0)
    storage = StorageSizes(config)
    limits: dict[Tier, int] = {"gpu": 0, "cpu": limit, "disk": _NO_LIMIT}
    staging = place_weights(storage, Machine(limits, "cpu"), policy).all_staging_bytes
    reserve = cache
    if limit - cache - staging - storage.vector_bytes(COMPUTE_BYTES) >= hidden:
        policy, reserve = replace(policy, hc=1.0), cache + hidden
    policies = [replace(policy, wc=percent / 100) for percent in range(50, -1, -1)]  # at least half is streamed
    return limit, first_that_fits(storage, limits, "cpu", reserve, policies)


def in_memory_limit(config: ModelConfig, rows: int, prompt: int, output: int) -> int:
    """Return a host memory limit for the same block with all weights in memory.

    It leaves room for weights in the compute dtype, which may take half of a tier. It may exceed the machine's memory:
    two half blocks would be no comparison.
    """
    cache = block_cache_bytes(config, rows, prompt + output - 1)
    return 2 * COMPUTE_BYTES * config.num_parameters + cache + hidden_bytes(config, rows, prompt)


def first_that_fits(
    storage: StorageSizes, limits: Mapping[Tier, int], device: Tier, reserve: int, policies: Sequence[Policy]
) -> Policy:
    """Return the first policy that leaves `reserve` bytes of the compute device's tier free.

    policies: with fewer and fewer resident weights. Raises `MemoryLimitError` if none fits.
    """
    for policy in policies:
        with suppress(MemoryLimitError):
            plan = place_weights(storage, Machine(limits, device), policy)
            resident = sum(storage.matrices[name] for name, tier in plan.weights.items() if tier == device)
            if resident + storage.vector_bytes(COMPUTE_BYTES) + plan.all_staging_bytes + reserve <= limits[device]:
                return policy
    raise MemoryLimitError(
        f"{limits[device]:,} bytes have no room for a staging ring of the weights and {reserve:,} bytes of cache"
    )


def block_cache_bytes(config: ModelConfig, rows: int, tokens: int) -> int:
    return rows * tokens * 2 * config.num_cache_layers * config.kv_size * COMPUTE_BYTES


def hidden_bytes(config: ModelConfig, rows: int, prompt: int) -> int:
    return rows * prompt * config.hidden_size * COMPUTE_BYTES
