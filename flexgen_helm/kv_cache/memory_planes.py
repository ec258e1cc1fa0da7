"""The tensors of a cache block in one memory, and how slots move from block to block. Shapes: n units; see `codec`."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flexgen_helm.kernels.layer_rows import put_rows
from flexgen_helm.kv_cache.codec import Codec, Plane, Planes
from flexgen_helm.kv_cache.new_tokens import UnitPlaces
from flexgen_helm.kv_cache.tensors import zeros
from flexgen_helm.offload.host_pool import HostPool, HostRegion


@dataclass(frozen=True, eq=False)
class SlotSource:
    """A run of slots to copy: `count` from `first` on, of each the first `units`."""

    planes: MemoryPlanes
    first: int
    count: int
    units: int


class MemoryPlanes:
    """The tensors of a block in one memory, one for each plane and layer.

    units: of a slot.
    """

    def __init__(
        self, codec: Codec, num_slots: int, num_layers: int, units: int, memory: torch.device | HostPool
    ) -> None:
        """memory: a device, or a pool of pinned host memory."""
        self.units = units
        self._planes, self._num_slots, self._memory = codec.planes, num_slots, memory
        self._layers: list[Planes] = []
        self._regions: list[HostRegion | None] = []  # of the layers that are in a pool
        try:
            for _ in range(num_layers):
                self._add_layer()
        except BaseException:
            self.close()
            raise

    def _add_layer(self) -> Planes:
        shapes = [plane.memory_shape(self._num_slots, self.units) for plane in self._planes]
        if isinstance(self._memory, torch.device):
            made = tuple(zeros(shape, self._memory, plane.dtype) for plane, shape in zip(self._planes, shapes))
            self._regions.append(None)
        else:
            sizes = [self._num_slots * self.units * plane.unit_bytes for plane in self._planes]
            region = self._memory.take(sum(sizes), zeros=True)
            self._regions.append(region)
            parts = region.memory.split(sizes)
            made = tuple(part.view(plane.dtype).view(s) for part, plane, s in zip(parts, self._planes, shapes))
        self._layers.append(made)
        return made

    def _drop_layer(self, layer: int) -> None:
        self._layers[layer] = ()
        region, self._regions[layer] = self._regions[layer], None
        if region is not None:
            assert isinstance(self._memory, HostPool)
            self._memory.give_back(region)

    def close(self) -> None:
        """Give all memory back; harmless when called again."""
        for layer in range(len(self._layers)):
            self._drop_layer(layer)

    @classmethod
    def gathered(
        cls,
        codec: Codec,
        num_slots: int,
        units: int,
        memory: torch.device | HostPool,
        sources: SequenceOf[SlotSource],
    ) -> MemoryPlanes:
        """Copy slots of other blocks, one behind the other; these lose their tensors.

        At most one layer exists twice at any time.
        """
        made = cls(codec, num_slots, 0, units, memory)
        others = list(dict.fromkeys(source.planes for source in sources))
        try:
            made._gather(others, sources)
        except BaseException:
            made.close()
            raise
        return made

    def _gather(self, others: SequenceOf[MemoryPlanes], sources: SequenceOf[SlotSource]) -> None:
        for layer in range(len(others[0]._layers)):
            wider = self._add_layer()
            slot = 0
            for source in sources:
                slots = slice(source.first, source.first + source.count)
                for plane, new, old in zip(self._planes, wider, source.planes._layers[layer]):
                    target = plane.by_unit(new)[slot : slot + source.count]
                    target[:, : source.units] = plane.by_unit(old)[slots, : source.units]
                slot += source.count
            for planes in others:
                planes._drop_layer(layer)

    def first_units(self, layer: int, slot: int, units: int) -> Planes:
        """View the first units of a slot [units, *shape]."""
        stored = zip(self._planes, self._layers[layer])
        return tuple(plane.by_unit(data)[slot, :units] for plane, data in stored)

    def write(self, layer: int, slot: int, planes: Planes) -> None:
        for place, new in zip(self.first_units(layer, slot, len(planes[0])), planes):
            place.copy_(new)

    def append(self, layer: int, places: UnitPlaces, planes: Planes) -> None:
        put_units(self._planes, self._layers[layer], places, planes)

    def read(self, layer: int, num_slots: int, units: int) -> Planes:
        """View the first units of the first slots, as they lie in memory."""
        stored = zip(self._planes, self._layers[layer])
        return tuple(data[:num_slots].narrow(plane.unit_axis, 0, units) for plane, data in stored)

    def planes(self, layer: int) -> Planes:
        return self._layers[layer]

    def move(self, source: int, target: int, units: int, stale_units: int) -> None:
        # What remains of the old sequence is cleared: a masked position still takes part in the product with weight
        # 0, and 0 times a value that is not finite would carry one sequence's fault into its neighbours.
        for planes in self._layers:
            for plane, data in zip(self._planes, planes):
                by_unit = plane.by_unit(data)
                by_unit[target, :units] = by_unit[source, :units]
                by_unit[target, units:stale_units] = 0


def joined(sources: SequenceOf[SlotSource]) -> list[SlotSource]:
    """Join sources of neighbouring slots, so that they are copied as one."""
    runs: list[SlotSource] = []
    for source in sources:
        last = runs[-1] if runs else None
        if last is not None and last.planes is source.planes and last.first + last.count == source.first:
            runs[-1] = replace(last, count=last.count + source.count, units=max(last.units, source.units))
        else:
            runs.append(source)
    return runs


def put_units(specs: SequenceOf[Plane], stored: SequenceOf[Tensor], places: UnitPlaces, planes: Planes) -> None:
    """Put one unit into each of n slots; planes: the new units [n, *shape]."""
    slots, units = places.on(stored[0].device)
    for plane, data, new in zip(specs, stored, planes):
        target = plane.by_unit(data)
        if not put_rows(target, slots, units, new):
            target[slots, units] = new


def empty_planes(specs: SequenceOf[Plane], slots: int, units: int, device: torch.device) -> Planes:
    return tuple(zeros(plane.memory_shape(slots, units), device, plane.dtype) for plane in specs)
