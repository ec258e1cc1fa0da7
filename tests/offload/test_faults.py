"""When memory runs out, a transfer fails or the process dies: the same answers in the end, or one
clear error.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm import Engine, GenerationRequest, MemoryLimits
from flexgen_helm.engine.executor import Executor
from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.kv_cache import cache, fetched_storage
from flexgen_helm.offload import weights
from flexgen_helm.offload.copy_engine import SimulatedCopyEngine
from flexgen_helm.offload.disk import DirectFile
from flexgen_helm.offload.matrices import DiskMatrix
from tests.helpers.faults import replaced
from tests.helpers.layers import replace_layers
from tests.helpers.offload import claims
from tests.helpers.parity import assert_same, prompts

MIB = 1 << 20
LIMITS = MemoryLimits(gpu=64 * MIB, cpu=64 * MIB, disk=256 * MIB)
NO_MEMORY = {
    "MemoryError": MemoryError,
    "torch.OutOfMemoryError": lambda: torch.OutOfMemoryError("CUDA out of memory"),
    "a driver": lambda: torch.AcceleratorError("CUDA error: out of memory"),
    "the host's allocator": lambda: RuntimeError(
        "DefaultCPUAllocator: can't allocate memory: you tried to ..."
    ),
}


def workload():
    """Of each kind: scoring, one token, greedy, sampled, several completions over one prompt."""
    kinds = [dict(max_tokens=0), dict(max_tokens=1), dict(max_tokens=6), dict(max_tokens=5, temperature=0.9),
             dict(max_tokens=4, temperature=0.9, n=3)]  # fmt: skip
    return [
        GenerationRequest(
            prompt_token_ids=prompt,
            echo_logprobs=i % 3 == 0,
            seed=i,
            ignore_eos=True,
            **kinds[i % 5],
        )
        for i, prompt in enumerate(prompts(10, 30, seed=4), start=5)
    ]


@pytest.fixture(scope="module")
def expected(tiny):
    with Engine.from_pretrained(tiny("llama").path) as engine:
        return engine.run(workload())


def offloaded(tiny, folder, schedule="zigzag", policy="6x2,0,0,0,100,0,0", **options):
    options = {"limits": LIMITS, **options}
    return Engine.from_pretrained(
        tiny("llama").path, policy=policy, schedule=schedule, offload_dir=folder, **options
    )


def assert_same_tokens(found, expected):
    tokens = [
        [[c.token_ids for c in result.completions] for result in results]
        for results in (found, expected)
    ]
    assert tokens[0] == tokens[1]


def assert_idle(engine):
    """Only the weights, their staging ring and the loaders' buffers are claimed."""
    kinds = [kind for tier in claims(engine).values() for kind in tier]
    assert {*kinds} <= {"weights", "staging", "buffers"} and kinds.count("staging") <= 1


# Where memory runs out: between items, in the layers' or the head's products, and in threads that
# load.
FAULTS = {
    "an item": (Executor, "_compute", 60),
    "the end of an item": (Executor, "_compute", 60),
    "a product": (weights, "tiled_linear", 300),
    "the logits": (Executor, "_predict", 8),
    "a loader": (DiskMatrix, "fetch", 150),
}


@settings(max_examples=25)
@given(
    fault=st.sampled_from(list(FAULTS)),
    share=st.floats(0, 1),
    kind=st.sampled_from(list(NO_MEMORY)),
    options=st.fixed_dictionaries(
        {
            "schedule": st.sampled_from(["zigzag", "row"]),
            "policy": st.sampled_from(
                ["6x2,0,0,0,100,0,0", "6x2,0,50,0,0,0,50", "12x1,0,0,0,50,0,100"]
            ),
            "overlap": st.booleans(),
        }
    ),
)
def test_a_batch_for_which_memory_runs_out_is_halved(tiny, expected, tmp_path, **drawn):
    fault = drawn["fault"]
    owner, name, calls = FAULTS[fault]
    with (
        pytest.MonkeyPatch.context() as patch,
        offloaded(tiny, tmp_path, **drawn["options"]) as engine,
    ):
        at, error = int(drawn["share"] * calls), NO_MEMORY[drawn["kind"]]
        once = replaced(patch, owner, name, at, error, fault.startswith("the end"))
        try:
            results = engine.run(workload())
        except MemoryLimitError as error:
            assert once.raised and "cannot be divided" in str(error)
            results = engine.run(workload())  # nothing of the broken run is left over
        else:
            assert engine.last_run["halvings"] == int(once.raised)
        assert_idle(engine)
    assert_same(results, expected)


