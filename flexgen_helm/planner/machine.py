"""The machine that an engine runs on, as far as a placement depends on it. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flexgen_helm.tiers import Tier


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
