"""The three tiers of one engine: their ledgers, the link between two of them, and the folder of the third."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from flexgen_helm.policy.placement import Tier
from flexgen_helm.store.disk import OffloadDirectory
from flexgen_helm.store.ledger import Ledger
from flexgen_helm.store.link import Link
from flexgen_helm.store.traffic import Kind, Traffic

Result = TypeVar("Result")

# Bytes that may wait in memory to be stored elsewhere (or one piece, if it alone is larger): enough for the disk to be
# busy while the next batch computes. Slower disks hold computing up instead of filling the memory.
LEAVING_BYTES = 64 << 20


@dataclass(eq=False)
class Tiers:
    """home: the tier beside the computing device, 'gpu' or, without one, 'cpu'. link: between host and device, None
    where the host computes. folder: of the disk tier, opened when it is first needed."""

    device: torch.device
    home: Tier
    ledgers: Mapping[Tier, Ledger]
    link: Link | None
    folder: Path
    overlap: bool = True
    traffic: Traffic = field(default_factory=Traffic)
    peak_leaving: int = 0  # bytes that waited to be stored
    peak_brought: int = 0  # bytes of the largest piece that was brought
    _leaving: int = 0
    _stored: threading.Condition = field(default_factory=threading.Condition)
    _directory: OffloadDirectory | None = None
    _threads: dict[str, ThreadPoolExecutor] = field(default_factory=dict)

    def is_far(self, tier: Tier) -> bool:
        """Whether computing on what rests there needs a copy first."""
        return tier != self.home

    def background(self, lane: str, work: Callable[[], Result]) -> Future[Result]:
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

    def leave(self, kind: Kind, num_bytes: int, store: Callable[[], Result]) -> Future[Result]:
        """As `background`, for data that holds memory until it is stored; waits while too much does."""
        if self._leaving and self._leaving + num_bytes > LEAVING_BYTES:
            with self.traffic.timed(f"wait_{kind}"), self._stored:
                self._stored.wait_for(lambda: not self._leaving or self._leaving + num_bytes <= LEAVING_BYTES)
        with self._stored:
            self._leaving += num_bytes
            self.peak_leaving = max(self.peak_leaving, self._leaving)

        def counted() -> Result:
            try:
                with self.traffic.timed(f"store_{kind}"):
                    return store()
            finally:
                with self._stored:
                    self._leaving -= num_bytes
                    self._stored.notify_all()

        return self.background(f"{kind} out", counted)

    def brought(self, num_bytes: int) -> None:
        """Note the size of a piece that is being brought."""
        self.peak_brought = max(self.peak_brought, num_bytes)

    @property
    def peak_transfer_bytes(self) -> int:
        """Memory of transfers beside what the ledgers count: what waits, and buffers of one piece in each direction."""
        return self.peak_leaving + 2 * self.peak_brought + min(self.peak_leaving, LEAVING_BYTES)

    def reset(self) -> None:
        """Begin to measure anew."""
        self.traffic.reset()
        self.peak_leaving = self.peak_brought = 0

    def wait(self, future: Future[Result], what: str) -> Result:
        """The future's result; the time until then counts as waiting for `what`."""
        if future.done():
            return future.result()
        with self.traffic.timed(f"wait_{what}"):
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
