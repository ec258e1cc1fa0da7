"""The three tiers of one engine: their ledgers, the link between two of them, and the folder of the third."""

from __future__ import annotations

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
from flexgen_helm.store.traffic import Traffic

Result = TypeVar("Result")


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
