"""Which worker computes what: a value that changes with what workers report, and knows neither clocks nor machines.

Requests are sorted by their prompts, so that neighbours share prefixes. A unit is a run of neighbours, so it computes
each of its prefixes once. Where two units meet, what their prompts share is computed once more, and so a cut is made
where that is little:

    a b c d  |  a b c e  |  a b c f  ||  x y z  |  x y u
           3           3           0          2          tokens that a cut there computes once more

A worker without work gets a unit: requests that failed elsewhere, or the next neighbours, or a copy of what a slow
worker has not answered. The first answer counts. Whatever a lost worker or a failed unit has not answered is waiting
again, in smaller units and for other workers, so that one request that brings workers down takes few others with it.

No request waits for one worker alone: one that goes on reporting and never answers loses its requests to copies, and
what it could retry is retried by others after `UNIT_S`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from flexgen_helm.request import GenerationRequest
from flexgen_helm.scheduling.prefix_tree import common_length

# Seconds that a unit is to take: its end is a good moment to hand out the next one, and each costs a plan and the
# beginnings that its prompts share with those of other units.
UNIT_S, MIN_UNIT_S = 300.0, 5.0
# Most requests of a unit whose worker has shown no rate.
FIRST_UNIT_REQUESTS = 256
# How far from the wanted cost a unit may be cut, as a share of it.
TOLERANCE = 0.25
# Seconds after which idle workers copy requests of a running unit; its n-th copy waits for the n-th power.
COPY_AFTER_S = 5.0
# How often a request may be part of a unit that fails, and how much smaller its next unit is each time.
MAX_ATTEMPTS, SHRINKING = 3, 4


@dataclass(eq=False)
class Unit:
    """Requests that a worker computes together, by index.

    began: seconds, by the caller's clock.
    num_reported: answers that its worker has given, the first or not; counted by the caller.
    """

    requests: Sequence[int]
    began: float
    num_reported: int = 0


class Dispatcher:
    """See the module's docstring. Not for several threads.

    costs: of each request, in tokens: those of its prompt that its predecessor does not have, and half of those that
        it may generate.
    open: requests that are neither answered nor given up.
    failures: request -> why it is given up.
    units: worker -> what it computes now; the oldest first.
    waiting_cost: of what nobody computes now.
    """

    def __init__(self, requests: Sequence[GenerationRequest]) -> None:
        prompts = [prompt_of(request) for request in requests]
        self._fresh = sorted(range(len(requests)), key=prompts.__getitem__)
        self._shared = [0] * len(requests)  # with the predecessor
        for before, index in pairwise(self._fresh):
            self._shared[index] = common_length(prompts[before], prompts[index])
        self.costs = [
            max(1, len(prompt) - shared) + request.n * request.max_tokens / 2
            for prompt, shared, request in zip(prompts, self._shared, requests)
        ]
        self.waiting_cost = sum(self.costs)
        self.open = set(self._fresh)
        self.failures: dict[int, str] = {}
        self.units: dict[str, Unit] = {}
        self._failed: list[Unit] = []  # began: when they failed
        self._failed_on: defaultdict[int, list[str]] = defaultdict(list)  # request -> workers
        self._rates: dict[str, float | None] = {}  # worker -> cost a second, None before its first unit
        self._blocks: dict[str, int] = {}

    def join(self, worker: str) -> None:
        """Add a worker; no name may join twice."""
        self._rates[worker] = None

    def leave(self, worker: str, now: float, why: str) -> None:
        """Remove a worker that is lost."""
        self._rates.pop(worker, None)
        self.fail(worker, now, why)

    def next_unit(self, worker: str, now: float, num_workers: int = 1) -> Unit | None:
        """Return what an idle worker shall compute now, None if there is nothing for it.

        num_workers: how many there will be soon; the first one leaves work for the others.
        """
        requests = self._retry(worker, now) or self._cut(worker, num_workers)
        self.waiting_cost -= sum(self.costs[index] for index in requests)
        requests = requests or self._copy(worker, now)
        if not requests:
            return None
        unit = self.units[worker] = Unit(requests, now)
        return unit

    def is_needless(self, worker: str) -> bool:
        """Return whether all that a worker computes has been answered by others, or it computes nothing."""
        if (unit := self.units.get(worker)) is None:
            return True
        # One that has reported all is about to end with its record.
        return unit.num_reported < len(unit.requests) and self.open.isdisjoint(unit.requests)

    def finish(self, worker: str, now: float, block: int = 1) -> None:
        """Note that a worker has computed its unit.

        block: requests that fewer of would not be faster, by the worker's plan.
        """
        unit = self.units[worker]
        rate = sum(self.costs[index] for index in unit.requests) / max(now - unit.began, 1e-3)
        self._rates[worker] = (rate + (self._rates[worker] or rate)) / 2
        self._blocks[worker] = block
        self.fail(worker, now, "answers are missing")

    def fail(self, worker: str, now: float, why: str) -> None:
        """End a worker's unit; what is open of it is computed again, or given up if it failed too often."""
        if (unit := self.units.pop(worker, None)) is None:
            return
        left = [index for index in unit.requests if index in self.open]
        running = {index for unit in self.units.values() for index in unit.requests}
        returned = []
        for index in left:
            self._failed_on[index].append(worker)
            if index in running:
                continue
            if len(self._failed_on[index]) < MAX_ATTEMPTS:
                returned.append(index)
            else:
                self.failures[index] = why
                self.open.remove(index)
        self.waiting_cost += sum(self.costs[index] for index in returned)
        size = max(1, len(left) // SHRINKING)
        self._failed += [Unit(returned[at : at + size], now) for at in range(0, len(returned), size)]

    def _retry(self, worker: str, now: float) -> Sequence[int]:
        """Take requests that failed, preferably not here; a worker that has not tried them may never be idle."""
        for unit in self._failed:
            failed_on = {name for index in unit.requests for name in self._failed_on[index]}
            if worker not in failed_on or failed_on >= self._rates.keys() or now - unit.began >= UNIT_S:
                self._failed.remove(unit)
                return unit.requests
        return []

    def _cut(self, worker: str, num_workers: int) -> Sequence[int]:
        """Take neighbours: half of the worker's share of what is left, and all where it works alone."""
        known = [rate for rate in self._rates.values() if rate]
        mean = sum(known) / len(known) if known else 1.0
        num_workers = max(num_workers, len(self._rates))
        total_rate = sum(known) + mean * (num_workers - len(known))
        rate, block, most = self._rates[worker], self._blocks.get(worker, 1), len(self._fresh)
        cost = self.waiting_cost * (rate or mean) / total_rate / (1 if num_workers == 1 else 2)
        if rate is None:
            most = min(most, FIRST_UNIT_REQUESTS)
        else:
            cost = max(min(cost, rate * UNIT_S), rate * MIN_UNIT_S)
        cuts, so_far = [], 0.0
        for count, index in enumerate(self._fresh[:most], start=1):
            so_far += self.costs[index]
            if count == most or (count >= block and so_far >= cost * (1 - TOLERANCE)):
                shared = self._shared[self._fresh[count]] if count < len(self._fresh) else 0
                cuts.append((shared, abs(so_far - cost), count))
                if so_far >= cost * (1 + TOLERANCE):
                    break
        count = min(cuts)[2] if cuts else 0
        taken, self._fresh = self._fresh[:count], self._fresh[count:]
        return taken

    def _copy(self, worker: str, now: float) -> Sequence[int]:
        """Return half of what is open of the oldest unit, whose worker is slow or hangs; of one request, all."""
        units_with: defaultdict[int, list[Unit]] = defaultdict(list)
        for unit in self.units.values():
            for index in unit.requests:
                units_with[index].append(unit)
        for unit in self.units.values():
            left = [
                index
                for index in unit.requests
                if index in self.open
                and worker not in (failed_on := self._failed_on[index])
                and len(failed_on) < MAX_ATTEMPTS
                and now - (copies := units_with[index])[-1].began >= COPY_AFTER_S ** len(copies)
            ]
            if left:
                return left[len(left) // 2 :]
        return []


def prompt_of(request: GenerationRequest) -> tuple[int, ...]:
    """Return what the order compares: token ids, or the characters of a text that is not encoded yet."""
    if request.prompt_token_ids is not None:
        return tuple(request.prompt_token_ids)
    return tuple(map(ord, request.prompt if request.prompt is not None else str(request.messages)))
