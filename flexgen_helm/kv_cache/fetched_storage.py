"""Storages of cache blocks away from the compute device: in host memory, or in a file on the disk.

A layer is fetched ahead of its use and stored late. On the disk a block is one file (`FileLayout`).
Shapes: B sequences, n units; see `codec`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.kv_cache.codec import Codec, Planes, QuantizedCodec, SlotIndex, total_bytes, zeros
from flexgen_helm.kv_cache.storage import MemoryStorage, Storage
from flexgen_helm.offload.copy_engine import Launched
from flexgen_helm.offload.disk import DirectFile
from flexgen_helm.offload.ledger import Allocation
from flexgen_helm.offload.transfer_manager import TransferManager
from flexgen_helm.scheduling.sequence import CacheBlock
from flexgen_helm.shared_sizes import aligned
from flexgen_helm.tiers import MEMORY_ADVICE, UNLIMITED, Tier

_HOST = torch.device("cpu")
# Share of its slots' units from which on a layer is fetched with all of them: pinned memory that is
# contiguous crosses the link without a copy within the host, which would halve the rate.
_WHOLE_SLOTS_FROM = 0.5


class Fetched(NamedTuple):
    """What a fetch brings: the planes that every query reads; and from a file, all on the host."""

    on_device: Planes
    on_host: Planes = ()


class FetchedStorage(Storage):
    """Away from the compute device: what a query reads is brought for each use. For the computing
    thread.

    Fetches and stores of a layer wait for those of the other kind that were submitted before them.
    """

    def __init__(self, tiers: TransferManager, codec: Codec, block: CacheBlock) -> None:
        self._tiers, self._codec, self._block = tiers, codec, block
        self._fetches: dict[int, tuple[Future[Fetched], Allocation]] = {}  # by layer
        self._in_use: set[int] = set()  # layers of `_fetches` that attention reads
        # by layer those that may still run, or have failed
        self._stores: dict[int, list[Future[None]]] = {}

    @abstractmethod
    def _prepare_fetch(
        self, layer: int, counts: list[int], units: int, new_units: int
    ) -> tuple[int, Callable[[], Fetched]]:
        """Return the bytes that a fetch takes on the compute device, and what runs it.

        counts: units of each slot that are stored.
        units: of every slot that the fetched planes have.
        new_units: those of them, 0 or 1, that are appended before the planes are read.
        """

    def prefetch(self, layer: int, *, ahead: bool = False) -> None:
        sequences, codec = self._block.sequences, self._codec
        # A shared prefix is read by other blocks, and gets no new token.
        is_shared = sequences[0].is_shared
        new_units = 0 if codec.window_tokens or is_shared else 1
        # with the new token of each sequence
        tokens = [
            sequence.prompt_len if is_shared else codec.num_stored(sequence.num_computed)
            for sequence in sequences
        ]
        counts = [count // codec.group_tokens - new_units for count in tokens]
        units = codec.ring_units or max(counts) + new_units
        if layer in self._fetches or not units:
            return
        num_bytes, fetch = self._prepare_fetch(layer, counts, units, new_units)
        stores = tuple(self._stores.get(layer, ()))

        def after_stores() -> Fetched:
            with self._tiers.stats.timed("load_cache"):
                _finish(stores)
                return fetch()

        with self._tiers.ledgers[self._tiers.compute_tier].claimed(
            "staging", num_bytes, ahead=ahead
        ) as claim:
            self._tiers.note_fetch(num_bytes)
            self._fetches[layer] = self._tiers.submit("cache in", after_stores), claim

    def read(self, layer: int) -> Planes:
        self.prefetch(layer)
        return self._fetched(layer).on_device

    def patch_prefetched(self, layer: int, target: SlotIndex, planes: Planes) -> None:
        if layer in self._fetches and not self._codec.window_tokens:
            self._codec.put_units(self._fetched(layer).on_device, target, planes)

    def select(self, layer: int, slots: slice, tokens: Tensor) -> Tensor:
        assert isinstance(self._codec, QuantizedCodec)
        on_host = self._tiers.to_host(tokens, "cache")
        selected = self._codec.select_values(self._values(layer)[slots], on_host)
        return self._tiers.to_device(selected, "cache")

    def _values(self, layer: int) -> Tensor:
        """Return the values' plane of all slots, on the host."""
        return self._fetched(layer).on_host[1]

    def drop(self, layer: int) -> None:
        self._in_use.discard(layer)
        if layer in self._fetches:
            future, claim = self._fetches.pop(layer)
            future.exception()  # waits; an error was raised where the layer was read
            self._tiers.ledgers[self._tiers.compute_tier].release(claim)

    def drop_unused(self) -> None:
        for layer in self._fetches.keys() - self._in_use:
            self.drop(layer)

    def finish_stores(self, *layers: int) -> None:
        """Wait for the stores of some layers (none: of all); raise their first error."""
        _finish(
            [
                store
                for layer in layers or list(self._stores)
                for store in self._stores.pop(layer, ())
            ]
        )

    def cancel(self) -> None:
        # The next pass may mean another layer by the same number, and writes behind what is stored
        # now.
        for layer in list(self._fetches):
            self.drop(layer)
        for stores in self._stores.values():
            for store in stores:
                store.exception()  # waits; who reads the layer gets it

    def _fetched(self, layer: int) -> Fetched:
        """Wait for a layer that was prefetched."""
        self._in_use.add(layer)
        return self._tiers.wait(self._fetches[layer][0], "cache")

    def _store(self, layer: int, planes: Planes, write: Callable[[Launched], None]) -> None:
        """Write in the background; a later fetch of the layer waits for it, and gets its error.

        write: is given the work that makes the data.
        """
        reading = self._fetches.get(layer)

        def store(after: Launched) -> None:
            if reading is not None:
                # waits: what is written here is masked out of what it brings
                reading[0].exception()
            try:
                write(after)
            except (MemoryError, torch.OutOfMemoryError) as error:
                # A smaller batch does not help: the pass that could write this again may be long
                # over.
                raise MemoryLimitError(
                    f"memory ran out while the KV cache was stored; {MEMORY_ADVICE}"
                ) from error

        future = self._tiers.store_async("cache", total_bytes(planes), store)
        not_stored = [
            earlier
            for earlier in self._stores.get(layer, ())
            if not earlier.done() or earlier.exception() is not None
        ]
        self._stores[layer] = [*not_stored, future]

    def _to_device(self, planes: Planes) -> Planes:
        return tuple(self._tiers.to_device(plane, "cache") for plane in planes)

    def _to_host(self, planes: Planes, after: Launched) -> Planes:
        return tuple(self._tiers.to_host(plane, "cache", after=after) for plane in planes)


