"""Place whole tensors on tiers by the fractions of a policy. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

from flexgen_helm.models.config import (
    ModelConfig,
    expert_of,
    stage_names,
    stage_tensor_shapes,
    tensor_shapes,
)
from flexgen_helm.planner.policy import Policy
from flexgen_helm.quant.precisions import FP16, Precision

Tier = Literal["gpu", "cpu", "disk"]
Fractions = Mapping[Tier, float]
TIERS: tuple[Tier, ...] = ("gpu", "cpu", "disk")
# Where something is, for people.
TIER_PLACES: Mapping[Tier, str] = {"gpu": "in GPU memory", "cpu": "in memory", "disk": "on disk"}
Kind = Literal["weights", "cache", "activations"]
KINDS: tuple[Kind, ...] = ("weights", "cache", "activations")


def limit_flag(tier: Tier) -> str:
    """Return the command line flag that limits a tier."""
    return "--disk" if tier == "disk" else f"--{tier}-memory"


# What to do where memory runs out although the ledgers had room; a GPU's limit holds for computing, too.
MEMORY_ADVICE = "raise --gpu-memory, or lower --cpu-memory so that more is kept free"


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
        return prod(shape) * self.element_bytes if fmt is None else fmt.packed_bytes(shape[0], shape[1])

    @cached_property
    def matrices(self) -> Mapping[str, int]:
        """Bytes of the tensors that a policy places, by name. Vectors are always on the compute tier."""
        return {n: self.num_bytes(n, shape) for n, shape in tensor_shapes(self.config).items() if len(shape) > 1}

    @cached_property
    def num_values(self) -> int:
        """Values of all matrices."""
        return sum(prod(shape) for shape in tensor_shapes(self.config).values() if len(shape) > 1)

    def bytes_with_copies(self, compute_bytes: int, on_host: bool) -> int:
        """Bytes of all matrices in the compute dtype, and on a host of those in 16 bits as stored beside them."""
        copies = self.num_values * compute_bytes
        if not on_host or compute_bytes == self.element_bytes:
            return copies
        shapes = tensor_shapes(self.config)
        return copies + sum(n for name, n in self.matrices.items() if n == self.element_bytes * prod(shapes[name]))

    def vector_bytes(self, compute_bytes: int) -> int:
        """Bytes of all vectors: on the compute tier, in elements of `compute_bytes` or in float32."""
        values, in_float32 = self._vector_values
        return compute_bytes * values + 4 * in_float32

    @cached_property
    def _vector_values(self) -> tuple[int, int]:
        """Values of vectors in the compute dtype, and of those that have float32 whatever that is."""
        counts = [0, 0]
        for name, shape in tensor_shapes(self.config).items():
            if len(shape) == 1:
                counts[self.config.has_float32(name)] += shape[0]
        return counts[0], counts[1]

    def stage_bytes(self, stage: str) -> int:
        """Bytes of the matrices of one stage."""
        return self._stages[stage][0]

    def stage_expert_bytes(self, stage: str) -> int:
        """Bytes of those that belong to experts."""
        return self._stages[stage][1]

    @cached_property
    def _stages(self) -> dict[str, tuple[int, int]]:
        """Bytes of each stage's matrices, and of those that belong to experts."""
        found = {}
        for stage in stage_names(self.config):
            names = [name for name, shape in stage_tensor_shapes(self.config, stage).items() if len(shape) > 1]
            experts = sum(self.matrices[name] for name in names if expert_of(name))
            found[stage] = sum(self.matrices[name] for name in names), experts
        return found


def tier_fractions(policy: Policy, kind: Kind, has_gpu: bool) -> dict[Tier, float]:
    """Return the fractions by tier; without a gpu its share goes to the cpu."""
    gpu, cpu, disk = {
        "weights": (policy.wg, policy.wc, policy.wd),
        "cache": (policy.cg, policy.cc, policy.cd),
        "activations": (policy.hg, policy.hc, policy.hd),
    }[kind]
    return {"gpu": gpu, "cpu": cpu, "disk": disk} if has_gpu else {"gpu": 0.0, "cpu": gpu + cpu, "disk": disk}


def most_underfilled(
    tiers: Iterable[Tier], fractions: Mapping[Tier, float], placed_bytes: Mapping[Tier, int], total: int
) -> Tier:
    """Return the tier that misses most of its fraction of `total` bytes; ties go to the first.

    Differences are rounded, so that rounding errors of the fractions do not break ties.
    """
    return max(tiers, key=lambda tier: round(fractions[tier] * total - placed_bytes[tier], 3))


def place(sizes: Mapping[str, int], fractions: Mapping[Tier, float]) -> dict[str, Tier]:
    """Choose the tier of each tensor; the matrices of an expert stay together.

    What every token needs comes to the fastest tiers first, and experts, of which a token needs a few, to what is left
    of the tiers.
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
        own = _spread(group, _first_shares(left, sum(group.values())))
        for unit, tier in own.items():
            left[tier] -= group[unit]
        placed |= own
    return {name: placed[unit] for name, unit in units.items()}


def _first_shares(left: Mapping[Tier, float], num_bytes: int) -> dict[Tier, float]:
    """Return the fractions of a group of tensors that fills what is left of the fastest tiers first."""
    shares, rest = dict.fromkeys(TIERS, 0.0), float(num_bytes)
    for tier in TIERS:
        shares[tier] = max(0.0, min(rest, left[tier]))
        rest -= shares[tier]
    last: Tier = next((tier for tier in reversed(TIERS) if left[tier] > 0), "cpu")
    shares[last] += rest  # whole tensors before it have exceeded a tier's bytes
    return {tier: share / num_bytes for tier, share in shares.items()} if num_bytes else shares


def _spread(sizes: Mapping[str, int], fractions: Mapping[Tier, float]) -> dict[str, Tier]:
    """Choose the tier of each tensor, in order; ties go to the faster tier.

    Each tensor goes to the most underfilled tier, so after every one each tier is at most a tensor off its fraction.
    Offloaded tensors are therefore spread evenly over the layers, which overlap needs.
    """
    placed_bytes = dict.fromkeys(TIERS, 0)
    placed: dict[str, Tier] = {}
    allowed: list[Tier] = [tier for tier in TIERS if fractions[tier] > 0] or ["cpu"]
    if len(allowed) == 1:
        return dict.fromkeys(sizes, allowed[0])
    total = 0
    for name, size in sizes.items():
        total += size
        placed[name] = most_underfilled(allowed, fractions, placed_bytes, total)
        placed_bytes[placed[name]] += size
    return placed


def achieved_fractions(sizes: Mapping[str, int], placed: Mapping[str, Tier]) -> dict[Tier, float]:
    """Return the fraction of the bytes on each tier."""
    total = sum(sizes.values())
    num_bytes = {tier: sum(size for name, size in sizes.items() if placed[name] == tier) for tier in TIERS}
    return {tier: size / total if total else 0.0 for tier, size in num_bytes.items()}
