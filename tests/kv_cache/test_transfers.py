"""Fetches and stores of one layer keep the order in which they were submitted, whichever thread is
faster.
"""

import threading

import pytest
import torch

from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.kv_cache.codec import make_codec
from flexgen_helm.kv_cache.fetched_storage import HostStorage
from flexgen_helm.kv_cache.storage import MemoryStorage
from flexgen_helm.scheduling.sequence import CacheBlock, Sequence, SequenceKind
from tests.helpers.offload import tiers_of

LAYER = 3


class Scripted(HostStorage):
    """A storage whose fetches and stores are the test's."""

    def fetch(self, layer, step):
        self._prepare_fetch = lambda layer, counts, units, new_units: (10, step)
        self.prefetch(layer, ahead=True)

    def store(self, layer, step):
        self._store(layer, (torch.zeros(10),), step)

    def wait(self, layer):
        self._fetched(layer)


@pytest.fixture
def transfers(tmp_path):
    tiers = tiers_of(tmp_path)
    prompt = Sequence(
        SequenceKind.PROMPT, (), [1] * 3, 3, max_new_tokens=3, num_draws=1, needs_cache=True
    )
    codec = make_codec(None, 1, 1, torch.float32)
    memory = MemoryStorage("cpu", codec, 1, 5, lambda shape, dtype: torch.zeros(shape, dtype=dtype))
    made = Scripted(tiers, codec, CacheBlock(5, 1, [prompt]), memory)
    yield made
    made.close()
    tiers.close()


class Step:
    """A transfer that begins, waits until it is let go, and ends."""

    def __init__(self, log, name):
        self.log, self.name, self.begun, self.let_go = (
            log,
            name,
            threading.Event(),
            threading.Event(),
        )

    def __call__(self, after=None):
        self.log.append(f"{self.name} begins")
        self.begun.set()
        assert self.let_go.wait(20)
        self.log.append(f"{self.name} ends")


def test_a_store_waits_for_a_fetch_before_it(transfers):
    log = []
    fetch, store = Step(log, "fetch"), Step(log, "store")
    transfers.fetch(LAYER, fetch)
    transfers.store(LAYER, store)
    assert fetch.begun.wait(20) and not store.begun.wait(0.2)
    fetch.let_go.set(), store.let_go.set()
    transfers.finish_stores()
    assert log == ["fetch begins", "fetch ends", "store begins", "store ends"]


@pytest.mark.parametrize("waits_first", [False, True])
def test_a_fetch_waits_for_a_store_before_it(transfers, waits_first):
    """Also where the computing thread waits for that store already."""
    log = []
    fetch, store = Step(log, "fetch"), Step(log, "store")
    transfers.store(LAYER, store)
    transfers.fetch(LAYER, fetch)
    waiting = threading.Thread(
        target=transfers.finish_stores, args=(LAYER,) if waits_first else (LAYER + 1,)
    )
    waiting.start()
    assert store.begun.wait(20) and not fetch.begun.wait(0.2)
    fetch.let_go.set(), store.let_go.set()
    transfers.wait(LAYER)
    waiting.join()
    assert log == ["store begins", "store ends", "fetch begins", "fetch ends"]


def test_other_layers_wait_for_nothing(transfers):
    log = []
    fetch, store = Step(log, "fetch"), Step(log, "store")
    transfers.fetch(LAYER, fetch)
    transfers.store(LAYER + 1, store)
    assert fetch.begun.wait(20) and store.begun.wait(20)
    fetch.let_go.set(), store.let_go.set()


def test_the_error_of_a_store_meets_every_later_fetch(transfers):
    def no_memory(after):
        raise MemoryError

    transfers.store(LAYER, no_memory)
    for _ in range(2):  # what was not stored is missing for good
        transfers.fetch(LAYER, lambda: "nothing")
        with pytest.raises(MemoryLimitError, match="KV cache was stored"):
            transfers.wait(LAYER)
        transfers.drop(LAYER)
    with pytest.raises(MemoryLimitError):
        transfers.finish_stores()
