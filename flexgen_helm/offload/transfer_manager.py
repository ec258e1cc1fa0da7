"""Transfers between the memory tiers of one engine.

Transfers run in background threads: one thread for each direction of each kind, so that transfers
of a kind and direction keep their order. An error of a transfer surfaces where its future is waited
for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from flexgen_helm.kernels.team import use_one_thread
from flexgen_helm.offload.copy_engine import CopyEngine, Launched
from flexgen_helm.offload.ledger import Ledger
from flexgen_helm.offload.offload_directory import OffloadDirectory
from flexgen_helm.offload.rate_limit import DiskRates
from flexgen_helm.offload.transfer_stats import TransferStats
from flexgen_helm.shared_sizes import MAX_PENDING_STORE_BYTES
from flexgen_helm.tiers import Kind, Tier

Result = TypeVar("Result")


@dataclass(eq=False)
class TransferManager:
    """Moves bytes between tiers for the computing thread. Any thread may call `to_device` and
    `to_host`.

    device: computes.
    compute_tier: the tier of the device's memory: 'gpu', or 'cpu' on a machine without one.
    copy_engine: copies between host and device; None if the host computes.
    folder: of the disk tier.
    overlap: transfers run in the background; False runs each one in its caller.
    disk_rates: of a simulated disk; None for the machine's own.
    peak_pending_store_bytes: the most bytes that waited to be stored.
    peak_fetch_bytes: of the largest fetch.
    """

    device: torch.device
    compute_tier: Tier
    ledgers: Mapping[Tier, Ledger]
    copy_engine: CopyEngine | None
    folder: Path
    overlap: bool = True
    disk_rates: DiskRates | None = None
    stats: TransferStats = field(default_factory=TransferStats)
    peak_pending_store_bytes: int = 0
    peak_fetch_bytes: int = 0
    _pending_store_bytes: int = 0
    _store_done: threading.Condition = field(default_factory=threading.Condition)
    _directory: OffloadDirectory | None = None
    _threads: dict[str, ThreadPoolExecutor] = field(default_factory=dict)

    def to_device(self, source: Tensor, kind: Kind, target: Tensor | None = None) -> Tensor:
        """Copy host memory to the device, into the first elements of `target` if given; block until
        it has arrived. target: flat.

        Returns `source` itself if the host computes.
        """
        if self.copy_engine is None:
            return source
        self.stats.count_bytes("cpu_to_gpu", kind, source.nbytes)
        return self.copy_engine.to_device(
            source, None if target is None else target[: source.numel()]
        )

    def rows_to_device(self, source: Tensor, rows: Tensor, kind: Kind) -> Tensor:
        """Gather rows [T] of host memory [N, width] -> [T, width] on the device; block until they
        have arrived.
        """
        if self.copy_engine is None:
            return source.index_select(0, rows)
        self.stats.count_bytes("cpu_to_gpu", kind, len(rows) * source[:1].nbytes)
        return self.copy_engine.rows_to_device(source, rows)

    def to_host(
        self, source: Tensor, kind: Kind, target: Tensor | None = None, after: Launched = None
    ) -> Tensor:
        """Copy device memory to `target`, by default new host memory; block until it has arrived.

        after: work that makes `source`; None: all that was launched until now.
        Returns `source` itself if the host computes.
        """
        if self.copy_engine is None:
            return source
        self.stats.count_bytes("gpu_to_cpu", kind, source.nbytes)
        return self.copy_engine.to_host(source, target, after)

    def launched(self) -> Launched:
        """Return an event behind all work that was launched on the device; None if the host
        computes.
        """
        return None if self.copy_engine is None else self.copy_engine.launched()

    def submit(self, name: str, transfer: Callable[[], Result], threads: int = 1) -> Future[Result]:
        """Begin a transfer in the background thread of that name, behind those submitted before;
        with several threads of it, in no order.

        Without overlap it runs before this returns. The future has its result or its error.
        """
        if not self.overlap:
            done: Future[Result] = Future()
            try:
                done.set_result(transfer())
            except BaseException as error:
                done.set_exception(error)
            return done
        if name not in self._threads:
            self._threads[name] = ThreadPoolExecutor(threads, name, use_one_thread)
        return self._threads[name].submit(transfer)

    def store_async(
        self, kind: Kind, num_bytes: int, store: Callable[[Launched], Result]
    ) -> Future[Result]:
        """Submit the store of data that takes `num_bytes` of memory until it is stored.

        store: is given the work that was launched until now, which makes the data.
        Blocks while `MAX_PENDING_STORE_BYTES` would be exceeded; a larger store waits until it is
        the only one.
        """

        after = self.launched()

        def has_room() -> bool:
            pending = self._pending_store_bytes
            return not pending or pending + num_bytes <= MAX_PENDING_STORE_BYTES

        def counted() -> Result:
            try:
                with self.stats.timed(f"store_{kind}"):
                    return store(after)
            finally:
                with self._store_done:
                    self._pending_store_bytes -= num_bytes
                    self._store_done.notify_all()

        with self._store_done:
            if not has_room():
                with self.stats.timed(f"wait_{kind}"):
                    self._store_done.wait_for(has_room)
            self._pending_store_bytes += num_bytes
            self.peak_pending_store_bytes = max(
                self.peak_pending_store_bytes, self._pending_store_bytes
            )
        return self.submit(f"{kind} out", counted)

    def wait(self, future: Future[Result], kind: Kind) -> Result:
        """Return the future's result or raise its error; count the time until then as waiting."""
        if future.done():
            return future.result()
        with self.stats.timed(f"wait_{kind}"):
            return future.result()

    def note_fetch(self, num_bytes: int) -> None:
        """Record the size of a fetch, for `peak_transfer_bytes`."""
        self.peak_fetch_bytes = max(self.peak_fetch_bytes, num_bytes)

    @property
    def peak_transfer_bytes(self) -> int:
        """Memory of transfers that no ledger counts: stores that wait and their buffer, and fetches
        and theirs.
        """
        pending = self.peak_pending_store_bytes
        return pending + 2 * self.peak_fetch_bytes + min(pending, MAX_PENDING_STORE_BYTES)

    def reset(self) -> None:
        """Reset statistics and peaks, at the start of a run."""
        self.stats.reset()
        self.peak_pending_store_bytes = self.peak_fetch_bytes = 0

    def directory(self) -> OffloadDirectory:
        """Return the offload directory; the first call opens it. Raises `OffloadError` if it cannot
        be used.
        """
        if self._directory is None:
            self._directory = OffloadDirectory(self.folder, self.disk_rates)
        return self._directory

    def close(self) -> None:
        """Wait for running transfers, cancel waiting ones, and delete the files of this run; those
        of weights stay.
        """
        for thread in self._threads.values():
            thread.shutdown(cancel_futures=True)
        self._threads.clear()
        if self.copy_engine is not None:
            self.copy_engine.close()
        if self._directory is not None:
            self._directory.close()
            self._directory = None
