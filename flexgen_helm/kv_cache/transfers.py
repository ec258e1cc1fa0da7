"""Copies of one cache block between its tier and the compute device: fetches ahead of their use, and late stores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

import torch

from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.offload.staging import Allocation
from flexgen_helm.offload.transfer_manager import Launched, TransferManager
from flexgen_helm.offload.transfer_stats import LinkName
from flexgen_helm.planner.placement import MEMORY_ADVICE

Fetched = TypeVar("Fetched")


class BlockTransfers(Generic[Fetched]):
    """Layers of a block that were fetched, and stores that are under way; for the computing thread.

    Fetches and stores of a layer wait for those of the other kind that were submitted before them.
    """

    def __init__(self, tiers: TransferManager) -> None:
        self._tiers = tiers
        self._fetches: dict[int, tuple[Future[Fetched], Allocation]] = {}
        self._in_use: set[int] = set()  # of those layers, what attention reads
        self._stores: dict[int, list[Future[None]]] = {}  # those that may still run or have failed

    def prefetch(self, layer: int, num_bytes: int, fetch: Callable[[], Fetched], *, ahead: bool) -> None:
        """Begin to fetch a layer, which takes `num_bytes` on the compute device; harmless if it is under way.

        ahead: it is not needed yet. Its memory is given back where something else needs it (`drop_unused`).
        """
        if layer in self._fetches:
            return

        stores = tuple(self._stores.get(layer, ()))

        def after_stores() -> Fetched:
            with self._tiers.stats.timed("load_cache"):
                _finish(stores)
                return fetch()

        with self._tiers.ledgers[self._tiers.compute_tier].claimed("staging", num_bytes, ahead=ahead) as claim:
            self._tiers.note_fetch(num_bytes)
            self._fetches[layer] = self._tiers.submit("cache in", after_stores), claim

    def fetched(self, layer: int) -> Fetched:
        """Wait for a layer that was prefetched."""
        self._in_use.add(layer)
        return self._tiers.wait(self._fetches[layer][0], "cache")

    def is_fetching(self, layer: int) -> bool:
        return layer in self._fetches

    def drop(self, layer: int) -> None:
        """Give a fetched layer's memory back."""
        self._in_use.discard(layer)
        fetch = self._fetches.pop(layer, None)
        if fetch is not None:
            fetch[0].exception()  # waits; an error was raised where the layer was read
            self._tiers.ledgers[self._tiers.compute_tier].release(fetch[1])

    def drop_unused(self) -> None:
        """Give the memory of layers back that were fetched ahead."""
        for layer in self._fetches.keys() - self._in_use:
            self.drop(layer)

    def drop_all(self) -> None:
        """Give the memory of all fetched layers back."""
        for layer in list(self._fetches):
            self.drop(layer)

    def store(self, layer: int, num_bytes: int, write: Callable[[Launched], None]) -> None:
        """Write in the background; a later fetch of the layer waits for it, and gets its error.

        write: is given the work that makes the data.
        """
        reading = self._fetches.get(layer)

        def explained(after: Launched) -> None:
            if reading is not None:
                reading[0].exception()  # waits: what is written here is masked out of what it brings
            try:
                write(after)
            except (MemoryError, torch.OutOfMemoryError) as error:
                # A smaller batch does not help: the pass that could write this again may be long over.
                raise MemoryLimitError(f"memory ran out while the KV cache was stored; {MEMORY_ADVICE}") from error

        future = self._tiers.store_async("cache", num_bytes, explained)
        self._stores[layer] = [store for store in self._stores.get(layer, ()) if not _has_succeeded(store)] + [future]

    def finish_stores(self, layer: int | None = None) -> None:
        """Wait for the stores of a layer (None: of all); raise their first error."""
        layers = list(self._stores) if layer is None else [layer]
        _finish([store for each in layers for store in self._stores.pop(each, ())])

    def count(self, link: LinkName, num_bytes: int) -> None:
        self._tiers.stats.count_bytes(link, "cache", num_bytes)

    def cancel(self) -> None:
        """Drop all fetches: the next pass may mean another layer by the same number, and need not meet their errors.

        Stores finish first, so that the next pass writes behind them.
        """
        self.drop_all()
        for future in [future for waiting in self._stores.values() for future in waiting]:
            future.exception()  # waits

    def close(self) -> None:
        self.cancel()
        self._stores.clear()  # nobody reads any more what was written


def _finish(stores: Sequence[Future[None]]) -> None:
    """Wait for all stores; raise their first error."""
    errors = [error for store in stores if (error := store.exception()) is not None]
    if errors:
        raise errors[0]


def _has_succeeded(store: Future[None]) -> bool:
    return store.done() and store.exception() is None
