"""Any placement, schedule, block and limit: the same answers as in memory."""

import random
import time
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm import Engine, MemoryLimits, Policy
from flexgen_helm.quant.precisions import PRECISIONS
from tests.helpers.offload import (
    DECODING_SCHEDULES,
    MIB,
    offloaded,
    policies,
    with_expert_slots,
    workload,
)
from tests.helpers.parity import assert_same
from tests.helpers.shares import share_of
from tests.helpers.tiny_models import VARIANTS

PACKED = [name for name, precision in PRECISIONS.items() if precision.weights is not None]


@pytest.fixture(scope="module")
def in_memory(tiny):
    """in_memory(variant, seed, precision) -> what the resident engine answers."""

    @cache
    def get(variant, seed=0, precision="fp16"):
        with Engine.from_pretrained(tiny(variant).path, precision=precision) as engine:
            return engine.run(workload(seed))

    return get


@pytest.mark.fast(4)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family_from_the_disk(tiny, in_memory, tmp_path, variant):
    """No matrix, no key and no hidden state stays in memory."""
    policy = Policy(3, 2, wg=0, wc=0, cg=0, cc=0, hg=0, hc=0)
    with offloaded(tiny, variant, tmp_path, policy, schedule="zigzag") as engine:
        results = engine.run(workload())
        moved = engine.last_run["bytes"]
        assert engine.last_run["achieved_placement"]["weights"]["disk"] == 1.0
        assert moved["disk_to_cpu"]["weights"] > 0 and moved["cpu_to_disk"]["cache"] > 0
        assert moved["disk_to_cpu"]["activations"] == moved["cpu_to_disk"]["activations"] > 0
    assert_same(results, in_memory(variant))


@settings(max_examples=share_of(24, 2))
@given(
    policy=policies(),
    variant=st.sampled_from(
        ["llama", "opt", "gemma2", "bloom", "mixtral", "qwen3-moe", "qwen3-moe-raw-weights"]
    ),
    precision=st.sampled_from(["fp16", "fp16", *PACKED]),
    slots=st.sampled_from([1, 2, 7, 100]),
    compute_mib=st.sampled_from([4, 8, 64]),
    seed=st.integers(0, 3),
    options=st.fixed_dictionaries(
        {
            "schedule": st.sampled_from(DECODING_SCHEDULES),
            "device": st.sampled_from(["cpu", "sim"]),
            "overlap": st.booleans(),
            "cpu_attention": st.booleans(),
        }
    ),
)
def test_any_placement_gives_the_answers_of_the_resident_engine(tiny, in_memory, tmp_path, **drawn):
    """slots: of experts that are offloaded. Packed weights beside a whole cache: `tests/kv_cache`
    is about that.
    """
    variant, seed, precision = drawn["variant"], drawn["seed"], drawn["precision"]
    options, compute = (
        drawn["options"],
        64 * MIB if variant.startswith(("mixtral", "qwen3-moe")) else drawn["compute_mib"] * MIB,
    )
    limits = MemoryLimits(
        gpu=compute, cpu=64 * MIB if options["device"] == "sim" else compute, disk=256 * MIB
    )
    with pytest.MonkeyPatch.context() as patch:
        with_expert_slots(patch, drawn["slots"])
        patch.setitem(PRECISIONS, precision, replace(PRECISIONS[precision], cache=None))
        more = {"limits": limits, "precision": precision}
        with offloaded(tiny, variant, tmp_path, drawn["policy"], **options, **more) as engine:
            results = engine.run(workload(seed))
        assert_same(results, in_memory(variant, seed, precision))


def test_overlap_changes_no_bit_whatever_the_delays(tiny, tmp_path, monkeypatch):
    """Random delays in every transfer, several times: the same bits as without overlap."""
    from flexgen_helm.offload import copy_engine, disk

    policy = Policy(3, 2, wg=0.3, wc=0.3, cg=0.3, cc=0.3, hg=0.3, hc=0.3)
    with offloaded(
        tiny, "llama", tmp_path, policy, schedule="zigzag", device="sim", overlap=False
    ) as engine:
        expected = engine.run(workload(5))
    draw = random.Random(1)

    def slow(honest):
        def delayed(*args, **kwargs):
            time.sleep(draw.random() * 0.003)
            return honest(*args, **kwargs)

        return delayed

    monkeypatch.setattr(disk.DirectFile, "_transfer", slow(disk.DirectFile._transfer))
    monkeypatch.setattr(
        copy_engine.SimulatedCopyEngine,
        "_copy",
        slow(copy_engine.SimulatedCopyEngine._copy),
    )
    for _ in range(3):
        with offloaded(tiny, "llama", tmp_path, policy, schedule="zigzag", device="sim") as engine:
            assert_same(engine.run(workload(5)), expected, tolerance=0.0)
