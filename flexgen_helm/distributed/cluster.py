"""What a cluster of workers is to the driver, whoever starts the processes. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from flexgen_helm.distributed.messages import Order, Report


@dataclass(frozen=True)
class WorkerEvent:
    """What a worker reports, or that it is lost.

    report: None if it is lost. lost: why.
    """

    worker: str
    report: Report | None = None
    lost: str = ""


class Workers(Protocol):
    """Processes that load one model. Their names say where they are; a restarted one has another name."""

    def poll(self, timeout_s: float) -> Sequence[WorkerEvent]:
        """Return what happened, after `timeout_s` seconds at the latest. New workers are started meanwhile."""

    def is_listening(self, worker: str) -> bool:
        """Whether the worker's last order has been answered by a report; until then it gets no other."""

    def send(self, worker: str, order: Order) -> None:
        """Give a worker an order; its report comes with `poll`."""

    def drop(self, worker: str) -> None:
        """End a worker that cannot be used, and start none in its place."""

    def count(self) -> int:
        """Return how many workers there are, those included that still load the model."""

    def may_serve(self) -> bool:
        """Whether there is a worker, or one will be started without anyone's doing."""

    def waiting_for(self) -> str:
        """Return what the cluster lacks for more workers; empty if nothing is known."""

    def close(self) -> None:
        """End all workers."""
