"""Where the units of a cache block are stored: on the compute device, in host memory, or on the disk.

In memory a plane has one tensor a layer (`MemoryPlanes`), on the disk a block is one file (`FileLayout`). Shapes:
B sequences, n units; see `codec`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Generic

import torch
from torch import Tensor

from flexgen_helm.kernels.layer_rows import put_rows
from flexgen_helm.kv_cache.codec import Codec, Plane, Planes, UnitPlaces, total_bytes, zeros
from flexgen_helm.kv_cache.file_layout import FileLayout
from flexgen_helm.kv_cache.transfers import BlockTransfers, Fetched
from flexgen_helm.kv_cache.visibility import stored_extent
from flexgen_helm.offload.disk import DirectFile
from flexgen_helm.offload.transfer_manager import HostPool, HostRegion, Launched, TransferManager
from flexgen_helm.planner.placement import Tier
from flexgen_helm.scheduling.sequence import CacheBlock, Sequence

# The tensors of a cache block in one memory, and how slots move from block to block. Shapes: n units; see `codec`.


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
        put_rows(target, slots, units, new)


def empty_planes(specs: SequenceOf[Plane], slots: int, units: int, device: torch.device) -> Planes:
    return tuple(zeros(plane.memory_shape(slots, units), device, plane.dtype) for plane in specs)


_HOST = torch.device("cpu")
# Share of its slots' units from which on a layer is fetched with all of them: pinned memory that is contiguous crosses
# the link without a copy within the host, which would halve the rate.
_WHOLE_SLOTS_FROM = 0.5


class Storage(ABC):
    """Units of one cache block on one tier, in all layers."""

    tier: Tier

    @abstractmethod
    def write(self, layer: int, slot: int, planes: Planes) -> None:
        """Store the first units [n, *shape] of a slot: those of its prompt."""

    @abstractmethod
    def append(self, layer: int, places: UnitPlaces, planes: Planes) -> None:
        """Store one unit in each of n slots, planes [n, *shape]."""

    def patch_prefetched(self, layer: int, places: UnitPlaces, planes: Planes) -> None:
        """Put units into a prefetched layer alone: what is read next needs them."""
        return None

    @abstractmethod
    def read(self, layer: int) -> Planes:
        """Return the planes that every query reads, where attention is computed, with at least the visible units."""

    @abstractmethod
    def select(self, layer: int, slots: slice, tokens: Tensor) -> Tensor:
        """Return the bytes [B, Hk, k, bytes] of single tokens' values, on the compute device.

        tokens: [B, Hk, k].
        The layer was read and not dropped.
        """

    @abstractmethod
    def move(self, source: int, target: int, units: int, stale_units: int) -> None:
        """Make slot `target`, which has `stale_units`, a copy of the first `units` of slot `source`."""

    def settled(self) -> MemoryPlanes:
        """Flush stores; the caller owns the tensors."""
        raise NotImplementedError(f"a cache block on the {self.tier} tier has its whole size from the beginning")

    def prefetch(self, layer: int, *, ahead: bool = False) -> None:
        """Begin to bring what `read` returns; ahead: it is not needed yet, and gives way to what is."""
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

    def close(self) -> None:
        return None


class DeviceStorage(Storage):
    """On the compute device, or in host memory where the host computes attention: nothing is copied to be read."""

    def __init__(self, tier: Tier, codec: Codec, planes: MemoryPlanes) -> None:
        self.tier, self._codec, self._planes = tier, codec, planes

    def write(self, layer: int, slot: int, planes: Planes) -> None:
        self._planes.write(layer, slot, planes)

    def append(self, layer: int, places: UnitPlaces, planes: Planes) -> None:
        self._planes.append(layer, places, planes)

    def read(self, layer: int) -> Planes:
        return self._planes.planes(layer)

    def select(self, layer: int, slots: slice, tokens: Tensor) -> Tensor:
        return self._codec.select_values(self._planes.planes(layer)[1][slots], tokens)

    def move(self, source: int, target: int, units: int, stale_units: int) -> None:
        self._planes.move(source, target, units, stale_units)

    def settled(self) -> MemoryPlanes:
        return self._planes

    def close(self) -> None:
        self._planes.close()


class FetchedStorage(Storage, Generic[Fetched]):
    """Away from the compute device: what a query reads is brought for each use."""

    def __init__(self, tiers: TransferManager, codec: Codec, block: CacheBlock) -> None:
        self._tiers, self._codec, self._block = tiers, codec, block
        self._transfers: BlockTransfers[Fetched] = BlockTransfers(tiers)

    @abstractmethod
    def _arrived(self, layer: int) -> Planes:
        """Wait for a layer that is fetched; return its planes where attention is computed."""

    def read(self, layer: int) -> Planes:
        self.prefetch(layer)
        return self._arrived(layer)

    def patch_prefetched(self, layer: int, places: UnitPlaces, planes: Planes) -> None:
        if self._transfers.is_fetching(layer) and not self._codec.window_tokens:
            put_units(self._codec.planes, self._arrived(layer), places, planes)

    def drop(self, layer: int) -> None:
        self._transfers.drop(layer)

    def drop_unused(self) -> None:
        self._transfers.drop_unused()

    def cancel(self) -> None:
        self._transfers.cancel()


class HostStorage(FetchedStorage[Planes]):
    """In host memory behind the link: what a query reads crosses the link for each use."""

    tier: Tier = "cpu"

    def __init__(self, tiers: TransferManager, codec: Codec, block: CacheBlock, planes: MemoryPlanes) -> None:
        super().__init__(tiers, codec, block)
        self._planes = planes

    def write(self, layer: int, slot: int, planes: Planes) -> None:
        targets = self._planes.first_units(layer, slot, len(planes[0]))

        def store(after: Launched) -> None:
            for new, target in zip(planes, targets):
                self._tiers.to_host(new, "cache", target, after)

        self._transfers.store(layer, total_bytes(planes), store)

    def append(self, layer: int, places: UnitPlaces, planes: Planes) -> None:
        self.patch_prefetched(layer, places, planes)

        def store(after: Launched) -> None:
            self._planes.append(layer, places, copied_to_host(self._tiers, planes, after))

        self._transfers.store(layer, total_bytes(planes), store)

    def _arrived(self, layer: int) -> Planes:
        return self._transfers.fetched(layer)

    def select(self, layer: int, slots: slice, tokens: Tensor) -> Tensor:
        on_host = self._tiers.to_host(tokens, "cache")
        self._transfers.finish_stores(layer)  # of groups that are not visible yet, in the same tensors
        selected = self._codec.select_values(self._planes.planes(layer)[1][slots], on_host)
        return copied_to_device(self._tiers, (selected,))[0]

    def move(self, source: int, target: int, units: int, stale_units: int) -> None:
        self._transfers.finish_stores()
        self._planes.move(source, target, units, stale_units)

    def settled(self) -> MemoryPlanes:
        self._transfers.drop_all()
        self._transfers.finish_stores()
        return self._planes

    def prefetch(self, layer: int, *, ahead: bool = False) -> None:
        codec, extent = self._codec, stored_extent(self._block, self._codec)
        if self._transfers.is_fetching(layer) or not extent.num_units:
            return
        if _WHOLE_SLOTS_FROM * self._planes.units <= extent.num_units:
            stored = self._planes.planes(layer)[: codec.num_fetched_planes]
            whole = tuple(data[: extent.num_slots] for data in stored)
            self._transfers.prefetch(
                layer, total_bytes(whole), lambda: copied_to_device(self._tiers, whole), ahead=ahead
            )
            return

        def fetch() -> Planes:
            units = max(extent.counts)
            stored = self._planes.read(layer, extent.num_slots, units)[: codec.num_fetched_planes]
            # One long copy over the link, spread out behind it.
            arrived = copied_to_device(self._tiers, stored)
            if not extent.room:
                return arrived
            wider = empty_planes(codec.planes, extent.num_slots, extent.num_units, self._tiers.device)
            for plane, new, old in zip(codec.planes, wider, arrived):
                plane.by_unit(new)[:, :units] = plane.by_unit(old)
            return wider

        num_bytes = extent.num_slots * extent.num_units * codec.fetched_bytes
        self._transfers.prefetch(layer, num_bytes, fetch, ahead=ahead)

    def close(self) -> None:
        self._transfers.close()
        self._planes.close()


class DiskStorage(FetchedStorage[tuple[Planes, Planes]]):
    """In a file of the run; a fetch brings planes to the device, and all planes to the host.

    Slots do not move: a sequence that takes another's slot is only known by a new number.
    """

    tier: Tier = "disk"

    def __init__(
        self, tiers: TransferManager, codec: Codec, block: CacheBlock, layout: FileLayout, file: DirectFile
    ) -> None:
        super().__init__(tiers, codec, block)
        self._layout, self._file = layout, file
        self._slots = list(range(block.num_slots))  # slot of the block -> slot of the file

    def write(self, layer: int, slot: int, planes: Planes) -> None:
        place = self._slots[slot]
        self._store(layer, planes, lambda on_host: self._layout.write(self._file, layer, place, on_host))

    def append(self, layer: int, places: UnitPlaces, planes: Planes) -> None:
        self.patch_prefetched(layer, places, planes)
        slots, units = (numbers.tolist() for numbers in places.on_host)
        of_file = [self._slots[slot] for slot in slots]
        self._store(layer, planes, lambda on_host: self._layout.append(self._file, layer, of_file, units, on_host))

    def _arrived(self, layer: int) -> Planes:
        return self._transfers.fetched(layer)[0]

    def select(self, layer: int, slots: slice, tokens: Tensor) -> Tensor:
        values = self._transfers.fetched(layer)[1][1]
        selected = self._codec.select_values(values[slots], self._tiers.to_host(tokens, "cache"))
        return copied_to_device(self._tiers, (selected,))[0]

    def move(self, source: int, target: int, units: int, stale_units: int) -> None:
        self._slots[target], self._slots[source] = self._slots[source], self._slots[target]

    def prefetch(self, layer: int, *, ahead: bool = False) -> None:
        codec, extent = self._codec, stored_extent(self._block, self._codec)
        if self._transfers.is_fetching(layer) or not extent.num_units:
            return
        file_counts = list(zip(self._slots, extent.counts))

        def fetch() -> tuple[Planes, Planes]:
            on_host = empty_planes(codec.planes, extent.num_slots, extent.num_units, _HOST)
            self._transfers.count("disk_to_cpu", self._layout.read(self._file, layer, file_counts, on_host))
            return copied_to_device(self._tiers, on_host[: codec.num_fetched_planes]), on_host

        num_bytes = extent.num_slots * extent.num_units * codec.unit_bytes
        self._transfers.prefetch(layer, num_bytes, fetch, ahead=ahead)

    def close(self) -> None:
        self._transfers.close()
        self._file.close(delete=True)

    def _store(self, layer: int, planes: Planes, write: Callable[[Planes], int]) -> None:
        def store(after: Launched) -> None:
            self._transfers.count("cpu_to_disk", write(copied_to_host(self._tiers, planes, after)))

        self._transfers.store(layer, total_bytes(planes), store)


def copied_to_device(tiers: TransferManager, planes: Planes) -> Planes:
    """Copy tensors of the host to the compute device; the same tensors where the host computes."""
    return tuple(tiers.to_device(plane, "cache") for plane in planes)


def copied_to_host(tiers: TransferManager, planes: Planes, after: Launched) -> Planes:
    """Copy tensors of the compute device to the host; the same tensors where the host computes.

    after: work that makes them.
    """
    return tuple(tiers.to_host(plane, "cache", after=after) for plane in planes)


# States of layers that keep one of a sequence instead of its keys and values, on the compute device.


class BlockStates:
    """The states of one cache block: for each layer that has them two versions, [2, slots, elements] in float32."""

    def __init__(self, block: CacheBlock, elements: SequenceOf[int], device: torch.device, one_layer: bool) -> None:
        """elements: of each layer, 0 for one without states.

        one_layer: all layers share one tensor (`KVCache`).
        """
        self._block, self._one_layer = block, one_layer
        sizes = [max(elements)] if one_layer else elements
        self._layers = [zeros((2, block.num_slots, size), device, torch.float32) if size else None for size in sizes]
        self._elements = elements
        self._read = [0] * len(sizes)  # the version that the last pass read
        self._pass: list[tuple[Sequence, int] | None] = [None] * len(sizes)  # that pass, by what was to come

    def begin(self, layer: int, slot: int, state: Tensor) -> None:
        """Store the state [1, elements] behind a prompt, in both versions."""
        self._tensor(layer)[:, slot] = state

    def newest(self, layer: int, slot: int) -> Tensor:
        """Return the state [1, elements] of a sequence that does not decode."""
        return self._tensor(layer)[0, slot : slot + 1]

    def before(self, layer: int) -> Tensor:
        """Return the states [B, elements] before the next token; the same for the same token."""
        first, number = self._block.sequences[0], self._number(layer)
        now = first, first.num_computed
        if self._pass[number] != now:
            self._read[number], self._pass[number] = 1 - self._read[number], now
        return self._tensor(layer)[self._read[number], : len(self._block.sequences)]

    def write(self, layer: int, states: Tensor) -> None:
        """Store the states [B, elements] behind the token that `before` was asked for."""
        self._tensor(layer)[1 - self._read[self._number(layer)], : len(states)] = states

    def move(self, source: int, target: int) -> None:
        """Copy a slot to another."""
        for tensor in self._layers:
            if tensor is not None:
                tensor[:, target] = tensor[:, source]

    def copy_slot(self, target: int, other: BlockStates, source: int) -> None:
        """Make a slot a copy of another block's, as its last pass left it."""
        for own, theirs, read in zip(self._layers, other._layers, other._read):
            if own is not None and theirs is not None:
                own[:, target] = theirs[1 - read, source]

    def _number(self, layer: int) -> int:
        return 0 if self._one_layer else layer

    def _tensor(self, layer: int) -> Tensor:
        tensor = self._layers[self._number(layer)]
        assert tensor is not None
        return tensor[..., : self._elements[layer]]
