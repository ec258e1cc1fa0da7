"""Where the units of a cache block are stored: on the compute device, in host memory, or on the disk.

In memory a plane has one tensor a layer. On the disk a block is one file, layer after layer, in one of two layouts:

    one token a unit        | slot 0: its prompt | slot 1 … | step 0: one token of all slots | step 1 … |
    a group of tokens       | slot 0: unit, unit, … (a page each) | slot 1 … |

Tokens of a step are written together, so that a step is one write. Shapes: B sequences, n units; see `codec`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from flexgen_helm.kv_cache.codec import Codec, Plane, Planes, total_bytes
from flexgen_helm.kv_cache.new_tokens import UnitPlaces
from flexgen_helm.kv_cache.tensors import zeros
from flexgen_helm.kv_cache.transfers import BlockTransfers
from flexgen_helm.kv_cache.visibility import stored_extent
from flexgen_helm.offload.disk import DirectFile
from flexgen_helm.offload.host_pool import HostPool, HostRegion
from flexgen_helm.offload.staging import aligned
from flexgen_helm.offload.transfer_manager import TransferManager
from flexgen_helm.planner.placement import Tier
from flexgen_helm.scheduling.sequence import CacheBlock

_HOST = torch.device("cpu")
# Share of its slots' units from which on a layer is fetched with all of them: pinned memory that is contiguous crosses
# the link without a copy within the host, which would halve the rate.
_WHOLE_SLOTS_FROM = 0.5
# A slot of a file, and how many of its first units are read.
SlotCount = tuple[int, int]


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
    slots, units = places.beside(stored[0])
    for plane, data, new in zip(specs, stored, planes):
        plane.by_unit(data)[slots, units] = new


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


class HostStorage(Storage):
    """In host memory behind the link: what a query reads crosses the link for each use."""

    tier: Tier = "cpu"

    def __init__(self, tiers: TransferManager, codec: Codec, block: CacheBlock, planes: MemoryPlanes) -> None:
        self._tiers, self._codec, self._block, self._planes = tiers, codec, block, planes
        self._transfers: BlockTransfers[Planes] = BlockTransfers(tiers)

    def write(self, layer: int, slot: int, planes: Planes) -> None:
        places = self._planes.first_units(layer, slot, len(planes[0]))

        def store() -> None:
            for new, place in zip(planes, places):
                self._tiers.to_host(new, "cache", place)

        self._transfers.store(layer, total_bytes(planes), store)

    def patch_prefetched(self, layer: int, places: UnitPlaces, planes: Planes) -> None:
        if self._transfers.is_fetching(layer) and not self._codec.window_tokens:
            put_units(self._codec.planes, self._transfers.fetched(layer), places, planes)

    def append(self, layer: int, places: UnitPlaces, planes: Planes) -> None:
        self.patch_prefetched(layer, places, planes)
        self._transfers.store(
            layer, total_bytes(planes), lambda: self._planes.append(layer, places, copied_to_host(self._tiers, planes))
        )

    def read(self, layer: int) -> Planes:
        self.prefetch(layer)
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

    def drop(self, layer: int) -> None:
        self._transfers.drop(layer)

    def drop_unused(self) -> None:
        self._transfers.drop_unused()

    def cancel(self) -> None:
        self._transfers.cancel()

    def close(self) -> None:
        self._transfers.close()
        self._planes.close()


class DiskStorage(Storage):
    """In a file of the run. Slots do not move: a sequence that takes another's slot is only known by a new number."""

    tier: Tier = "disk"

    def __init__(
        self, tiers: TransferManager, codec: Codec, block: CacheBlock, layout: FileLayout, file: DirectFile
    ) -> None:
        self._tiers, self._codec, self._block, self._layout, self._file = tiers, codec, block, layout, file
        self._transfers: BlockTransfers[tuple[Planes, Planes]] = BlockTransfers(tiers)  # on the device, on the host
        self._slots = list(range(block.num_slots))  # slot of the block -> slot of the file

    def write(self, layer: int, slot: int, planes: Planes) -> None:
        place = self._slots[slot]
        self._store(layer, planes, lambda on_host: self._layout.write(self._file, layer, place, on_host))

    def patch_prefetched(self, layer: int, places: UnitPlaces, planes: Planes) -> None:
        if self._transfers.is_fetching(layer) and not self._codec.window_tokens:
            put_units(self._codec.planes, self._transfers.fetched(layer)[0], places, planes)

    def append(self, layer: int, places: UnitPlaces, planes: Planes) -> None:
        self.patch_prefetched(layer, places, planes)
        slots, units = (numbers.tolist() for numbers in places.on_host)
        of_file = [self._slots[slot] for slot in slots]
        self._store(layer, planes, lambda on_host: self._layout.append(self._file, layer, of_file, units, on_host))

    def read(self, layer: int) -> Planes:
        self.prefetch(layer)
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

    def drop(self, layer: int) -> None:
        self._transfers.drop(layer)

    def drop_unused(self) -> None:
        self._transfers.drop_unused()

    def cancel(self) -> None:
        self._transfers.cancel()

    def close(self) -> None:
        self._transfers.close()
        self._file.close(delete=True)

    def _store(self, layer: int, planes: Planes, write: Callable[[Planes], int]) -> None:
        def store() -> None:
            self._transfers.count("cpu_to_disk", write(copied_to_host(self._tiers, planes)))

        self._transfers.store(layer, total_bytes(planes), store)


