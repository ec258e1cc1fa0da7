"""The least memory with which a model runs at all: a short sequence, and weights that are streamed.
No torch.
"""

from __future__ import annotations

from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.files import exact_size
from flexgen_helm.planner.cache_sizes import cache_sizes
from flexgen_helm.planner.machine import Machine
from flexgen_helm.planner.staging import staging_sizes
from flexgen_helm.planner.storage_sizes import StorageSizes
from flexgen_helm.tiers import limit_flag

# Positions of a sequence that has room on the compute tier whatever the weights are: a prompt of a
# few examples.
_LEAST_POSITIONS = 512


def sequence_bytes(model: StorageSizes, compute_bytes: int) -> int:
    """Return what weights leave free on the compute tier, so that a sequence of `_LEAST_POSITIONS`
    can run at least.

    It counts two layers of its cache, its states, and its hidden states; the cache may be on any
    tier.
    """
    config = model.config
    sizes = cache_sizes(config, model.precision.cache, compute_bytes, on_disk=True)
    positions = min(_LEAST_POSITIONS, config.max_positions)
    hidden_bytes = config.state_size * compute_bytes
    beside = sizes.state_bytes + 2 * sizes.layer_window_bytes
    return beside + positions * (2 * sizes.layer_bytes_per_token + hidden_bytes)


def vectors_and_sequence_bytes(model: StorageSizes, compute_bytes: int) -> int:
    """Return the bytes of the compute tier that vectors and a short sequence take."""
    return model.vector_bytes(compute_bytes) + sequence_bytes(model, compute_bytes)


def least_limit(model: StorageSizes, compute_bytes: int) -> int:
    """Return the bytes with which a sequence of some hundred tokens runs, its weights streamed or
    resident.

    compute_bytes: of an element in the compute dtype.
    """
    beside = vectors_and_sequence_bytes(model, compute_bytes)
    limit = beside
    # The staging ring grows with the limit, by less than the half of it.
    while (needed := beside + staging_sizes(model, limit).num_bytes) > limit:
        limit = needed
    return min(limit, beside + model.matrix_bytes)


def require_least_memory(model: StorageSizes, machine: Machine, name: str) -> None:
    """Raise `MemoryLimitError` with all that a run needs, if not even the weights can pass through
    the compute tier.

    What is only short of room for a long sequence passes: a run may have short ones.
    """
    limit, staging = machine.compute_limit, staging_sizes(model, machine.compute_limit).num_bytes
    vector_bytes = model.vector_bytes(machine.compute_bytes)
    if limit < vector_bytes + min(staging, model.matrix_bytes):
        least = least_limit(model, machine.compute_bytes)
        tier = machine.compute_tier
        if machine.has_gpu:  # computing may have a third of the limit
            least += -(-least // 2)
        raise MemoryLimitError(
            f"the {tier} tier is limited to {exact_size(limit)}, and {name} runs with "
            f"{exact_size(least)} or more there, for its staging and a sequence of some hundred "
            f"tokens: raise {limit_flag(tier)}"
        )
