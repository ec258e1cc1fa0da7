"""Tiers of memory, their limits and margins. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Tier = Literal["gpu", "cpu", "disk"]
Fractions = Mapping[Tier, float]
TIERS: tuple[Tier, ...] = ("gpu", "cpu", "disk")
# Where something is, in sentences.
TIER_PLACES: Mapping[Tier, str] = {"gpu": "in GPU memory", "cpu": "in memory", "disk": "on disk"}
Kind = Literal["weights", "cache", "activations"]
KINDS: tuple[Kind, ...] = ("weights", "cache", "activations")


@dataclass(frozen=True)
class MemoryLimits:
    """Bytes that each tier may hold; None for what the machine has, less a margin.

    gpu: the workspace included.
    """

    gpu: int | None = None
    cpu: int | None = None
    disk: int | None = None


def limit_flag(tier: Tier) -> str:
    """Return the command line flag that limits a tier."""
    return "--disk" if tier == "disk" else f"--{tier}-memory"


# What to do where memory runs out although the ledgers had room; a GPU's limit holds for computing,
# too.
MEMORY_ADVICE = "raise --gpu-memory, or lower --cpu-memory so that more is kept free"

UNLIMITED = 1 << 62

# What the machine keeps for other programs: a share of a tier, and at least so many bytes.
_MARGIN_SHARE, _MARGIN_BYTES = 0.1, 1 << 30


def without_margin(free: float, total: float) -> int:
    """Return the usable bytes of `free` bytes on a tier of `total` bytes."""
    return max(0, int(free - max(_MARGIN_BYTES, _MARGIN_SHARE * total)))
