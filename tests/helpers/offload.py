"""Requests of every kind, and engines that keep what they need elsewhere."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from flexgen_helm import Engine, GenerationRequest, MemoryLimits, Policy
from flexgen_helm.offload.copy_engine import SimulatedCopyEngine
from flexgen_helm.offload.experts import ExpertStreamer
from flexgen_helm.offload.ledger import Ledger
from flexgen_helm.offload.transfer_manager import TransferManager
from flexgen_helm.offload.weights import TieredWeights
from flexgen_helm.planner.schedules import SCHEDULES
from flexgen_helm.tiers import TIERS
from tests.helpers.parity import prompts

MIB = 1 << 20
# Names of the schedules by which answers of several tokens are drawn.
DECODING_SCHEDULES = [name for name, schedule in SCHEDULES.items() if not schedule.is_single_pass]


def workload(seed: int = 0, count: int = 9, longest: int = 40) -> list[GenerationRequest]:
    draw = random.Random(seed)
    return [
        GenerationRequest(
            prompt_token_ids=prompt, max_tokens=draw.choice([0, 1, 2, 7, 12]), echo_logprobs=draw.random() < 0.5,
            n=draw.choice([1, 1, 3]), temperature=draw.choice([0.0, 0.9]), seed=i, ignore_eos=draw.random() < 0.7,
        )
        for i, prompt in enumerate(prompts(count, longest, seed))
    ]  # fmt: skip


def offloaded(tiny, variant, folder: Path, policy: Policy | str, **settings):
    settings = {"limits": MemoryLimits(gpu=64 * MIB, cpu=64 * MIB, disk=256 * MIB), **settings}
    return Engine.from_pretrained(tiny(variant).path, policy=policy, offload_dir=folder, **settings)


def claims(engine: Engine) -> dict[str, dict[str, int]]:
    """Check that the ledgers of all tiers balance; return the claimed bytes of each by kind."""
    for ledger in engine._tiers.ledgers.values():
        ledger.check()
    return {tier: ledger.by_kind() for tier, ledger in engine._tiers.ledgers.items()}


def tiers_of(
    folder: Path, overlap: bool = True, has_gpu: bool = False, limits: dict[str, int] | None = None
) -> TransferManager:
    """Tiers of a host that computes, or of a gpu in host memory."""
    ledgers = {tier: Ledger(tier, limits[tier] if limits else 1 << 30) for tier in TIERS}
    engine = SimulatedCopyEngine(None, None) if has_gpu else None
    return TransferManager(
        torch.device("cpu"), "gpu" if has_gpu else "cpu", ledgers, engine, folder, overlap
    )


def within(work: Callable[[], Any], seconds: float = 20.0) -> Any:
    """The work's result; a test that would hang fails."""
    done = Future[Any]()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    # a daemon, so that what hangs does not keep the process
    threading.Thread(target=run, daemon=True).start()
    return done.result(seconds)


def with_expert_slots(patch: pytest.MonkeyPatch, slots: int) -> None:
    """Give every engine so many slots for offloaded experts, whatever its memory."""
    honest = TieredWeights._start_streamer

    def start(self: TieredWeights, _: int) -> ExpertStreamer:
        return honest(self, slots * max(expert.num_bytes for expert in self._experts.values()))

    patch.setattr(TieredWeights, "_start_streamer", start)


thirds = st.sampled_from([0.0, 0.0, 0.3, 0.5, 1.0])


@st.composite
def policies(draw):
    def pair():
        gpu = draw(thirds)
        return gpu, min(draw(thirds), 1.0 - gpu)

    (wg, wc), (cg, cc), (hg, hc) = pair(), pair(), pair()
    return Policy(draw(st.integers(1, 6)), draw(st.integers(1, 4)), wg, wc, cg, cc, hg, hc)
