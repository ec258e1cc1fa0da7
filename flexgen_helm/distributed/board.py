"""What driver and workers know of each other, in one actor of Ray beside the driver. No torch."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from flexgen_helm.distributed.worker import Failure, Report
from flexgen_helm.request import GenerationRequest

# Requests by their index in the run.
RequestUnit = Mapping[int, GenerationRequest]


class News(NamedTuple):
    """What a worker tells.

    worker: its name; empty if nobody has begun the unit.
    unit: number of its unit; None while it loads the model.
    """

    worker: str
    unit: int | None
    report: Report


class Board:
    """Units that are wanted, who has begun them, and what workers tell."""

    def __init__(self, silence_s: float) -> None:
        """silence_s: after which a unit is lost. Ray sees what dies, but not what hangs."""
        self._silence_s, self._heard = silence_s, time.monotonic()
        self._units: dict[int, RequestUnit] = {}
        self._queue = asyncio.Queue[int | None]()  # None: no more will come
        self._begun: dict[int, tuple[str, float]] = {}  # by whom, and when it was heard of last
        self._news: list[News] = []
        self._arrived = asyncio.Event()
        self._starts = Counter[str]()
        self._fingerprint = ""

    # For the driver

    async def submit(self, units: Mapping[int, RequestUnit]) -> None:
        """Have units computed, by numbers that were never used."""
        self._units |= units
        self._heard = time.monotonic()
        for unit in units:
            self._queue.put_nowait(unit)

    async def forget(self, units: Iterable[int]) -> None:
        """Stop what is computed of units, and begin none of them."""
        for unit in units:
            self._units.pop(unit, None)

    async def close(self) -> None:
        """Want nothing more."""
        self._units.clear()
        self._queue.put_nowait(None)

    async def news(self, timeout_s: float) -> list[News]:
        """Return what was told since, after `timeout_s` at the latest; units that are lost too."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._arrived.wait(), timeout_s)
        news, self._news = self._news, []
        self._arrived.clear()
        for unit in self._units:
            worker, heard = self._begun.get(unit, ("", self._heard))
            if time.monotonic() - heard > self._silence_s:
                why = f"it has not answered for {self._silence_s:.0f} s"
                news.append(News(worker, unit, [Failure(why, is_lost=True)]))
        return news

    # For Ray Data

    async def next_unit(self) -> int | None:
        """Wait for a unit that nobody has asked for; None at the end."""
        return await self._queue.get()

    # For workers

    async def start(self, actor: str) -> int:
        """Return how often an actor has begun to load the model without being ready."""
        self._starts[actor] += 1
        return self._starts[actor]

    async def is_ready(self, actor: str, fingerprint: str) -> str:
        """Return the fingerprint of the first worker that was ready."""
        del self._starts[actor]
        self._fingerprint = self._fingerprint or fingerprint
        return self._fingerprint

    async def begin(self, unit: int, worker: str) -> RequestUnit:
        """Return the requests of a unit; none of one that is not wanted.

        Ray begins a unit again where its worker has died: the driver divides what is left of it.
        """
        if unit in self._begun:
            lost = Failure("its process ended, perhaps because memory ran out", is_lost=True)
            await self.tell(self._begun[unit][0], unit, [lost])
            return {}
        self._begun[unit] = worker, time.monotonic()
        return self._units.get(unit, {})

    async def tell(self, worker: str, unit: int | None, report: Report) -> bool:
        """Take a report, which may be empty; return whether its unit is still wanted."""
        self._heard = time.monotonic()
        if unit is not None:
            self._begun[unit] = worker, self._heard
        if report:
            self._news.append(News(worker, unit, report))
            self._arrived.set()
        return unit is None or unit in self._units
