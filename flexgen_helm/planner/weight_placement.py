"""Place the weights when a model is loaded: by a policy, or by a rule of thumb where none is known.

The rule of thumb:

- Weights that fit on the compute tier stay there: in the compute dtype if half of the tier is
  enough, else as stored.
  A host whose products read matrices as they rest keeps all as stored.
- Otherwise a staging ring (`staging_sizes`) is set aside. Of the rest, weights take half (three
  quarters on a gpu, whose cache goes to the host). The next weights take half of the host's limit,
  the others go to the disk. Of a mixture, experts go to the slowest tiers.
- The cache is on the compute tier of a machine without a gpu, and in host memory of one with a gpu.

No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.files import exact_size
from flexgen_helm.models.config import expert_of
from flexgen_helm.planner.cache_sizes import cache_sizes
from flexgen_helm.planner.placement import (
    Machine,
    StorageSizes,
    achieved_fractions,
    choose_tiers,
    loader_buffer_bytes,
    staging_sizes,
    tier_fractions,
)
from flexgen_helm.planner.policy import Policy
from flexgen_helm.tiers import COPIES_SHARE, KINDS, TIERS, Fractions, Tier, limit_flag

# Share of the compute tier for resident weights if not all of them fit. A gpu's cache goes to the
# host.
_WEIGHTS_SHARE: Mapping[Tier, float] = {"gpu": 0.75, "cpu": 0.5}
# Share of host memory for the next weights of a gpu.
_HOST_WEIGHTS_SHARE = 0.5
# Positions of a sequence that has room on the compute tier whatever the weights are: a prompt of a
# few examples.
_LEAST_POSITIONS = 512
# Share of the experts below which none stays on the compute tier.
_FEW_EXPERTS = 0.1


@dataclass(frozen=True)
class Placement:
    """Where the weights of a model rest on a machine, and where a run's cache and hidden states go
    if nothing is found.

    weights: matrix name -> tier. Vectors are not named: they are on the compute tier.
    cache, activations: fractions by tier.
    staging_bytes: size of the staging ring, 0 if all weights are resident.
    compute_copies: resident matrices are kept in the compute dtype.
    expert_bytes: of the slots for offloaded experts.
    """

    model: StorageSizes
    machine: Machine
    weights: Mapping[str, Tier]
    cache: Fractions
    activations: Fractions
    staging_bytes: int
    compute_copies: bool
    expert_bytes: int = 0

    @cached_property
    def shares(self) -> Fractions:
        """Fractions of the weights by tier, as placed."""
        return achieved_fractions(self.model.matrices, self.weights)

    def bytes_on(self, tier: Tier) -> dict[str, int]:
        """Return the matrices of a tier and their bytes as stored."""
        return {
            name: self.model.matrices[name] for name in self.weights if self.weights[name] == tier
        }

    @property
    def streams_weights(self) -> bool:
        return self.all_staging_bytes > 0

    @property
    def all_staging_bytes(self) -> int:
        return self.staging_bytes + self.expert_bytes


def place_weights(model: StorageSizes, machine: Machine, policy: Policy | None = None) -> Placement:
    """Place the weights by a policy, or by the rule of thumb.

    policy: without a gpu its gpu shares go to the cpu.

    Raises `MemoryLimitError` with the missing bytes if the weights with their staging ring exceed a
    tier.
    """
    if policy is None:
        plan = _by_rule(model, machine)
    else:
        shares = (tier_fractions(policy, kind, machine.has_gpu) for kind in KINDS)
        plan = _placed(model, machine, *shares)
    for tier, num_bytes in _missing_of(plan).items():
        raise MemoryLimitError(
            f"the {tier} tier is limited to {exact_size(machine.limits[tier])}, and the weights "
            f"with their staging need {exact_size(num_bytes)} more there: raise {limit_flag(tier)}"
        )
    return plan


def _by_rule(model: StorageSizes, machine: Machine) -> Placement:
    on_compute_tier: Fractions = {tier: float(tier == machine.compute_tier) for tier in TIERS}
    resident = _placed(model, machine, *[on_compute_tier] * 3)
    left = left_beside_all(model, machine)
    if left >= sequence_bytes(model, machine.compute_bytes):
        return resident
    in_host_memory: Fractions = {tier: float(tier == "cpu") for tier in TIERS}
    weights = rule_of_thumb(model, machine)
    plan = _placed(model, machine, weights, in_host_memory, on_compute_tier)
    # resident weights may leave little room for a run, but these cannot be streamed either
    return resident if left >= 0 and _missing_of(plan) else plan


def _placed(
    model: StorageSizes,
    machine: Machine,
    weights: Fractions,
    cache: Fractions,
    activations: Fractions,
) -> Placement:
    """Place whole matrices by these fractions."""
    placed = choose_tiers(model.matrices, weights)
    used = staging_sizes(model, machine.compute_limit).used(placed, machine.compute_tier)
    copies = not used.num_bytes and keeps_copies(model, machine)
    return Placement(model, machine, placed, cache, activations, used.ring, copies, used.experts)


def left_beside_all(model: StorageSizes, machine: Machine) -> int:
    """Return what all weights leave free of the compute tier; negative where they have no room."""
    beside = model.vector_bytes(machine.compute_bytes)
    return machine.compute_limit - model.matrix_bytes - beside


def _missing_of(plan: Placement) -> dict[Tier, int]:
    model, machine = plan.model, plan.machine
    weight_bytes = {tier: sum(plan.bytes_on(tier).values()) for tier in TIERS}
    if plan.compute_copies:  # all weights are resident
        weight_bytes[machine.compute_tier] = model.num_values * machine.compute_bytes
    return missing_bytes(model, machine, weight_bytes, plan.all_staging_bytes)


def missing_bytes(
    model: StorageSizes, machine: Machine, weight_bytes: Mapping[Tier, int], staging_bytes: int
) -> dict[Tier, int]:
    """Return the bytes that tiers lack for matrices, vectors, and what loading takes."""
    needed = dict(weight_bytes)
    needed[machine.compute_tier] += model.vector_bytes(machine.compute_bytes) + staging_bytes
    if needed["disk"]:
        needed["cpu"] += loader_buffer_bytes(model, machine.has_gpu)
    limits = machine.limits
    return {tier: needed[tier] - limits[tier] for tier in TIERS if needed[tier] > limits[tier]}


def rule_of_thumb(model: StorageSizes, machine: Machine) -> Fractions:
    """Return the fractions by tier of weights that the compute tier does not hold."""
    compute_tier, compute_bytes = machine.compute_tier, machine.compute_bytes
    total = model.matrix_bytes
    room = machine.compute_limit - staging_sizes(model, machine.compute_limit).num_bytes
    room -= sequence_bytes(model, compute_bytes)
    room -= 0 if machine.has_gpu else loader_buffer_bytes(model, has_gpu=False)
    near = max(0.0, _WEIGHTS_SHARE[compute_tier] * room - model.vector_bytes(compute_bytes)) / total
    near = min(1.0, near)
    on_host = (
        min(1.0 - near, _HOST_WEIGHTS_SHARE * machine.limits["cpu"] / total)
        if machine.has_gpu
        else 0.0
    )
    return {"gpu": 0.0, "cpu": on_host, "disk": 1.0 - near - on_host, compute_tier: near}


def keeps_copies(model: StorageSizes, machine: Machine) -> bool:
    """Return whether weights that are all resident are kept in the compute dtype: if that is of
    use, and they fit.
    """
    if machine.multiplied_as_stored is not None:
        return False
    needed = model.num_values * machine.compute_bytes + model.vector_bytes(machine.compute_bytes)
    return needed <= COPIES_SHARE * machine.compute_limit


def leaving_room(policy: Policy, model: StorageSizes, machine: Machine) -> Policy:
    """Return a searched policy with so few weights on the compute tier that a sequence can run
    beside them.

    A search has room for the requests that it assumes, in sizes that whole matrices exceed.
    """
    has_gpu, total = machine.has_gpu, model.matrix_bytes
    while (share := policy.wg if has_gpu else policy.wc) and (
        excess := _excess_bytes(policy, model, machine)
    ) > 0:
        less = min(share, max(0.001, excess / total))
        if not has_gpu:
            policy = replace(policy, wc=share - less)
            continue
        room = max(0.0, _HOST_WEIGHTS_SHARE * machine.limits["cpu"] / total - policy.wc)
        policy = replace(policy, wg=share - less, wc=policy.wc + min(less, room))
    return policy


def _excess_bytes(policy: Policy, model: StorageSizes, machine: Machine) -> int:
    """Return the bytes of weights that must leave the compute tier; 0 or less for none.

    Few experts on the compute tier are moved off too: the memory helps hidden states more.
    """
    placed = choose_tiers(model.matrices, tier_fractions(policy, "weights", machine.has_gpu))
    near = {
        name: size for name, size in model.matrices.items() if placed[name] == machine.compute_tier
    }
    taken = sum(near.values())
    if taken in (0, model.matrix_bytes):
        return 0
    staging = staging_sizes(model, machine.compute_limit).num_bytes
    beside = _vectors_and_sequence_bytes(model, machine.compute_bytes) + staging
    excess = taken + beside - machine.compute_limit
    experts = sum(size for name, size in near.items() if expert_of(name))
    if experts < _FEW_EXPERTS * sum(stage.expert_bytes for stage in model.stages.values()):
        excess = max(excess, experts)
    return excess


def sequence_bytes(model: StorageSizes, compute_bytes: int) -> int:
    """Return what weights leave free on the compute tier, so that a sequence of `_LEAST_POSITIONS`
    can run at least.

    It counts two layers of its cache, its states, and its hidden states; the cache may be on any
    tier.
    """
    config = model.config
    sizes = cache_sizes(config, model.precision.cache, compute_bytes, on_disk=True)
    positions = min(_LEAST_POSITIONS, config.max_positions)
    hidden_bytes = config.hidden_elements * compute_bytes
    beside = sizes.state_bytes + 2 * sizes.layer_window_bytes
    return beside + positions * (2 * sizes.layer_bytes_per_token + hidden_bytes)


def _vectors_and_sequence_bytes(model: StorageSizes, compute_bytes: int) -> int:
    """Return the bytes of the compute tier that vectors and a short sequence take."""
    return model.vector_bytes(compute_bytes) + sequence_bytes(model, compute_bytes)


def least_limit(model: StorageSizes, compute_bytes: int) -> int:
    """Return the bytes with which a sequence of some hundred tokens runs, its weights streamed or
    resident.

    compute_bytes: of an element in the compute dtype.
    """
    beside = _vectors_and_sequence_bytes(model, compute_bytes)
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
