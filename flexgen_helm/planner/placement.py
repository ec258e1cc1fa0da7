"""Whole tensors placed on tiers, and the sizes that follow from a model and a machine.

In order: sizes of tensors, their tiers, staging of offloaded weights, the cache, limits of a pass,
and the machine. No torch.
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
from flexgen_helm.quant.precisions import FP16, CacheFormat, Precision
from flexgen_helm.tiers import (
    ALIGNMENT,
    BLOCK_SEQUENCES,
    COPY_BUFFER_BYTES,
    GATHER_BYTES,
    MIN_EXPERT_SLOTS,
    MIN_STAGING_BYTES,
    NUM_LOADERS,
    TIERS,
    UNLIMITED,
    Kind,
    Tier,
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
        largest = num_bytes = num_values = 0
        vectors, experts, slots = [0, 0], 0, Counter[str]()
        for name, shape in self.config.stage_tensors(stage):
            if len(shape) == 1:
                vectors[self.config.has_float32(name)] += shape[0]
                continue
            size = self.num_bytes(name, shape)
            largest = max(largest, size)
            num_bytes = num_bytes + size
            num_values = num_values + prod(shape)
            if (expert := expert_of(name)) is not None:
                experts += size
                # Padded to a page, and one more, because a matrix may begin within a page of its
                # file.
                slots[expert] += (-(-size // ALIGNMENT) + 1) * ALIGNMENT
        return StageSizes(
            num_bytes, experts, max(slots.values(), default=0), largest, num_values, *vectors
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
    experts: dict[str, int] = {}
    for name, unit in units.items():
        if unit != name:
            experts[unit] = experts.get(unit, 0) + sizes[name]
    if not experts:
        return _spread(sizes, fractions)
    total = sum(sizes.values())
    left = {tier: fractions[tier] * total for tier in TIERS}
    placed: dict[str, Tier] = {}
    for group in ({name: sizes[name] for name, unit in units.items() if unit == name}, experts):
        # Fill what is left of the tiers, the fastest first.
        taken = dict.fromkeys(TIERS, 0.0)
        rest = float(sum(group.values()))
        num_bytes = sum(group.values())
        for tier in TIERS:
            taken[tier] = max(0.0, min(rest, left[tier]))
            rest -= taken[tier]
        # Whole tensors may have taken more of a tier than it had: the slowest tier with room takes
        # what finds none.
        slowest: Tier = next((tier for tier in reversed(TIERS) if left[tier] > 0), "cpu")
        taken[slowest] += rest
        spread = _spread(group, {tier: share / max(1, num_bytes) for tier, share in taken.items()})
        for unit, tier in spread.items():
            left[tier] -= group[unit]
        placed |= spread
    return {name: placed[unit] for name, unit in units.items()}


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
        offloaded = {
            expert_of(name) is not None for name, tier in placed.items() if tier != compute_tier
        }
        if True not in offloaded:
            return StagingSizes(self.ring if offloaded else 0)
        return self if False in offloaded else StagingSizes(0, self.num_bytes)


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
    pages = (-(-min(COPY_BUFFER_BYTES, size) // ALIGNMENT) + 2 for size in largest if size)
    # aligned reads begin before and end behind
    return gathered + NUM_LOADERS * sum(pages) * ALIGNMENT


def gather_bytes(matrix_bytes: int) -> int:
    """Bound the memory through which a thread gathers rows of a matrix, in pages."""
    return (-(-min(GATHER_BYTES, matrix_bytes) // ALIGNMENT) + 2) * ALIGNMENT


# Bytes of a KV cache, from the architecture and the cache format alone.


@dataclass(frozen=True)
class CacheSizes:
    """Sizes of one run's KV cache.

    bytes_per_token: of one position in all cached layers.
    layer_bytes_per_token: of one position in one layer.
    window_bytes: of a sequence's full-precision residual window in all cached layers; a file has
        twice as many, for the prompt's and for the answer's.
    layer_window_bytes: of the window in one layer.
    state_bytes: of a sequence on the compute device, in all layers that keep a state.
    fill_tokens: positions that the last disk page of a prompt, or of a block's decode step, may
        waste.
    """

    bytes_per_token: int
    layer_bytes_per_token: int
    window_bytes: int = 0
    layer_window_bytes: int = 0
    state_bytes: int = 0
    fill_tokens: int = 0


def cache_sizes(
    config: ModelConfig,
    fmt: CacheFormat | None,
    element_bytes: int,
    *,
    on_disk: bool,
    one_layer: bool = False,
) -> CacheSizes:
    """Compute the sizes of a cache.

    fmt: None for a cache in the compute dtype.
    element_bytes: of an element in the compute dtype.
    on_disk: part of the cache may be on the disk, where quantized groups start on a page.
    one_layer: only one layer is cached at a time (prefill-only).
    """
    layers = 1 if one_layer else config.num_cache_layers
    plain = 2 * config.kv_size * element_bytes
    states = state_bytes(config, one_layer)
    if fmt is None:
        fill = 0 if not on_disk or plain % ALIGNMENT == 0 else -(-ALIGNMENT // plain)
        return CacheSizes(layers * plain, plain, state_bytes=states, fill_tokens=fill)
    group = sum(fmt.group_bytes(config.num_kv_heads, config.head_dim, element_bytes))
    fill = 0
    if on_disk:
        group = -(-group // ALIGNMENT) * ALIGNMENT
        fill = -(-ALIGNMENT * fmt.stored_group_tokens // group)
    per_token = -(-layers * group // fmt.stored_group_tokens)
    window = fmt.window_copies * fmt.window_tokens * plain
    return CacheSizes(per_token, per_token // layers, layers * window, window, states, fill)


def state_bytes(config: ModelConfig, one_layer: bool = False) -> int:
    """Return the bytes of the states that layers keep of a sequence: in float32, before and after
    the newest token.
    """
    elements = max(config.layer_states) if one_layer else sum(config.layer_states)
    return 2 * 4 * elements


# What one pass of a run may hold: all that the scheduler knows of memory.


@dataclass(frozen=True)
class SchedulerLimits:
    """What one pass may hold.

    batch_tokens, batch_sequences: of one batch; a longer sequence is a batch of its own.
    max_sequences: sequences with a cache.
    cache_tokens: positions of KV cache over all sequences.
    pass_tokens: prompt tokens that one pass admits, so that running sequences do not wait; a longer
        prompt is admitted alone.
    page_tokens: 0 allocates a sequence's whole cache at admission. Otherwise caches grow by pages,
        and as many sequences are admitted as are expected to fit.
    slot_overhead: positions that each sequence takes besides its tokens (residual window, last disk
        page).
    step_overhead: positions that each decode step of a block takes besides its tokens (last disk
        page).
    max_states: sequences and shared prefixes whose states are on the compute tier while their cache
        is offloaded.
    block_sequences: sequences of a cache block; above `BLOCK_SEQUENCES` only neighbours of similar
        length.
    """

    batch_tokens: int
    batch_sequences: int
    max_sequences: int
    cache_tokens: int
    pass_tokens: int
    page_tokens: int = 0
    slot_overhead: int = 0
    step_overhead: int = 0
    max_states: int = UNLIMITED
    block_sequences: int = BLOCK_SEQUENCES


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
