"""Pinned host memory is registered once and used again, and never exceeds the tier's limit."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.offload import transfer_manager
from flexgen_helm.offload.staging import Ledger
from flexgen_helm.offload.transfer_manager import HostPool, SimulatedCopyEngine
from flexgen_helm.planner.placement import PINNED_EXCESS_SHARE

PAGE = 4096


class Engine(SimulatedCopyEngine):
    """Knows what of its memory is alive, and how often it registered some."""

    def __init__(self) -> None:
        super().__init__(None, None)
        self.registered: list[int] = []

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        assert num_bytes % PAGE == 0, "whole pages"
        self.registered.append(num_bytes)
        return super().host_memory(num_bytes)


def pool(limit: int) -> tuple[HostPool, Ledger, Engine]:
    ledger, engine = Ledger("cpu", limit), Engine()
    return HostPool(ledger, engine), ledger, engine


def test_blocks_of_similar_sizes_share_what_is_registered():
    regions, ledger, engine = pool(1 << 24)
    for num_bytes in (1_000_000, 995_000, 990_000, 1_000_000):
        claim = ledger.claim("cache", num_bytes)
        region = regions.take(num_bytes, zeros=True)
        assert region.memory.numel() == num_bytes and not region.memory.any()
        assert ledger.in_use + ledger.excess + ledger.spare == sum(engine.registered)
        assert ledger.excess <= PINNED_EXCESS_SHARE * num_bytes
        region.memory.fill_(7)
        ledger.release(claim)
        regions.give_back(region)
    assert len(engine.registered) == 1
    claim = ledger.claim("cache", 500_000)
    regions.take(500_000)
    assert len(engine.registered) == 2, "half of a region would be wasted"
    regions.close()
    ledger.release(claim)


def test_spares_make_room_and_rounding_never_exceeds_the_limit():
    regions, ledger, engine = pool(1000 * PAGE)
    first = ledger.claim("cache", 600 * PAGE)
    region = regions.take(600 * PAGE)
    ledger.release(first)
    regions.give_back(region)
    assert ledger.spare >= 600 * PAGE and ledger.free == 1000 * PAGE
    ledger.claim("cache", 999 * PAGE + 17)
    assert regions.take(999 * PAGE + 17).pages is not None, "the last page has room"
    assert engine.registered[-1] == 1000 * PAGE and ledger.excess == PAGE - 17 and not ledger.spare
    with pytest.raises(MemoryLimitError):
        ledger.claim("activations", 1)


def test_what_the_driver_refuses_is_not_kept():
    regions, ledger, engine = pool(1 << 20)
    ledger.claim("cache", 100 * PAGE)
    engine.pins = False
    region = regions.take(100 * PAGE)
    regions.give_back(region)
    assert ledger.spare == 0


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 600 * PAGE)), max_size=40),
    limit=st.integers(PAGE, 1500 * PAGE),
)
def test_whatever_is_taken_the_books_balance(steps, limit):
    """Regions do not overlap, and claims, excesses and spares stay below the limit."""
    regions, ledger, _ = pool(limit)
    taken = []
    with ExitStack():
        for gives_back, num_bytes in steps:
            if gives_back and taken:
                claim, region, mark = taken.pop(num_bytes % len(taken))
                assert (region.memory == mark).all(), "nobody else wrote there"
                ledger.release(claim)
                regions.give_back(region)
                continue
            try:
                claim = ledger.claim("cache", num_bytes)
            except MemoryLimitError:
                continue
            region, mark = regions.take(num_bytes, zeros=True), len(taken) % 250 + 1
            assert not region.memory.any()
            region.memory.fill_(mark)
            taken.append((claim, region, mark))
            assert ledger.in_use + ledger.excess + ledger.spare <= limit
        for claim, region, _ in taken:
            ledger.release(claim)
            regions.give_back(region)
    regions.close()
    assert ledger.spare == 0
    ledger.check({})
    assert ledger.peak <= limit


@pytest.mark.parametrize("device", ["sim"])
def test_runs_use_regions_of_earlier_runs(tiny, tmp_path, device, monkeypatch):
    from flexgen_helm import Engine as Whole
    from flexgen_helm import GenerationRequest, MemoryLimits

    registered = []
    honest = SimulatedCopyEngine.host_memory
    monkeypatch.setattr(SimulatedCopyEngine, "host_memory", lambda self, n: registered.append(n) or honest(self, n))
    asked = [GenerationRequest(prompt_token_ids=[*range(2, 20 + i)], max_tokens=5) for i in range(6)]
    with Whole.from_pretrained(
        tiny("llama").path, device=device, policy="3x2,0,100,0,100,0,100", schedule="zigzag", cpu_attention=False,
        limits=MemoryLimits(64 << 20, 64 << 20, 64 << 20), offload_dir=tmp_path,
    ) as engine:  # fmt: skip
        monkeypatch.setattr(transfer_manager, "SMALLEST_REGION", 1)
        counts = []
        for _ in range(3):
            engine.run(asked)
            counts.append(len(registered))
            engine._tiers.ledgers["cpu"].check({"weights": engine._tiers.ledgers["cpu"].in_use})
        assert counts[2] == counts[1], "a third run registers nothing"
        assert engine.last_run["peak_bytes"]["cpu"] <= engine.last_run["limit_bytes"]["cpu"]
        assert engine.last_run["hardware"]["host_memory"] == "pinned"
