"""The cache of one slot group on one tier: beside the computing, in host memory, or on the disk.

In memory a group has a tensor of keys and one of values a layer. On the disk it has, for every layer, the prompt of
each slot in one piece and then one piece for each step of all slots, so that both are written once and read in long
runs:

    layer 0: | slot 0: K V of its prompt | slot 1 … | step 0: K V of all slots | step 1 … |   layer 1: …
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from math import prod
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.offload.ledger import Allocation
from flexgen_helm.offload.staging import aligned
from flexgen_helm.offload.tiers import Tiers
from flexgen_helm.offload.transfer_stats import LinkName
from flexgen_helm.planner.placement import Tier
from flexgen_helm.sequence import CacheBlock


@dataclass(frozen=True)
class CacheShape:
    """What of a model its cache follows from. num_layers: those whose keys and values exist at a time."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


KeysValues = tuple[Tensor, Tensor]  # [slots, Hk, S, D] each
Brought = TypeVar("Brought")


class GroupCache(ABC):
    """One slot group's cache on one tier."""

    tier: Tier
    claims: list[Allocation]

    @abstractmethod
    def write(self, slot: int, layer: int, start: int, k: Tensor, v: Tensor) -> None: ...

    @abstractmethod
    def append(self, layer: int, positions: Tensor, k: Tensor, v: Tensor) -> None: ...

    @abstractmethod
    def read(self, layer: int) -> KeysValues:
        """All slots' keys and values [slots, Hk, capacity, D], beside the computing or where attention runs."""

    @abstractmethod
    def move(self, source: int, target: int, length: int, stale: int) -> None: ...

    def prefetch(self, layer: int) -> None:
        return None

    def drop(self, layer: int) -> None:
        return None

    def cancel(self) -> None:
        """A pass has broken off: what was brought for it is dropped."""
        return None

    def close(self) -> None:
        return None


