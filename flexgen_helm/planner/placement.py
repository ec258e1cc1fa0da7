"""Whole tensors placed on tiers, and the sizes that follow from a model and a machine.

In order: sizes of tensors, their tiers, staging of offloaded weights, and the machine. No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import NamedTuple

from flexgen_helm.models.config import EMBED, HEAD, ModelConfig, expert_of, tensor_shapes
from flexgen_helm.planner.policy import Policy
from flexgen_helm.quant.precisions import FP16, Precision
from flexgen_helm.tiers import (
    ALIGNMENT,
    COPY_BUFFER_BYTES,
    GATHER_BYTES,
    MIN_EXPERT_SLOTS,
    MIN_STAGING_BYTES,
    NUM_LOADERS,
    TIERS,
    Kind,
    Tier,
    aligned,
    aligned_read_bytes,
)


class StageSizes(NamedTuple):
    """Sizes of a stage's tensors.

    num_bytes, expert_bytes: of its matrices, and of those that belong to experts.
    expert_slot: bytes of the slot for its largest expert.
    largest_matrix: in bytes.
    num_values: of its matrices.
    vector_values, float32_values: of its vectors in the compute dtype, and of those that are always
        in float32.
    """

    num_bytes: int
    expert_bytes: int
    expert_slot: int
    largest_matrix: int
    num_values: int
    vector_values: int
    float32_values: int


@dataclass(frozen=True)
class StorageSizes:
    """Sizes of a model's tensors as stored.

    element_bytes: of a value that is not quantized.
    """

    config: ModelConfig
    precision: Precision = FP16
    element_bytes: int = 2

    def num_bytes(self, name: str, shape: tuple[int, ...]) -> int:
        fmt = self.precision.format_of(name) if len(shape) == 2 else None
        return (
            prod(shape) * self.element_bytes
            if fmt is None
            else fmt.packed_bytes(shape[0], shape[1])
        )

    @cached_property
    def matrices(self) -> Mapping[str, int]:
        """Bytes of the tensors that a policy places, by name. Vectors are always on the compute
        tier.
        """
        return {
            n: self.num_bytes(n, shape)
            for n, shape in tensor_shapes(self.config).items()
            if len(shape) > 1
        }

    @cached_property
    def matrix_bytes(self) -> int:
        """Bytes of all matrices."""
        return sum(stage.num_bytes for stage in self.stages.values())

    @cached_property
    def largest_matrix(self) -> int:
        """Bytes of the largest matrix."""
        return max(stage.largest_matrix for stage in self.stages.values())

    @cached_property
    def num_values(self) -> int:
        """Values of all matrices."""
        return sum(stage.num_values for stage in self.stages.values())

    def vector_bytes(self, compute_bytes: int) -> int:
        """Bytes of all vectors: on the compute tier, in elements of `compute_bytes` or in
        float32.
        """
        stages = self.stages.values()
        return sum(
            compute_bytes * stage.vector_values + 4 * stage.float32_values for stage in stages
        )

    @cached_property
    def stages(self) -> Mapping[str, StageSizes]:
        """Sizes of each stage; of layers alike they are computed once, unless each has formats of
        its own.
        """
        firsts = self.config.first_stages
        published = self.precision.published
        if published.by_name and not published.are_alike:
            firsts = {stage: stage for stage in firsts}
        sizes = {stage: self._stage_sizes(stage) for stage in dict.fromkeys(firsts.values())}
        return {stage: sizes[first] for stage, first in firsts.items()}

    def _stage_sizes(self, stage: str) -> StageSizes:
        tensors = list(self.config.stage_tensors(stage))
        vectors = Counter[bool]()  # whether in float32 -> values
        matrices, slots = Counter[str](), Counter[str]()
        for name, shape in tensors:
            if len(shape) == 1:
                vectors[self.config.has_float32(name)] += shape[0]
                continue
            matrices[name] = size = self.num_bytes(name, shape)
            if (expert := expert_of(name)) is not None:
                # one page more, because a matrix may begin within a page of its file
                slots[expert] += aligned(size) + ALIGNMENT
        return StageSizes(
            num_bytes=matrices.total(),
            expert_bytes=sum(size for name, size in matrices.items() if expert_of(name)),
            expert_slot=max(slots.values(), default=0),
            largest_matrix=max(matrices.values(), default=0),
            num_values=sum(prod(shape) for name, shape in tensors if name in matrices),
            vector_values=vectors[False],
            float32_values=vectors[True],
        )


# Reads tensor sizes once: plans of a model share them.
storage_sizes = cache(StorageSizes)


def tier_fractions(policy: Policy, kind: Kind, has_gpu: bool) -> dict[Tier, float]:
    """Return a policy's fractions of a kind by tier; on a machine without a gpu its share goes to
    the cpu.
    """
    gpu, cpu, disk = {
        "weights": (policy.wg, policy.wc, policy.wd),
        "cache": (policy.cg, policy.cc, policy.cd),
        "activations": (policy.hg, policy.hc, policy.hd),
    }[kind]
    return (
        {"gpu": gpu, "cpu": cpu, "disk": disk}
        if has_gpu
        else {"gpu": 0.0, "cpu": gpu + cpu, "disk": disk}
    )


def most_underfilled(
    tiers: Iterable[Tier],
    fractions: Mapping[Tier, float],
    placed_bytes: Mapping[Tier, int],
    total: int,
) -> Tier:
    """Return the tier that misses most of its fraction of `total` bytes; ties go to the first.

    Differences are rounded, so that rounding errors of the fractions do not break ties.
    """
    return max(tiers, key=lambda tier: round(fractions[tier] * total - placed_bytes[tier], 3))


def choose_tiers(sizes: Mapping[str, int], fractions: Mapping[Tier, float]) -> dict[str, Tier]:
    """Choose the tier of each tensor; the matrices of an expert stay together.

    What every token needs comes to the fastest tiers first, and experts, of which a token needs a
    few, to what is left of the tiers.
    """
    units = {name: expert_of(name) or name for name in sizes}
    always: dict[str, int] = {}
    experts: dict[str, int] = {}
    for name, unit in units.items():
        group = always if unit == name else experts
        group[unit] = group.get(unit, 0) + sizes[name]
    if not experts:
        return _spread(sizes, fractions)
    total = sum(sizes.values())
    left = {tier: fractions[tier] * total for tier in TIERS}
    placed = _fill_in_order(always, left)
    for unit, tier in placed.items():
        left[tier] -= always[unit]
    placed |= _fill_in_order(experts, left)
    return {name: placed[unit] for name, unit in units.items()}


def _fill_in_order(sizes: Mapping[str, int], left: Mapping[Tier, float]) -> dict[str, Tier]:
    """Fill what is left of the tiers, the fastest first.

    Whole tensors may have taken more of a tier than it had: the slowest tier with room takes what
    finds none.
    """
    taken = dict.fromkeys(TIERS, 0.0)
    num_bytes = sum(sizes.values())
    rest = float(num_bytes)
    for tier in TIERS:
        taken[tier] = max(0.0, min(rest, left[tier]))
        rest -= taken[tier]
    slowest: Tier = next((tier for tier in reversed(TIERS) if left[tier] > 0), "cpu")
    taken[slowest] += rest
    return _spread(sizes, {tier: share / max(1, num_bytes) for tier, share in taken.items()})


def _spread(sizes: Mapping[str, int], fractions: Mapping[Tier, float]) -> dict[str, Tier]:
    """Choose the tier of each tensor, in order; ties go to the faster tier.

    Each tensor goes to the most underfilled tier, so after every one each tier is at most a tensor
    off its fraction.
    Offloaded tensors are therefore spread evenly over the layers, which overlap needs.
    """
    placed_bytes, total = dict.fromkeys(TIERS, 0), 0
    placed: dict[str, Tier] = {}
    allowed: list[Tier] = [tier for tier in TIERS if fractions[tier] > 0] or ["cpu"]
    if len(allowed) == 1:
        return dict.fromkeys(sizes, allowed[0])
    for name, size in sizes.items():
        total += size
        placed[name] = most_underfilled(allowed, fractions, placed_bytes, total)
        placed_bytes[placed[name]] += size
    return placed


def achieved_fractions(sizes: Mapping[str, int], placed: Mapping[str, Tier]) -> dict[Tier, float]:
    """Return the fraction of the bytes on each tier."""
    total = sum(sizes.values())
    num_bytes = {
        tier: sum(size for name, size in sizes.items() if placed[name] == tier) for tier in TIERS
    }
    return {tier: size / total if total else 0.0 for tier, size in num_bytes.items()}


# Memory of the compute tier through which offloaded weights reach it, and of the host through which
# the disk's pass.

# Share of the compute tier for the staging ring, and its share if only a larger ring holds a whole
# layer.
_STAGING_SHARE, _MAX_STAGING_SHARE = 0.25, 0.5
# Share of a layer's experts that may be in slots before they are used: the disk goes on while
# attention computes.
_AHEAD_SHARE = 0.25


@dataclass(frozen=True)
class StagingSizes:
    """Bytes on the compute tier through which offloaded weights reach it: the staging ring, and
    slots for experts.
    """

    ring: int
    experts: int = 0

    @property
    def num_bytes(self) -> int:
        return self.ring + self.experts

    def used(self, placed: Mapping[str, Tier], compute_tier: Tier) -> StagingSizes:
        """Return what a placement needs; a ring that it does not need is slots, too."""
        offloaded = [name for name, tier in placed.items() if tier != compute_tier]
        any_experts = any(expert_of(name) for name in offloaded)
        any_others = not all(expert_of(name) for name in offloaded)
        if not any_experts:
            return StagingSizes(self.ring if any_others else 0)
        return self if any_others else StagingSizes(0, self.num_bytes)


def expert_slot_bytes(storage: StorageSizes) -> int:
    """Return the bytes of the largest expert in a slot; 0 without experts."""
    return max(stage.expert_slot for stage in storage.stages.values())


def staging_sizes(storage: StorageSizes, limit: int) -> StagingSizes:
    """Size the memory through which offloaded weights reach a compute tier of `limit` bytes."""
    slot = expert_slot_bytes(storage)
    always = {
        name: stage.num_bytes - stage.expert_bytes
        for name, stage in storage.stages.items()
        if name != EMBED
    }
    largest = wanted = max(always.values())
    # Two stages: one is used while the next arrives. Where a mixture's head is the largest, a ring
    # of its size holds two layers without their experts anyway.
    if not slot or largest != always.get(HEAD):
        wanted *= 2
    total = max(MIN_STAGING_BYTES, min(wanted + MIN_STAGING_BYTES, int(_STAGING_SHARE * limit)))
    # What does not fit is loaded again for every batch, so a larger ring pays if it makes it fit.
    if total < largest + MIN_STAGING_BYTES <= limit * _MAX_STAGING_SHARE:
        total = largest + MIN_STAGING_BYTES
    if not slot:
        return StagingSizes(total)
    experts = max(stage.expert_bytes for stage in storage.stages.values())
    ahead = min(_AHEAD_SHARE * experts, _STAGING_SHARE / 2 * limit)
    return StagingSizes(total, max(MIN_EXPERT_SLOTS * slot, int(ahead)))


def loader_buffer_bytes(storage: StorageSizes, has_gpu: bool) -> int:
    """Bound the host memory through which loaders read weights from the disk: to a device, or to
    gather rows.
    """
    gathered = (
        NUM_LOADERS
        * gather_bytes(storage.largest_matrix)
        * storage.precision.published.are_gathered
    )
    if not has_gpu:
        return gathered
    largest = (storage.largest_matrix, expert_slot_bytes(storage))  # each kind has its own loaders
    buffers = (aligned_read_bytes(min(COPY_BUFFER_BYTES, size)) for size in largest if size)
    return gathered + NUM_LOADERS * sum(buffers)


def gather_bytes(matrix_bytes: int) -> int:
    """Bound the memory through which a thread gathers rows of a matrix, in pages."""
    return aligned_read_bytes(min(GATHER_BYTES, matrix_bytes))


# The machine that an engine runs on, as far as a placement depends on it.


@dataclass(frozen=True)
class Machine:
    """Tiers of memory and what computes.

    limits: bytes of each tier.
    compute_tier: tier of the device that computes: 'gpu', also a simulated one, or 'cpu'.
    compute_dtype: of products and hidden states.
    overlap: transfers go on while the device computes.
    cpu_attention: beside a gpu, the host attends to the part of the cache that it holds.
    multiplied_as_stored: type of weights in 16 bits that the host multiplies as they rest; None
        where they are converted first.
    """

    limits: Mapping[Tier, int]
    compute_tier: Tier
    compute_dtype: str = "float32"
    overlap: bool = True
    cpu_attention: bool = True
    multiplied_as_stored: str | None = None

    @property
    def has_gpu(self) -> bool:
        return self.compute_tier == "gpu"

    @property
    def compute_bytes(self) -> int:
        """Bytes of an element in the compute dtype."""
        return 4 if self.compute_dtype == "float32" else 2

    @property
    def compute_limit(self) -> int:
        """Bytes of the compute tier."""
        return self.limits[self.compute_tier]