def _finish(stores: Sequence[Future[None]]) -> None:
    """Wait for all stores; raise their first error."""
    errors = [error for store in stores if (error := store.exception()) is not None]
    if errors:
        raise errors[0]


class HostStorage(FetchedStorage):
    """In host memory behind the link: what a query reads crosses the link for each use."""

    tier: Tier = "cpu"

    def __init__(
        self, tiers: TransferManager, codec: Codec, block: CacheBlock, memory: MemoryStorage
    ) -> None:
        super().__init__(tiers, codec, block)
        self._memory = memory

    def write(self, layer: int, slot: int, planes: Planes) -> None:
        targets = self._memory.first_units(layer, slot, len(planes[0]))

        def store(after: Launched) -> None:
            for new, target in zip(planes, targets):
                self._tiers.to_host(new, "cache", target, after)

        self._store(layer, planes, store)

    def append(self, layer: int, target: SlotIndex, planes: Planes) -> None:
        self.patch_prefetched(layer, target, planes)
        self._store(
            layer,
            planes,
            lambda after: self._memory.append(layer, target, self._to_host(planes, after)),
        )

    def _values(self, layer: int) -> Tensor:
        self.finish_stores(layer)  # of groups that are not visible yet, in the same tensors
        return self._memory.read(layer)[1]

    def move(self, source: int, target: int, units: int, stale_units: int) -> None:
        self.finish_stores()
        self._memory.move(source, target, units, stale_units)

    def settled(self) -> MemoryStorage:
        for layer in list(self._fetches):
            self.drop(layer)
        self.finish_stores()
        return self._memory

    def _prepare_fetch(
        self, layer: int, counts: list[int], units: int, new_units: int
    ) -> tuple[int, Callable[[], Fetched]]:
        codec, num_slots = self._codec, len(counts)
        stored = self._memory.read(layer)[: codec.num_fetched_planes]
        if _WHOLE_SLOTS_FROM * self._memory.units <= units:
            whole = tuple(data[:num_slots] for data in stored)
            return total_bytes(whole), lambda: Fetched(self._to_device(whole))

        def fetch() -> Fetched:
            # One long copy over the link, spread out behind it.
            axes = [plane.unit_axis for plane in codec.planes]
            used = tuple(
                data[:num_slots].narrow(axis, 0, units - new_units)
                for axis, data in zip(axes, stored)
            )
            arrived = self._to_device(used)
            if not new_units:
                return Fetched(arrived)
            wider = codec.new_planes(num_slots, units, partial(zeros, device=self._tiers.device))
            for plane, new, old in zip(codec.planes, wider, arrived):
                plane.by_unit(new)[:, : units - new_units] = plane.by_unit(old)
            return Fetched(wider)

        return num_slots * units * codec.fetched_bytes, fetch

    def close(self) -> None:
        self.cancel()
        self._memory.close()