class FileLayout(ABC):
    """Where units are in the file of a cache block. num_bytes: of the file."""

    num_bytes: int

    @abstractmethod
    def write(self, file: DirectFile, layer: int, slot: int, planes: Planes) -> int:
        """Write the first units [n, *shape] of a slot; return the bytes written."""

    @abstractmethod
    def append(
        self, file: DirectFile, layer: int, slots: SequenceOf[int], units: SequenceOf[int], planes: Planes
    ) -> int:
        """Write one unit for each of `slots`, planes [len(slots), *shape]; return the bytes written."""

    @abstractmethod
    def read(self, file: DirectFile, layer: int, counts: SequenceOf[SlotCount], planes: Planes) -> int:
        """Fill planes with the first units of slots; return the bytes read."""


class StepLayout(FileLayout):
    """For units of one token: every pass appends one token to all slots of a block, which are written as one piece."""

    def __init__(self, block: CacheBlock, codec: Codec, num_layers: int) -> None:
        self._planes, self._num_slots, unit = codec.planes, block.num_slots, codec.unit_bytes
        self._prompts = [sequence.prompt_len for sequence in block.sequences]
        steps = max(sequence.cache_tokens - sequence.prompt_len for sequence in block.sequences)
        self._step_bytes = aligned(block.num_slots * unit)
        self._offsets: list[int] = []  # of each slot's prompt within a layer
        end = 0
        for length in self._prompts:
            self._offsets.append(end)
            end += aligned(length * unit)
        self._steps_offset, self._layer_bytes = end, end + steps * self._step_bytes
        self.num_bytes = max(aligned(1), num_layers * self._layer_bytes)

    def write(self, file: DirectFile, layer: int, slot: int, planes: Planes) -> int:
        assert planes[0].shape[0] == self._prompts[slot], "a prompt is written whole"
        pieces = [new.movedim(0, plane.unit_axis - 1).reshape(-1) for plane, new in zip(self._planes, planes)]
        if not self._prompts[slot]:
            return 0
        joined = torch.cat(pieces)
        file.write_tensor(layer * self._layer_bytes + self._offsets[slot], joined)
        return total_bytes((joined,))

    def append(
        self, file: DirectFile, layer: int, slots: SequenceOf[int], units: SequenceOf[int], planes: Planes
    ) -> int:
        steps = {unit - self._prompts[slot] for slot, unit in zip(slots, units)}
        assert len(steps) == 1, "the sequences of a block decode together"
        piece = torch.zeros((len(planes), self._num_slots, *planes[0].shape[1:]), dtype=planes[0].dtype)
        for half, new in zip(piece, planes):
            half[list(slots)] = new
        offset = self._steps_offset + steps.pop() * self._step_bytes
        file.write_tensor(layer * self._layer_bytes + offset, piece)
        return total_bytes((piece,))

    def read(self, file: DirectFile, layer: int, counts: SequenceOf[SlotCount], planes: Planes) -> int:
        base, num_bytes, specs = layer * self._layer_bytes, 0, self._planes
        for row, (slot, count) in enumerate(counts):
            if prompt := min(count, self._prompts[slot]):
                shape = specs[0].memory_shape(len(specs), self._prompts[slot])
                stored = file.read_tensor(base + self._offsets[slot], shape, specs[0].dtype)
                num_bytes += total_bytes((stored,))
                for plane, target, data in zip(specs, planes, stored):
                    plane.by_unit(target)[row, :prompt] = plane.by_unit(data[None])[0, :prompt]
        steps = max(0, max(count - self._prompts[slot] for slot, count in counts))
        if steps:
            # Each step fills whole pages; what is behind its tokens is read and left out.
            dtype = specs[0].dtype
            width, used = self._step_bytes // dtype.itemsize, sum(prod(plane.shape) for plane in specs)
            data = file.read_tensor(base + self._steps_offset, (steps, width), dtype)
            num_bytes += total_bytes((data,))
            tokens = data[:, : used * self._num_slots].reshape(steps, len(specs), self._num_slots, *specs[0].shape)
            for row, (slot, _) in enumerate(counts):
                first = self._prompts[slot]
                for index, (plane, target) in enumerate(zip(specs, planes)):
                    plane.by_unit(target)[row, first : first + steps] = tokens[:, index, slot]
        return num_bytes