class LayerTransfers(Generic[Brought]):
    """What groups away from the computing share: layers that were brought, and writes that are under way."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._coming: dict[int, tuple[Future[Brought], Allocation]] = {}
        self._leaving: dict[int, list[Future[None]]] = {}
        self._lock = threading.Lock()

    def get(self, layer: int) -> Brought:
        """What was fetched, when it is there."""
        return self._tiers.wait(self._coming[layer][0], "cache")

    def fetch(self, layer: int, size: int, bring: Callable[[], Brought]) -> None:
        """Bring a layer, of `size` bytes beside the computing, after all its writes."""
        if layer in self._coming:
            return

        def settled() -> Brought:
            with self._tiers.stats.timed("load_cache"):
                self.settle(layer)
                return bring()

        with self._tiers.ledgers[self._tiers.compute_tier].claimed("staging", size) as claim:
            self._tiers.note_fetch(size)
            self._coming[layer] = self._tiers.submit("cache in", settled), claim

    def is_coming(self, layer: int) -> bool:
        return layer in self._coming

    def drop(self, layer: int) -> None:
        coming = self._coming.pop(layer, None)
        if coming is not None:
            coming[0].exception()  # waits; an error was raised where the data were needed
            self._tiers.ledgers[self._tiers.compute_tier].release(coming[1])

    def cancel(self) -> None:
        """Drop what is coming: it may be of a layer that the next pass means something else by, or an error that the
        next pass need not meet. What is leaving arrives first, so that the next pass writes behind it."""
        for layer in list(self._coming):
            self.drop(layer)
        for future in [future for waiting in self._leaving.values() for future in waiting]:
            future.exception()  # waits

    def close(self) -> None:
        self.cancel()
        self._leaving.clear()  # nobody reads what was written here any more

    def leave(self, layer: int, num_bytes: int, store: Callable[[], None]) -> None:
        """Write in the background; a later read of the layer waits for it, and gets its error."""

        def checked() -> None:
            try:
                store()
            except (MemoryError, torch.OutOfMemoryError) as error:
                # Not to be met by a smaller batch: the pass that could write this again may be long over.
                raise MemoryLimitError(
                    "memory ran out while the KV cache was stored; lower --gpu-memory or --cpu-memory so that more is "
                    "kept free"
                ) from error

        future = self._tiers.store_async("cache", num_bytes, checked)
        with self._lock:
            self._leaving.setdefault(layer, []).append(future)

    def settle_all(self) -> None:
        for layer in list(self._leaving):
            self.settle(layer)

    def settle(self, layer: int) -> None:
        """Wait for all writes of a layer; their first error is raised."""
        with self._lock:
            waiting = self._leaving.pop(layer, [])
        errors = [error for future in waiting if (error := future.exception()) is not None]
        if errors:
            raise errors[0]

    def moved(self, link: LinkName, size: int) -> None:
        self._tiers.stats.count_bytes(link, "cache", size)


class FarCache(GroupCache):
    """A group away from the computing: a layer of it is brought for each use."""

    def __init__(self, config: CacheShape, tiers: Tiers, dtype: torch.dtype, group: CacheBlock) -> None:
        self._config, self._tiers, self._dtype, self._group = config, tiers, dtype, group
        self._transfers: LayerTransfers[KeysValues] = LayerTransfers(tiers)

    def read(self, layer: int) -> KeysValues:
        self.prefetch(layer)
        return self._transfers.get(layer)

    def prefetch(self, layer: int) -> None:
        if self._transfers.is_coming(layer):
            return
        config, rows = self._config, len(self._group.sequences)
        # What the rows have computed, and the token that is about to be appended; of a prefix whose batch is not
        # through yet, what it has written.
        longest = max(max(row.num_computed, row.prompt_len) for row in self._group.sequences)
        shape = (rows, config.num_kv_heads, longest + 1, config.head_dim)

        def bring() -> KeysValues:
            keys, values = (zeros(shape, self._tiers.device, self._dtype) for _ in range(2))
            self._bring(layer, keys, values)
            return keys, values

        self._transfers.fetch(layer, 2 * prod(shape) * self._dtype.itemsize, bring)

    def drop(self, layer: int) -> None:
        self._transfers.drop(layer)

    def cancel(self) -> None:
        self._transfers.cancel()

    def close(self) -> None:
        self._transfers.close()

    @abstractmethod
    def _bring(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Fill [rows, Hk, S, D] with what the group's rows have computed."""

    def _append_to_brought(self, layer: int, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """The copy that attention is about to read, which holds what was computed before, needs the new tokens too."""
        _put(self.read(layer), positions, k, v)


class MemoryCache:
    """A tensor of keys and one of values a layer, that grow by copying: a page at a time, a layer at a time."""

    def __init__(
        self, config: CacheShape, group: CacheBlock, capacity: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.capacity = capacity
        shape = (group.num_slots, config.num_kv_heads, capacity, config.head_dim)
        self._layers = [(zeros(shape, device, dtype), zeros(shape, device, dtype)) for _ in range(config.num_layers)]

    def widen(self, layer: int) -> None:
        """Bring a layer to the capacity that was claimed."""
        keys, values = self._layers[layer]
        if keys.shape[2] < self.capacity:
            self._layers[layer] = _widened(keys, self.capacity), _widened(values, self.capacity)


class NearCache(MemoryCache, GroupCache):
    """Beside the computing, or in host memory where the host computes attention."""

    def __init__(
        self,
        config: CacheShape,
        tiers: Tiers,
        dtype: torch.dtype,
        group: CacheBlock,
        capacity: int,
        tier: Tier,
        claim: Allocation,
    ) -> None:
        self.tier, self.claims = tier, [claim]
        device = tiers.device if tier == tiers.compute_tier else torch.device("cpu")
        super().__init__(config, group, capacity, device, dtype)

    def write(self, slot: int, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        end = start + k.shape[0]
        for held, new in zip(self._layers[layer], (k, v)):
            held[slot, :, start:end] = new.transpose(0, 1)

    def append(self, layer: int, positions: Tensor, k: Tensor, v: Tensor) -> None:
        _put(self._layers[layer], positions, k, v)

    def read(self, layer: int) -> KeysValues:
        return self._layers[layer]

    def move(self, source: int, target: int, length: int, stale: int) -> None:
        _copy_slot(self._layers, source, target, length, stale)


class HostCache(MemoryCache, FarCache):
    """In host memory behind the link; a layer's part that is filled crosses it for each use."""

    def __init__(
        self, config: CacheShape, tiers: Tiers, dtype: torch.dtype, group: CacheBlock, capacity: int, claim: Allocation
    ) -> None:
        FarCache.__init__(self, config, tiers, dtype, group)
        MemoryCache.__init__(self, config, group, capacity, torch.device("cpu"), dtype)
        self.tier, self.claims = "cpu", [claim]
        assert tiers.copy_engine is not None
        self._link = tiers.copy_engine

    def widen(self, layer: int) -> None:
        self._transfers.settle(layer)
        if self._transfers.is_coming(layer):  # its copy is made before the tensors change
            self._transfers.get(layer)
        super().widen(layer)

    def write(self, slot: int, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        end = start + k.shape[0]

        def store() -> None:
            for held, new in zip(self._layers[layer], (k, v)):
                held[slot, :, start:end] = self._link.to_host(new).transpose(0, 1)
                self._transfers.moved("gpu_to_cpu", new.numel() * new.element_size())

        self._transfers.leave(layer, 2 * k.numel() * k.element_size(), store)

    def append(self, layer: int, positions: Tensor, k: Tensor, v: Tensor) -> None:
        self._append_to_brought(layer, positions, k, v)

        def store() -> None:
            near = self._link.to_host(k), self._link.to_host(v)
            self._transfers.moved("gpu_to_cpu", 2 * k.numel() * k.element_size())
            _put(self._layers[layer], positions.cpu(), *near)

        self._transfers.leave(layer, 2 * k.numel() * k.element_size(), store)

    def move(self, source: int, target: int, length: int, stale: int) -> None:
        self._transfers.settle_all()
        _copy_slot(self._layers, source, target, length, stale)

    def _bring(self, layer: int, keys: Tensor, values: Tensor) -> None:
        length = keys.shape[2] - 1
        if not length:
            return
        for held, near in zip(self._layers[layer], (keys, values)):
            filled = held[: near.shape[0], :, :length].contiguous()  # one long copy over the link, spread out behind it
            near[:, :, :length] = self._link.to_device(filled)
            self._transfers.moved("cpu_to_gpu", filled.numel() * filled.element_size())


class DiskCache(FarCache):
    """In a file of the run. Slots do not move: a row that takes another's place is only known by a new number."""

    def __init__(self, config: CacheShape, tiers: Tiers, dtype: torch.dtype, group: CacheBlock) -> None:
        super().__init__(config, tiers, dtype, group)
        self.tier = "disk"
        self._stored = list(range(group.num_slots))  # slot of the group -> slot of the file
        self._prompts = [row.prompt_len for row in group.sequences]
        steps = max(row.cache_tokens - row.prompt_len for row in group.sequences)
        token = 2 * config.num_kv_heads * config.head_dim * dtype.itemsize
        self._token_bytes, self._step_bytes = token, aligned(group.num_slots * token)
        self._offsets: list[int] = []  # of each slot's prompt within a layer
        end = 0
        for length in self._prompts:
            self._offsets.append(end)
            end += aligned(length * token)
        self._steps_offset, self._layer_bytes = end, end + steps * self._step_bytes
        size = max(aligned(1), config.num_layers * self._layer_bytes)
        with tiers.ledgers["disk"].claimed("cache", size) as claim:
            self._file = tiers.directory().scratch(f"cache-{claim.serial}", size)
        self.claims = [claim]

    def write(self, slot: int, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        stored = self._stored[slot]
        assert start == 0 and k.shape[0] == self._prompts[stored], "a prompt is written whole"
        pieces = torch.stack((k.transpose(0, 1), v.transpose(0, 1)))  # [2, Hk, P, D]
        self._store(layer, self._offsets[stored], pieces)

    def append(self, layer: int, positions: Tensor, k: Tensor, v: Tensor) -> None:
        self._append_to_brought(layer, positions, k, v)
        rows = len(self._group.sequences)
        shape = (2, len(self._stored), self._config.num_kv_heads, self._config.head_dim)
        pieces = torch.zeros(shape, dtype=self._dtype, device=k.device)
        pieces[0, self._stored[:rows]], pieces[1, self._stored[:rows]] = k, v
        self._store(layer, self._steps_offset + self._step(0) * self._step_bytes, pieces)

    def move(self, source: int, target: int, length: int, stale: int) -> None:
        self._stored[target], self._stored[source] = self._stored[source], self._stored[target]

    def close(self) -> None:
        super().close()
        self._file.close(delete=True)

    def _step(self, slot: int) -> int:
        """Tokens that the row has computed behind its prompt; the same for all rows of the group."""
        return self._group.sequences[slot].num_computed - self._prompts[self._stored[slot]]

    def _store(self, layer: int, offset: int, pieces: Tensor) -> None:
        size = pieces.numel() * pieces.element_size()
        if not size:
            return

        def store() -> None:
            near = pieces
            if self._tiers.copy_engine is not None:
                near = self._tiers.copy_engine.to_host(pieces)
                self._transfers.moved("gpu_to_cpu", size)
            self._file.write_tensor(layer * self._layer_bytes + offset, near)
            self._transfers.moved("cpu_to_disk", size)

        self._transfers.leave(layer, size, store)

    def _bring(self, layer: int, keys: Tensor, values: Tensor) -> None:
        config, link, rows = self._config, self._tiers.copy_engine, keys.shape[0]
        near = (keys, values)
        if link is not None:  # put together on the host, then over the link in one piece
            near = (torch.zeros(keys.shape, dtype=self._dtype), torch.zeros(keys.shape, dtype=self._dtype))
        count = max(0, self._step(0))  # less: a prefix in the pass that computes it
        for slot in range(rows):
            stored = self._stored[slot]
            length = self._prompts[stored]
            if length:
                found = self._read(layer, self._offsets[stored], (2, config.num_kv_heads, length, config.head_dim))
                near[0][slot, :, :length], near[1][slot, :, :length] = found[0], found[1]
        if count:
            # Each step fills whole pages; what is beside its tokens is read and left out.
            width = self._step_bytes // self._dtype.itemsize
            steps = self._read(layer, self._steps_offset, (count, width))
            tokens = len(self._stored) * self._token_bytes // self._dtype.itemsize
            shape = (count, 2, len(self._stored), config.num_kv_heads, config.head_dim)
            steps = steps[:, :tokens].reshape(shape)
            for slot in range(rows):
                stored = self._stored[slot]
                columns = slice(self._prompts[stored], self._prompts[stored] + count)
                for half in (0, 1):
                    near[half][slot, :, columns] = steps[:, half, stored].transpose(0, 1)
        if link is not None:
            for host, device in zip(near, (keys, values)):
                link.to_device(host, device)
                self._transfers.moved("cpu_to_gpu", host.numel() * host.element_size())

    def _read(self, layer: int, offset: int, shape: tuple[int, ...]) -> Tensor:
        found = self._file.read_tensor(layer * self._layer_bytes + offset, shape, self._dtype)
        self._transfers.moved("disk_to_cpu", found.numel() * found.element_size())
        return found


def _put(layer: KeysValues, positions: Tensor, k: Tensor, v: Tensor) -> None:
    """One token [B, Hk, D] into each of the first B slots, at its position."""
    for held, new in zip(layer, (k, v)):
        held[torch.arange(new.shape[0], device=held.device), :, positions] = new


def _copy_slot(layers: list[KeysValues], source: int, target: int, length: int, stale: int) -> None:
    # What remains of the old row is cleared: a masked position still takes part in the product with weight 0, and 0
    # times a value that is not finite would carry one row's fault into its neighbours.
    for pair in layers:
        for tensor in pair:
            tensor[target, :, :length] = tensor[source, :, :length]
            tensor[target, :, length:stale] = 0


def _widened(held: Tensor, capacity: int) -> Tensor:
    wider = zeros((*held.shape[:2], capacity, held.shape[3]), held.device, held.dtype)
    wider[:, :, : held.shape[2]] = held
    return wider


def zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Zeros, because masked positions are multiplied by 0 and must be finite.

    On the CPU they come from numpy, which leaves zeroing to the system: pages cost nothing until they are written,
    so a row that ends early never costs its whole slot. `torch.zeros` writes them all at once.
    """
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
    return torch.zeros(shape, device=device, dtype=dtype)
