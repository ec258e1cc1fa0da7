"""Where the units of a cache block are stored: on the compute device, in host memory, or on the disk.

In memory a plane has one tensor a layer (`MemoryPlanes`), on the disk a block is one file (`FileLayout`). Shapes:
B sequences, n units; see `codec`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic

import torch
from torch import Tensor

from flexgen_helm.kv_cache.codec import Codec, Planes, total_bytes
from flexgen_helm.kv_cache.file_layout import FileLayout
from flexgen_helm.kv_cache.memory_planes import MemoryPlanes, empty_planes, put_units
from flexgen_helm.kv_cache.new_tokens import UnitPlaces
from flexgen_helm.kv_cache.transfers import BlockTransfers, Fetched
from flexgen_helm.kv_cache.visibility import stored_extent
from flexgen_helm.offload.copy_engine import Launched
from flexgen_helm.offload.disk import DirectFile
from flexgen_helm.offload.transfer_manager import TransferManager
from flexgen_helm.planner.placement import Tier
from flexgen_helm.scheduling.sequence import CacheBlock

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