class DiskStorage(FetchedStorage):
    """In a file of the run; a fetch brings planes to the device, and all planes to the host.

    Slots do not move: a sequence that takes another's slot is only known by a new number.
    """

    tier: Tier = "disk"

    def __init__(
        self,
        tiers: TransferManager,
        codec: Codec,
        block: CacheBlock,
        layout: FileLayout,
        file: DirectFile,
    ) -> None:
        super().__init__(tiers, codec, block)
        self._layout, self._file = layout, file
        self._slots = list(range(block.num_slots))  # slot of the block -> slot of the file

    def write(self, layer: int, slot: int, planes: Planes) -> None:
        file_slot = self._slots[slot]
        self._store_on_disk(
            layer, planes, lambda on_host: self._layout.write(self._file, layer, file_slot, on_host)
        )

    def append(self, layer: int, target: SlotIndex, planes: Planes) -> None:
        self.patch_prefetched(layer, target, planes)
        file_slots = [
            (self._slots[slot], unit)
            for slot, unit in zip(target.slots.numbers, target.index.numbers)
        ]
        self._store_on_disk(
            layer,
            planes,
            lambda on_host: self._layout.append(self._file, layer, file_slots, on_host),
        )

    def _store_on_disk(self, layer: int, planes: Planes, write: Callable[[Planes], int]) -> None:
        def store(after: Launched) -> None:
            self._tiers.stats.count_bytes(
                "cpu_to_disk", "cache", write(self._to_host(planes, after))
            )

        self._store(layer, planes, store)

    def move(self, source: int, target: int, units: int, stale_units: int) -> None:
        self._slots[target], self._slots[source] = self._slots[source], self._slots[target]

    def _prepare_fetch(
        self, layer: int, counts: list[int], units: int, new_units: int
    ) -> tuple[int, Callable[[], Fetched]]:
        codec, file_counts = self._codec, list(zip(self._slots, counts))

        def fetch() -> Fetched:
            on_host = codec.new_planes(len(counts), units, partial(zeros, device=_HOST))
            num_bytes = self._layout.read(self._file, layer, file_counts, on_host)
            self._tiers.stats.count_bytes("disk_to_cpu", "cache", num_bytes)
            return Fetched(self._to_device(on_host[: codec.num_fetched_planes]), on_host)

        return len(counts) * units * codec.unit_bytes, fetch

    def close(self) -> None:
        self.cancel()
        self._file.close(delete=True)


# Slots of a file, each with the count of its first units, or with the index of one unit.
FileSlots = Sequence[tuple[int, int]]