def test_halving_is_recorded_and_goes_on_until_it_fits(tiny, expected, tmp_path, monkeypatch):
    """Memory for 20 tokens a batch: 12 rows shrink step by step, and later batches stay small."""
    honest, sizes = Executor._new_state, []

    def narrow(self, batch):
        if batch.num_tokens > 20 and len(batch.scheduled) > 1:
            raise MemoryError
        sizes.append(batch.num_tokens)
        return honest(self, batch)

    monkeypatch.setattr(Executor, "_new_state", narrow)
    with offloaded(tiny, tmp_path) as engine:
        results = engine.run(workload())
        assert engine.last_run["halvings"] >= 2
        assert engine.run(workload()[:1])[0].error is None and engine.last_run["halvings"] == 0
    assert_same(results, expected)


@pytest.mark.parametrize("overlap", [True, False])
def test_what_cannot_be_divided_is_an_error_and_the_engine_lives(
    tiny, expected, tmp_path, monkeypatch, overlap
):
    with offloaded(tiny, tmp_path, overlap=overlap) as engine:
        with monkeypatch.context() as patch:
            replace_layers(patch, never_enough)
            with pytest.raises(
                MemoryLimitError,
                match=("in a batch that cannot be divided; raise --gpu-memory, or"),
            ):
                engine.run(workload())
        assert engine.last_run == {}
        assert_same(engine.run(workload()), expected)


def never_enough(*args, **kwargs):
    raise MemoryError


def test_a_cache_that_cannot_be_stored_is_never_read_as_if_it_were(
    tiny, expected, tmp_path, monkeypatch
):
    """Memory runs out in the thread that writes a prompt's cache: the pass that could write it
    again is over, so halving would read what was never written.
    """
    with offloaded(tiny, tmp_path, policy="6x2,0,100,0,0,0,100") as engine:
        for at in range(0, 40, 5):
            with monkeypatch.context() as patch:
                once = replaced(patch, DirectFile, "write", at, MemoryError)
                try:
                    results = engine.run(workload())
                except MemoryLimitError as error:
                    assert once.raised and "cache was stored" in str(error)
                else:
                    assert_same(results, expected)  # the rows ended before they needed it
        assert_same(engine.run(workload()), expected)


@pytest.mark.fast(1)
@pytest.mark.parametrize("precision, mib", [("fp16", 0.4), ("4bit", 0.8), ("paper-4bit", 1.6)])
def test_a_small_disk_makes_small_blocks(tiny, tmp_path, precision, mib):
    """Prompts and steps of a cache on the disk fill whole pages, which rows wait for as for any
    other room.
    """
    requests = [
        GenerationRequest(
            prompt_token_ids=prompt,
            max_tokens=9,
            ignore_eos=True,
            n=1 + i % 2,
            temperature=0.5,
            seed=i,
        )
        for i, prompt in enumerate(prompts(24, 70, seed=4))
    ]
    with Engine.from_pretrained(
        tiny("llama").path, precision=precision, offload_dir=tmp_path
    ) as engine:
        expected = engine.run(requests)
    limits = MemoryLimits(cpu=64 * MIB, disk=int(mib * MIB))
    with offloaded(
        tiny,
        tmp_path,
        policy="8x3,0,100,0,0,0,100",
        precision=precision,
        device="cpu",
        limits=limits,
    ) as engine:
        results = engine.run(requests)
        assert 0 < engine.last_run["peak_bytes"]["disk"] <= limits.disk
    assert_same_tokens(results, expected)


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    "precision, policy, allocates",
    [
        ("fp16", "6x2,0,100,0,100,0,100", (SimulatedCopyEngine, "host_memory")),
        ("paper-4bit", "6x2,0,100,100,0,100,0", (cache, "zeros")),
        ("fp16", "6x2,0,0,0,0,100,0", (fetched_storage, "zeros")),
        ("4bit", "6x2,0,0,0,0,100,0", (fetched_storage, "zeros")),
    ],
    ids=["host", "device", "disk", "residual window"],
)
def test_a_cache_that_finds_no_memory_leaves_no_claim(
    tiny, tmp_path, monkeypatch, precision, policy, allocates
):
    """Beside the computing, in host memory, on the disk; the room is the next attempt's, and
    closing balances.
    """
    with offloaded(
        tiny, tmp_path, policy=policy, precision=precision, device="sim", cpu_attention=False
    ) as engine:
        expected = engine.run(workload())
        for at in (0, 1, 2, 5):
            with monkeypatch.context() as patch:
                once = replaced(patch, *allocates, at, MemoryError)
                try:
                    results = engine.run(workload())
                except MemoryLimitError as error:
                    assert "cannot be divided" in str(error) or "cache was stored" in str(error)
                else:
                    assert_same_tokens(results, expected)
            assert_idle(engine)
            assert once.calls  # the fault was on the way
