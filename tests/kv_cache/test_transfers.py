"""Fetches and stores of one layer keep the order in which they were submitted, whichever thread is faster."""

from __future__ import annotations

import threading

import pytest
import torch

from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.kv_cache.transfers import BlockTransfers
from flexgen_helm.offload.staging import Ledger
from flexgen_helm.offload.transfer_manager import TransferManager
from flexgen_helm.planner.placement import TIERS

LAYER = 3


@pytest.fixture
def transfers(tmp_path):
    tiers = TransferManager(torch.device("cpu"), "cpu", {tier: Ledger(tier, 1000) for tier in TIERS}, None, tmp_path)
    made: BlockTransfers[str] = BlockTransfers(tiers)
    yield made
    made.close()
    tiers.close()


class Step:
    """A transfer that begins, waits until it is let go, and ends."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name, self.begun, self.let_go = log, name, threading.Event(), threading.Event()

    def __call__(self, after: object = None) -> None:
        self.log.append(f"{self.name} begins")
        self.begun.set()
        assert self.let_go.wait(20)
        self.log.append(f"{self.name} ends")


def test_a_store_waits_for_a_fetch_before_it(transfers):
    log: list[str] = []
    fetch, store = Step(log, "fetch"), Step(log, "store")
    transfers.prefetch(LAYER, 10, fetch, ahead=True)
    transfers.store(LAYER, 10, store)
    assert fetch.begun.wait(20) and not store.begun.wait(0.2)
    fetch.let_go.set(), store.let_go.set()
    transfers.finish_stores()
    assert log == ["fetch begins", "fetch ends", "store begins", "store ends"]


@pytest.mark.parametrize("waits_first", [False, True])
def test_a_fetch_waits_for_a_store_before_it(transfers, waits_first):
    """Also where the computing thread waits for that store already."""
    log: list[str] = []
    fetch, store = Step(log, "fetch"), Step(log, "store")
    transfers.store(LAYER, 10, store)
    transfers.prefetch(LAYER, 10, fetch, ahead=True)
    waiting = threading.Thread(target=transfers.finish_stores, args=(LAYER,) if waits_first else (LAYER + 1,))
    waiting.start()
    assert store.begun.wait(20) and not fetch.begun.wait(0.2)
    fetch.let_go.set(), store.let_go.set()
    transfers.fetched(LAYER)
    waiting.join()
    assert log == ["store begins", "store ends", "fetch begins", "fetch ends"]


def test_other_layers_wait_for_nothing(transfers):
    log: list[str] = []
    fetch, store = Step(log, "fetch"), Step(log, "store")
    transfers.prefetch(LAYER, 10, fetch, ahead=True)
    transfers.store(LAYER + 1, 10, store)
    assert fetch.begun.wait(20) and store.begun.wait(20)
    fetch.let_go.set(), store.let_go.set()


def test_the_error_of_a_store_meets_every_later_fetch(transfers):
    def no_memory(after: object) -> None:
        raise MemoryError

    transfers.store(LAYER, 10, no_memory)
    for _ in range(2):  # what was not stored is missing for good
        transfers.prefetch(LAYER, 10, lambda: "nothing", ahead=True)
        with pytest.raises(MemoryLimitError, match="KV cache was stored"):
            transfers.fetched(LAYER)
        transfers.drop(LAYER)
    with pytest.raises(MemoryLimitError):
        transfers.finish_stores()