class StepLayout:
    """Where units of one token are in the file of a block, layer after layer. num_bytes: of the
    file.

    Every pass appends one token to all slots of a block, which are written as one piece:

        | slot 0: its prompt | slot 1 … | step 0: one token of all slots | step 1 … |

    Of a ring there are its units of each prompt, and as many steps, each in the place of the one
    that it follows.
    """

    def __init__(self, block: CacheBlock, codec: Codec, num_layers: int) -> None:
        self._planes, self._num_slots = codec.planes, block.num_slots
        self._ring = codec.ring_units or UNLIMITED
        sequences = block.sequences
        self._prompt_tokens = [sequence.prompt_len for sequence in sequences]
        self._prompt_units = [min(self._ring, tokens) for tokens in self._prompt_tokens]
        answers = [sequence.cache_tokens - sequence.prompt_len for sequence in sequences]
        steps = min(self._ring, max(answers))
        self._step_bytes = aligned(block.num_slots * codec.unit_bytes)
        self._offsets: list[int] = []  # of each slot's prompt within a layer
        end = 0
        for units in self._prompt_units:
            self._offsets.append(end)
            end += aligned(units * codec.unit_bytes)
        self._steps_offset, self._layer_bytes = end, end + steps * self._step_bytes
        self.num_bytes = max(aligned(1), num_layers * self._layer_bytes)

    def write(self, file: DirectFile, layer: int, slot: int, planes: Planes) -> int:
        """Write the first units [n, *shape] of a slot; return the bytes written."""
        assert planes[0].shape[0] == self._prompt_units[slot], "a prompt is written whole"
        if not self._prompt_units[slot]:
            return 0
        pieces = [
            new.movedim(0, plane.unit_axis - 1).reshape(-1)
            for plane, new in zip(self._planes, planes)
        ]
        file.write_tensor(layer * self._layer_bytes + self._offsets[slot], torch.cat(pieces))
        return total_bytes(pieces)

    def append(self, file: DirectFile, layer: int, slots: FileSlots, planes: Planes) -> int:
        """Write one unit for each of the slots, planes [len(slots), *shape]; return the bytes
        written.
        """
        # The sequences of a block decode together, so all are at the same step.
        (step,) = {(unit - self._prompt_tokens[slot]) % self._ring for slot, unit in slots}
        piece = torch.zeros(
            (len(planes), self._num_slots, *planes[0].shape[1:]), dtype=planes[0].dtype
        )
        for plane, new in zip(piece, planes):
            plane[[slot for slot, _ in slots]] = new
        file.write_tensor(
            layer * self._layer_bytes + self._steps_offset + step * self._step_bytes, piece
        )
        return piece.nbytes

    def read(self, file: DirectFile, layer: int, slots: FileSlots, planes: Planes) -> int:
        """Fill planes with the first units of slots; return the bytes read."""
        layer_offset, num_bytes = layer * self._layer_bytes, 0
        specs, dtype = self._planes, self._planes[0].dtype
        steps = min(
            self._ring, max(0, max(count - self._prompt_tokens[slot] for slot, count in slots))
        )
        for row, (slot, count) in enumerate(slots):
            prompt = min(count, self._prompt_units[slot])
            if prompt and steps < self._ring:  # else newer tokens have taken its units
                shape = specs[0].memory_shape(len(specs), self._prompt_units[slot])
                stored = file.read_tensor(layer_offset + self._offsets[slot], shape, dtype)
                num_bytes += stored.nbytes
                for plane, target, data in zip(specs, planes, stored):
                    plane.by_unit(target)[row, :prompt] = plane.by_unit(data[None])[0, :prompt]
        if steps:
            # Each step fills whole pages; what is behind its tokens is read and left out.
            width = self._step_bytes // dtype.itemsize
            used = sum(prod(plane.shape) for plane in specs)
            data = file.read_tensor(layer_offset + self._steps_offset, (steps, width), dtype)
            num_bytes += data.nbytes
            tokens = data[:, : used * self._num_slots].reshape(
                steps, len(specs), self._num_slots, *specs[0].shape
            )
            for row, (slot, _) in enumerate(slots):
                first = self._prompt_tokens[slot] % self._ring
                until_end = min(steps, self._ring - first)  # of the ring, which then begins anew
                for number, (plane, target) in enumerate(zip(specs, planes)):
                    by_unit, new = plane.by_unit(target)[row], tokens[:, number, slot]
                    by_unit[first : first + until_end] = new[:until_end]
                    by_unit[: steps - until_end] = new[until_end:]
        return num_bytes


class PagedLayout:
    """Where groups of tokens are in the file of a block, layer after layer. num_bytes: of the file.

    Every unit begins a page of its slot, because slots complete groups at different times:

        | slot 0: unit, unit, … (in whole pages) | slot 1 … |
    """

    def __init__(self, block: CacheBlock, codec: Codec, num_layers: int) -> None:
        self._planes, self._unit_bytes = codec.planes, codec.unit_bytes
        self._page_bytes = aligned(codec.unit_bytes)
        self._slot_bytes = block.capacity // codec.group_tokens * self._page_bytes
        self._layer_bytes = block.num_slots * self._slot_bytes
        self.num_bytes = num_layers * self._layer_bytes

    def write(self, file: DirectFile, layer: int, slot: int, planes: Planes) -> int:
        return self._write(file, self._offset(layer, slot, 0), planes)

    def append(self, file: DirectFile, layer: int, slots: FileSlots, planes: Planes) -> int:
        return sum(
            self._write(
                file, self._offset(layer, slot, unit), tuple(plane[i : i + 1] for plane in planes)
            )
            for i, (slot, unit) in enumerate(slots)
        )

    def read(self, file: DirectFile, layer: int, slots: FileSlots, planes: Planes) -> int:
        sizes = [plane.unit_bytes for plane in self._planes]
        for row, (slot, count) in enumerate(slots):
            if count:
                data = file.read_tensor(
                    self._offset(layer, slot, 0), (count, self._page_bytes), torch.uint8
                )
                for target, part in zip(planes, data[:, : self._unit_bytes].split(sizes, 1)):
                    target[row, :count] = part
        return sum(count for _, count in slots) * self._unit_bytes

    def _write(self, file: DirectFile, offset: int, planes: Planes) -> int:
        pages = zeros((planes[0].shape[0], self._page_bytes), torch.uint8, _HOST)
        pages[:, : self._unit_bytes] = torch.cat(planes, 1)
        file.write_tensor(offset, pages)
        return total_bytes(planes)

    def _offset(self, layer: int, slot: int, unit: int) -> int:
        return layer * self._layer_bytes + slot * self._slot_bytes + unit * self._page_bytes


FileLayout = StepLayout | PagedLayout


def file_layout(block: CacheBlock, codec: Codec, num_layers: int) -> FileLayout:
    """Return the layout that suits how a codec appends."""
    return (PagedLayout if codec.window_tokens else StepLayout)(block, codec, num_layers)
