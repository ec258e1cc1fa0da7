"""Copies overlap with products: in simulated time a pass takes little more than its busiest resource is busy."""

from __future__ import annotations

import pytest
import torch

from flexgen_helm import MemoryLimits, Policy
from flexgen_helm.engine.executor import Executor
from flexgen_helm.kv_cache.cache import KVCache
from flexgen_helm.offload.prefetcher import WeightPrefetcher
from tests.cuda.clock import Clock
from tests.cuda.device import cuda_in_host_memory
from tests.cuda.engine_runs import MIB, requests, run
from tests.helpers.shares import share_of
from tests.helpers.tiny_models import llama_config

# A unit is 1/15 of a layer; a piece, which small copies wait for, is 1/150 of it as in OPT-30B.
UNIT_BYTES = 1 << 17
WEIGHTS, CACHES = Policy(2, 4, 0, 1, 1, 0, 1, 0), Policy(2, 4, 1, 0, 0, 1, 1, 0)
BOTH = Policy(2, 4, 0, 1, 0, 1, 1, 0)
RATIOS = (0.25, 1.0, 4.0)
BOUND = 1.05
LIMITS = MemoryLimits(gpu=256 * MIB, cpu=128 * MIB, disk=256 * MIB)  # all of the weights may stay on the device
LAYERS = 24  # half of those of OPT-30B: between two passes the device waits for the sampled tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import LlamaForCausalLM

    made = tmp_path_factory.mktemp("eight-layers")
    config = llama_config(
        num_hidden_layers=LAYERS, hidden_size=256, intermediate_size=1024, num_attention_heads=4, num_key_value_heads=2
    )
    LlamaForCausalLM(config).half().save_pretrained(made)
    return made


def passes(folder, policy, clock, host_s):
    """Decode on a clock; return the seconds of the passes between the second and the last, and who was busy then."""
    marks, honest = [], Executor.run

    def run_pass(self, *arguments, **named):
        marks.append((clock.now, clock.busy.copy()))
        honest(self, *arguments, **named)

    with cuda_in_host_memory(clock=clock) as device, pytest.MonkeyPatch.context() as patch:
        copy = KVCache.copy_to_host

        def attended(self, kind, *tensors):
            on_host = copy(self, kind, *tensors)
            if kind == "activations":  # queries: the host can begin
                clock.host(host_s)
            return on_host

        patch.setattr(KVCache, "copy_to_host", attended)
        patch.setattr(Executor, "run", run_pass)
        for name in ("_MAX_UNIT_BYTES", "_MIN_UNIT_BYTES"):
            patch.setattr(f"flexgen_helm.offload.weights.{name}", UNIT_BYTES)
        patch.setattr("flexgen_helm.offload.transfer_manager.COPY_BUFFER_BYTES", UNIT_BYTES // 10)
        run(
            folder, requests(share_of(8, 2), 20, 5), torch.float16, limits=LIMITS, policy=policy, schedule="zigzag",
            cpu_attention=bool(host_s),
        )  # fmt: skip
    device.check()
    (began, before), (ended, after) = marks[2], marks[-1]
    return ended - began, after - before


@pytest.fixture(scope="module")
def slowdown(folder):
    """slowdown(policy, ratio): seconds of a pass, as a multiple of what its busiest resource takes.

    ratio: seconds of products, and of the host's attention, which they wait for, to those of the link.
    """
    known = {}

    def measured(policy, ratio, wake=0.0):
        if policy not in known:
            known[policy] = passes(folder, policy, Clock(), 1e-6 * (policy is BOTH))[1]
        work = known[policy]
        computing = ratio * work["in"] * (0.5 if policy is BOTH else 1.0)
        host_s = computing * 1e-6 / work["host"] if policy is BOTH else 0.0
        clock = Clock(wake * UNIT_BYTES / 1e9, compute=1e9 * work["compute"] / computing)
        seconds, busy = passes(folder, policy, clock, host_s)
        return seconds / max(busy["compute"] + busy["host"], busy["in"], busy["out"])

    return measured


@pytest.mark.fast(1)
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("policy", [WEIGHTS, CACHES, BOTH], ids=["weights", "caches", "host attention"])
def test_a_pass_takes_what_its_busiest_resource_takes(slowdown, policy, ratio):
    assert slowdown(policy, ratio) <= BOUND


@pytest.mark.slow
def test_threads_that_wake_late_leave_no_gap_on_the_link(slowdown):
    """A tenth of a unit's copy: another thread's copy is under way meanwhile."""
    assert slowdown(WEIGHTS, 0.25, wake=0.1) <= BOUND


def test_a_load_behind_all_products_would_be_slow(slowdown, monkeypatch):
    """The inverse: a load that waits for whatever is launched by then, as one event for all slots makes it."""
    load = WeightPrefetcher._load

    def late(self, unit, slot):
        if slot.after is not None:
            slot.after = self._tiers.launched()
        return load(self, unit, slot)

    monkeypatch.setattr(WeightPrefetcher, "_load", late)
    assert slowdown(WEIGHTS, 1.0) > 1.3
