"""Where the units of a cache block are stored, and the storage that is read in place: on the
compute device, or on the host where it attends. Others: `kv_cache.fetched_storage`.

In memory a plane has one tensor a layer. Shapes: B sequences, n units; see `codec`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from flexgen_helm.kv_cache.codec import Allocate, Codec, Planes, QuantizedCodec, SlotIndex
from flexgen_helm.tiers import Tier


class Storage(ABC):
    """Units of one cache block on one tier, in all layers."""

    tier: Tier

    @abstractmethod
    def write(self, layer: int, slot: int, planes: Planes) -> None:
        """Store the first units [n, *shape] of a slot: those of its prompt."""

    @abstractmethod
    def append(self, layer: int, target: SlotIndex, planes: Planes) -> None:
        """Store one unit in each of n slots, planes [n, *shape]."""

    def patch_prefetched(self, layer: int, target: SlotIndex, planes: Planes) -> None:
        """Put units into a prefetched layer alone: what is read next needs them."""
        return None

    @abstractmethod
    def read(self, layer: int) -> Planes:
        """Return the planes that every query reads, where attention is computed, with at least the
        visible units.
        """

    @abstractmethod
    def select(self, layer: int, slots: slice, tokens: Tensor) -> Tensor:
        """Return the bytes [B, Hk, k, bytes] of single tokens' values, on the compute device.

        tokens: [B, Hk, k].
        The layer was read and not dropped.
        """

    @abstractmethod
    def move(self, source: int, target: int, units: int, stale_units: int) -> None:
        """Make slot `target`, which has `stale_units`, a copy of the first `units` of slot
        `source`.
        """

    def settled(self) -> MemoryStorage:
        """Flush stores; the caller owns the tensors."""
        raise NotImplementedError(
            f"a cache block on the {self.tier} tier has its whole size from the beginning"
        )

    def prefetch(self, layer: int, *, ahead: bool = False) -> None:
        """Begin to bring what `read` returns; ahead: it is not needed yet, and gives way to what
        is.
        """
        return None

    def drop(self, layer: int) -> None:
        """Give back what `read` brought."""
        return None

    def drop_unused(self) -> None:
        """Give back what was brought ahead and is not in use."""
        return None

    def cancel(self) -> None:
        """Drop everything that was prefetched: a pass has broken off."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Give all memory back."""


@dataclass(frozen=True, eq=False)
class SlotSource:
    """A slot to copy, and how many of its first units."""

    memory: MemoryStorage
    slot: int
    units: int


class MemoryStorage(Storage):
    """On the compute device, or in host memory where the host computes attention: nothing is copied
    to be read.

    units: of a slot.
    """

    def __init__(
        self, tier: Tier, codec: Codec, num_slots: int, units: int, allocate: Allocate
    ) -> None:
        self.tier = tier
        self.units = units
        self._codec = codec
        self._num_slots = num_slots
        self._allocate = allocate
        self._layers: list[Planes] = []

    def add_layer(self) -> None:
        """Allocate the next layer."""
        self._layers.append(self._codec.new_planes(self._num_slots, self.units, self._allocate))

    def gather(self, sources: Sequence[SlotSource]) -> None:
        """Copy slots of other blocks, which lose their tensors; at most one layer exists twice at
        any time.
        """
        for layer in range(len(sources[0].memory._layers)):
            self.add_layer()
            for slot, source in enumerate(sources):
                self.write(layer, slot, source.memory.first_units(layer, source.slot, source.units))
            for source in sources:
                source.memory._layers[layer] = ()

    def first_units(self, layer: int, slot: int, units: int) -> Planes:
        """View the first units of a slot [units, *shape]."""
        stored = zip(self._codec.planes, self._layers[layer])
        return tuple(plane.by_unit(data)[slot, :units] for plane, data in stored)

    def write(self, layer: int, slot: int, planes: Planes) -> None:
        for target, new in zip(self.first_units(layer, slot, len(planes[0])), planes):
            target.copy_(new)

    def append(self, layer: int, target: SlotIndex, planes: Planes) -> None:
        self._codec.put_units(self._layers[layer], target, planes)

    def read(self, layer: int) -> Planes:
        return self._layers[layer]

    def select(self, layer: int, slots: slice, tokens: Tensor) -> Tensor:
        assert isinstance(self._codec, QuantizedCodec)
        return self._codec.select_values(self._layers[layer][1][slots], tokens)

    def move(self, source: int, target: int, units: int, stale_units: int) -> None:
        # What remains of the old sequence is cleared: a masked position still takes part in the
        # product with weight 0, and 0 times a value that is not finite would carry one sequence's
        # fault into its neighbours.
        for planes in self._layers:
            for plane, data in zip(self._codec.planes, planes):
                by_unit = plane.by_unit(data)
                by_unit[target, :units] = by_unit[source, :units]
                by_unit[target, units:stale_units] = 0

    def settled(self) -> MemoryStorage:
        return self

    def close(self) -> None:
        self._layers.clear()
