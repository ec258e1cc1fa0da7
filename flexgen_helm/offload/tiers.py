"""The three tiers of one engine: their ledgers, the link between two of them, and the folder of the third."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from flexgen_helm.offload.copy_engine import CopyEngine
from flexgen_helm.offload.disk import OffloadDirectory
from flexgen_helm.offload.ledger import Ledger
from flexgen_helm.offload.transfer_stats import Kind, TransferStats
from flexgen_helm.planner.constants import MAX_PENDING_STORE_BYTES
from flexgen_helm.planner.placement import Tier

Result = TypeVar("Result")


@dataclass(eq=False)
class Tiers:
    """home: the tier beside the computing device, 'gpu' or, without one, 'cpu'. link: between host and device, None
    where the host computes. folder: of the disk tier, opened when it is first needed."""

    device: torch.device
    compute_tier: Tier
    ledgers: Mapping[Tier, Ledger]
    copy_engine: CopyEngine | None
    folder: Path
    overlap: bool = True
    stats: TransferStats = field(default_factory=TransferStats)
    peak_pending_stores: int = 0  # bytes that waited to be stored
    peak_fetch: int = 0  # bytes of the largest piece that was brought
    _pending_bytes: int = 0
    _stored: threading.Condition = field(default_factory=threading.Condition)
    _directory: OffloadDirectory | None = None
    _threads: dict[str, ThreadPoolExecutor] = field(default_factory=dict)

    def submit(self, lane: str, work: Callable[[], Result]) -> Future[Result]:
        """Run in the lane's thread, one after the other; at once in the caller's where nothing may overlap.

        An error surfaces at the future's result.
        """
        if not self.overlap:
            done: Future[Result] = Future()
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)
            return done
        if lane not in self._threads:
            self._threads[lane] = ThreadPoolExecutor(1, thread_name_prefix=lane)
        return self._threads[lane].submit(work)

    def store_async(self, kind: Kind, num_bytes: int, store: Callable[[], Result]) -> Future[Result]:
        """As `background`, for data that holds memory until it is stored; waits while too much does."""
        if self._pending_bytes and self._pending_bytes + num_bytes > MAX_PENDING_STORE_BYTES:
            with self.stats.timed(f"wait_{kind}"), self._stored:
                self._stored.wait_for(
                    lambda: not self._pending_bytes or self._pending_bytes + num_bytes <= MAX_PENDING_STORE_BYTES
                )
        with self._stored:
            self._pending_bytes += num_bytes
            self.peak_pending_stores = max(self.peak_pending_stores, self._pending_bytes)

        def counted() -> Result:
            try:
                with self.stats.timed(f"store_{kind}"):
                    return store()
            finally:
                with self._stored:
                    self._pending_bytes -= num_bytes
                    self._stored.notify_all()

        return self.submit(f"{kind} out", counted)

    def note_fetch(self, num_bytes: int) -> None:
        """Note the size of a piece that is being brought."""
        self.peak_fetch = max(self.peak_fetch, num_bytes)

    @property
    def peak_transfer_bytes(self) -> int:
        """Memory of transfers beside what the ledgers count: what waits, and buffers of one piece in each direction."""
        return self.peak_pending_stores + 2 * self.peak_fetch + min(self.peak_pending_stores, MAX_PENDING_STORE_BYTES)

    def reset(self) -> None:
        """Begin to measure anew."""
        self.stats.reset()
        self.peak_pending_stores = self.peak_fetch = 0

    def wait(self, future: Future[Result], what: str) -> Result:
        """The future's result; the time until then counts as waiting for `what`."""
        if future.done():
            return future.result()
        with self.stats.timed(f"wait_{what}"):
            return future.result()

    def directory(self) -> OffloadDirectory:
        if self._directory is None:
            self._directory = OffloadDirectory(self.folder)
        return self._directory

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown(cancel_futures=True)
        self._threads.clear()
        if self._directory is not None:
            self._directory.close()
            self._directory = None
