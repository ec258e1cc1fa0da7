"""Which tensors live where: a policy's fractions rounded to whole matrices. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

from flexgen_helm.models.config import ModelConfig, stage_tensor_shapes, tensor_shapes
from flexgen_helm.planner.policy import Policy
from flexgen_helm.quant.precisions import FP16, Precision

Tier = Literal["gpu", "cpu", "disk"]
TIERS: tuple[Tier, ...] = ("gpu", "cpu", "disk")


def limit_flag(tier: Tier) -> str:
    """The command line's flag that limits a tier."""
    return "--disk" if tier == "disk" else f"--{tier}-memory"


@dataclass(frozen=True)
class StorageSizes:
    """Sizes of a model's tensors at rest. element_bytes: of a value that is not packed."""

    config: ModelConfig
    precision: Precision = FP16
    element_bytes: int = 2

    def num_bytes(self, name: str, shape: tuple[int, ...]) -> int:
        fmt = self.precision.format_of(name) if len(shape) == 2 else None
        return prod(shape) * self.element_bytes if fmt is None else fmt.packed_bytes(shape[0], shape[1])

    @cached_property
    def matrices(self) -> Mapping[str, int]:
        """Name -> bytes of the tensors that a policy places; vectors are few and always rest beside the computing."""
        return {n: self.num_bytes(n, shape) for n, shape in tensor_shapes(self.config).items() if len(shape) > 1}

    @cached_property
    def num_values(self) -> int:
        """Of all matrices."""
        return sum(prod(shape) for shape in tensor_shapes(self.config).values() if len(shape) > 1)

    def stage_bytes(self, stage: str) -> int:
        """Of the matrices that one stage owns."""
        shapes = stage_tensor_shapes(self.config, stage)
        return sum(self.num_bytes(name, shape) for name, shape in shapes.items() if len(shape) > 1)


def tier_fractions(
    policy: Policy, kind: Literal["weights", "cache", "activations"], has_gpu: bool
) -> dict[Tier, float]:
    """Fractions by tier; without a gpu its share is the cpu's."""
    gpu, cpu, disk = {
        "weights": (policy.wg, policy.wc, policy.wd),
        "cache": (policy.cg, policy.cc, policy.cd),
        "activations": (policy.hg, policy.hc, policy.hd),
    }[kind]
    return {"gpu": gpu, "cpu": cpu, "disk": disk} if has_gpu else {"gpu": 0.0, "cpu": gpu + cpu, "disk": disk}


def most_underfilled(
    tiers: Iterable[Tier], fractions: Mapping[Tier, float], held: Mapping[Tier, int], total: int
) -> Tier:
    """The tier that misses most of its fraction of `total` bytes; ties go to the first.

    Rounded, so that the sum of fractions in floating point does not decide between equals.
    """
    return max(tiers, key=lambda tier: round(fractions[tier] * total - held[tier], 3))


def place(sizes: Mapping[str, int], fractions: Mapping[Tier, float]) -> dict[str, Tier]:
    """Tier of each item, in order, so that after every item each tier is near its fraction of the bytes so far.

    The next item goes where most is missing. So no tier is ever more than an item off, and the layers share what is
    far away evenly, which is what overlapping wants. Ties go to the faster tier.
    """
    held = dict.fromkeys(TIERS, 0)
    placed: dict[str, Tier] = {}
    total = 0
    for name, size in sizes.items():
        total += size
        allowed: list[Tier] = [tier for tier in TIERS if fractions[tier] > 0] or ["cpu"]
        tier = most_underfilled(allowed, fractions, held, total)
        placed[name] = tier
        held[tier] += size
    return placed


def achieved_fractions(sizes: Mapping[str, int], placed: Mapping[str, Tier]) -> dict[Tier, float]:
    """Fraction of the bytes on each tier."""
    total = sum(sizes.values())
    found = {tier: sum(size for name, size in sizes.items() if placed[name] == tier) for tier in TIERS}
    return {tier: size / total if total else 0.0 for tier, size in found.items()}
