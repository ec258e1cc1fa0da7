"""Divide the layers among the ranks of a pipeline, by the speed and memory of their devices where those differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexgen_helm.engine.exchange import Exchange
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.planner.layers import divide_by_speed, divide_layers
from flexgen_helm.planner.planner import Planner

# Devices of one name count as equal if none has less than this share of another's memory.
_EQUAL_SHARE = 0.8


@dataclass(frozen=True)
class RankDevice:
    """What tells the device of a rank from others.

    name: of the device, or of the profile that the user has named for it.
    memory: bytes of its tiers in memory.
    """

    name: str
    memory: tuple[int, ...]


def divide_among_ranks(
    config: ModelConfig, asked: Sequence[int] | None, exchange: Exchange, planner: Planner, own: RankDevice
) -> list[range]:
    """Return the layers of each rank, the same on all ranks.

    asked: how many layers the user wants on each.

    Equal devices need no profile, and one process none. Raises what `divide_layers` raises.
    """
    size = exchange.rank.size
    if exchange.is_whole:
        return [range(config.num_layers)]
    if asked is not None:
        return divide_layers(config, size, asked)
    even = divide_layers(config, size)
    if _are_equal(exchange.agree(own)):
        return even
    seconds = exchange.agree(planner.seconds_by_layers(exchange.rank.number, size))
    # If no division fits, the rank that lacks memory says how much.
    return (divide_by_speed(seconds) if all(seconds) else None) or even


def _are_equal(devices: list[RankDevice]) -> bool:
    if len({device.name for device in devices}) > 1:
        return False
    return all(min(sizes) >= _EQUAL_SHARE * max(sizes) for sizes in zip(*(device.memory for device in devices)))