class PagedLayout(FileLayout):
    """For groups of tokens: every unit begins a page of its slot, because slots complete groups at different times."""

    def __init__(self, block: CacheBlock, codec: Codec, num_layers: int) -> None:
        self._planes, self._unit_bytes = codec.planes, codec.unit_bytes
        self._page_bytes = aligned(codec.unit_bytes)
        self._slot_bytes = block.capacity // codec.group_tokens * self._page_bytes
        self._layer_bytes = block.num_slots * self._slot_bytes
        self.num_bytes = num_layers * self._layer_bytes

    def write(self, file: DirectFile, layer: int, slot: int, planes: Planes) -> int:
        return self._write(file, self._offset(layer, slot, 0), planes)

    def append(
        self, file: DirectFile, layer: int, slots: SequenceOf[int], units: SequenceOf[int], planes: Planes
    ) -> int:
        return sum(
            self._write(file, self._offset(layer, slot, unit), tuple(plane[i : i + 1] for plane in planes))
            for i, (slot, unit) in enumerate(zip(slots, units))
        )

    def read(self, file: DirectFile, layer: int, counts: SequenceOf[SlotCount], planes: Planes) -> int:
        sizes = [plane.unit_bytes for plane in self._planes]
        for row, (slot, count) in enumerate(counts):
            if count:
                data = file.read_tensor(self._offset(layer, slot, 0), (count, self._page_bytes), torch.uint8)
                for target, part in zip(planes, data[:, : self._unit_bytes].split(sizes, 1)):
                    target[row, :count] = part
        return sum(count for _, count in counts) * self._unit_bytes

    def _write(self, file: DirectFile, offset: int, planes: Planes) -> int:
        joined = torch.cat(planes, 1)
        pages = zeros((joined.shape[0], self._page_bytes), _HOST, torch.uint8)
        pages[:, : self._unit_bytes] = joined
        file.write_tensor(offset, pages)
        return total_bytes((joined,))

    def _offset(self, layer: int, slot: int, unit: int) -> int:
        return layer * self._layer_bytes + slot * self._slot_bytes + unit * self._page_bytes


def file_layout(block: CacheBlock, codec: Codec, num_layers: int) -> FileLayout:
    """Return the layout that suits how a codec appends."""
    return (PagedLayout if codec.window_tokens else StepLayout)(block, codec, num_layers)


def copied_to_device(tiers: TransferManager, planes: Planes) -> Planes:
    """Copy tensors of the host to the compute device; the same tensors where the host computes."""
    return tuple(tiers.to_device(plane, "cache") for plane in planes)


def copied_to_host(tiers: TransferManager, planes: Planes) -> Planes:
    """Copy tensors of the compute device to the host; the same tensors where the host computes."""
    return tuple(tiers.to_host(plane, "cache") for plane in planes)


def empty_planes(specs: SequenceOf[Plane], slots: int, units: int, device: torch.device) -> Planes:
    return tuple(zeros(plane.memory_shape(slots, units), device, plane.dtype) for plane in specs)
