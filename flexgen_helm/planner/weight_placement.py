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
from flexgen_helm.models.config import expert_of
from flexgen_helm.planner.least_memory import sequence_bytes, vectors_and_sequence_bytes
from flexgen_helm.planner.machine import Machine
from flexgen_helm.planner.placement import achieved_fractions, choose_tiers
from flexgen_helm.planner.policy import Policy
from flexgen_helm.planner.staging import StagingSizes, loader_buffer_bytes, staging_sizes
from flexgen_helm.planner.storage_sizes import StorageSizes
from flexgen_helm.shared_sizes import COPIES_SHARE
from flexgen_helm.tiers import KINDS, TIERS, Fractions, Tier, limit_flag
from flexgen_helm.units import exact_size

# Share of the compute tier for resident weights if not all of them fit. A gpu's cache goes to the
# host.
_WEIGHTS_SHARE: Mapping[Tier, float] = {"gpu": 0.75, "cpu": 0.5}
# Share of host memory for the next weights of a gpu.
_HOST_WEIGHTS_SHARE = 0.5
# Share of the experts below which none stays on the compute tier.
_FEW_EXPERTS = 0.1


@dataclass(frozen=True)
class Placement:
    """Where the weights of a model rest on a machine, and where a run's cache and hidden states go
    if nothing is found.

    weights: matrix name -> tier. Vectors are not named: they are on the compute tier.
    cache, activations: fractions by tier.
    staging: of offloaded weights; no bytes if all weights are resident.
    compute_copies: resident matrices are kept in the compute dtype.
    """

    model: StorageSizes
    machine: Machine
    weights: Mapping[str, Tier]
    cache: Fractions
    activations: Fractions
    staging: StagingSizes
    compute_copies: bool

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
        return self.staging.num_bytes > 0


def place_weights(model: StorageSizes, machine: Machine, policy: Policy | None = None) -> Placement:
    """Place the weights by a policy, or by the rule of thumb.

    policy: without a gpu its gpu shares go to the cpu.

    Raises `MemoryLimitError` with the missing bytes if the weights with their staging ring exceed a
    tier.
    """
    if policy is None:
        placement = _by_rule(model, machine)
    else:
        shares = (policy.tier_fractions(kind, machine.has_gpu) for kind in KINDS)
        placement = _placed(model, machine, *shares)
    for tier, num_bytes in _missing_of(placement).items():
        raise MemoryLimitError(
            f"the {tier} tier is limited to {exact_size(machine.limits[tier])}, and the weights "
            f"with their staging need {exact_size(num_bytes)} more there: raise {limit_flag(tier)}"
        )
    return placement


def _by_rule(model: StorageSizes, machine: Machine) -> Placement:
    """Place the weights by the rule of thumb."""
    on_compute_tier: Fractions = {tier: float(tier == machine.compute_tier) for tier in TIERS}
    resident = _placed(model, machine, *[on_compute_tier] * 3)
    left = left_beside_all(model, machine)
    if left >= sequence_bytes(model, machine.compute_bytes):
        return resident
    in_host_memory: Fractions = {tier: float(tier == "cpu") for tier in TIERS}
    weights = rule_of_thumb(model, machine)
    streamed = _placed(model, machine, weights, in_host_memory, on_compute_tier)
    # resident weights may leave little room for a run, but these cannot be streamed either
    return resident if left >= 0 and _missing_of(streamed) else streamed


def _placed(
    model: StorageSizes,
    machine: Machine,
    weights: Fractions,
    cache: Fractions,
    activations: Fractions,
) -> Placement:
    """Place whole matrices by these fractions."""
    placed = choose_tiers(model.matrices, weights)
    staging = staging_sizes(model, machine.compute_limit).used(placed, machine.compute_tier)
    copies = not staging.num_bytes and keeps_copies(model, machine)
    return Placement(model, machine, placed, cache, activations, staging, copies)


def left_beside_all(model: StorageSizes, machine: Machine) -> int:
    """Return what all weights leave free of the compute tier; negative where they have no room."""
    beside = model.vector_bytes(machine.compute_bytes)
    return machine.compute_limit - model.matrix_bytes - beside


def _missing_of(placement: Placement) -> dict[Tier, int]:
    """Return the bytes that tiers lack for a placement."""
    model, machine = placement.model, placement.machine
    weight_bytes = {tier: sum(placement.bytes_on(tier).values()) for tier in TIERS}
    if placement.compute_copies:  # all weights are resident
        weight_bytes[machine.compute_tier] = model.num_values * machine.compute_bytes
    return missing_bytes(model, machine, weight_bytes, placement.staging.num_bytes)


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
    """Return the fractions by tier of weights of which the compute tier cannot have all."""
    compute_tier, compute_bytes = machine.compute_tier, machine.compute_bytes
    total = model.matrix_bytes
    room = machine.compute_limit - staging_sizes(model, machine.compute_limit).num_bytes
    room -= sequence_bytes(model, compute_bytes)
    room -= 0 if machine.has_gpu else loader_buffer_bytes(model, has_gpu=False)
    for_matrices = _WEIGHTS_SHARE[compute_tier] * room - model.vector_bytes(compute_bytes)
    resident = min(1.0, max(0.0, for_matrices) / total)
    on_host = (
        min(1.0 - resident, _HOST_WEIGHTS_SHARE * machine.limits["cpu"] / total)
        if machine.has_gpu
        else 0.0
    )
    return {"gpu": 0.0, "cpu": on_host, "disk": 1.0 - resident - on_host, compute_tier: resident}


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
    placed = choose_tiers(model.matrices, policy.tier_fractions("weights", machine.has_gpu))
    resident = {
        name: size for name, size in model.matrices.items() if placed[name] == machine.compute_tier
    }
    resident_bytes = sum(resident.values())
    if resident_bytes in (0, model.matrix_bytes):
        return 0
    staging = staging_sizes(model, machine.compute_limit).num_bytes
    beside = vectors_and_sequence_bytes(model, machine.compute_bytes) + staging
    excess = resident_bytes + beside - machine.compute_limit
    experts = sum(size for name, size in resident.items() if expert_of(name))
    if experts < _FEW_EXPERTS * sum(stage.expert_bytes for stage in model.stages.values()):
        excess = max(excess, experts)
    return excess
