"""The engine's CUDA path on the device in host memory: no race, no mix of devices, and the values
of `transformers`.

`make test` runs a selection, `make test-slow` the whole matrix.
"""

import itertools
import math
from dataclasses import asdict

import pytest
import torch

from flexgen_helm import Engine, MemoryLimits
from flexgen_helm.engine import profiler
from flexgen_helm.errors import UsageError
from flexgen_helm.hardware.profile import HardwareProfile
from flexgen_helm.offload.transfer_manager import TransferManager
from flexgen_helm.progress import Message, observed_by
from tests.cuda import counts
from tests.cuda.device import cuda_in_host_memory
from tests.cuda.engine_runs import (
    DISK,
    HOST,
    LIMITS,
    MIB,
    PLACEMENTS,
    THIRDS,
    assert_close,
    each_family,
    requests,
    run,
)  # fmt: skip
from tests.helpers.offload import claims
from tests.helpers.shares import share
from tests.helpers.tiny_models import VARIANTS

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check(model, folder, dtype=torch.float16, asked=None, **settings):
    """Compare a run with `transformers`; return its record and counts."""
    with cuda_in_host_memory() as device, counts.counted(device) as found:
        results, record = run(
            model.path, asked or requests(), dtype, offload_dir=folder, **settings
        )
    device.check()
    assert_close(model, results, dtype)
    return record, found


@pytest.mark.fast(4)
@pytest.mark.parametrize("variant, dtype", each_family(VARIANTS, DTYPES))
def test_every_family(tiny, tmp_path, variant, dtype):
    check(tiny(variant), tmp_path, dtype, policy=THIRDS, schedule="zigzag", cpu_attention=False)


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    "schedule, placement, overlap, cpu_attention",
    share(itertools.product(("row", "zigzag"), PLACEMENTS, (True, False), (True, False)), 2),
)
def test_every_placement(tiny, tmp_path, schedule, placement, overlap, cpu_attention):
    settings = dict(schedule=schedule, overlap=overlap, cpu_attention=cpu_attention)
    if PLACEMENTS[placement] is not None:
        settings["policy"] = PLACEMENTS[placement]
    asked = [*requests(3, 30, 1), *requests(4, 30, 6, shared=20)]
    _, found = check(tiny("llama"), tmp_path, asked=asked, **settings)
    if not cpu_attention:  # the host attends to keys that it has waited for
        counts.check(found)


@pytest.mark.fast(2)
@pytest.mark.parametrize("placement", ["resident", "host", "disk"])
@pytest.mark.parametrize("precision", ["4bit", "4bit-s", "fp16-s", "paper-4bit"])
def test_packed_and_sparse(tiny, tmp_path, precision, placement):
    """Compared with the processor in the same precision: codes at a border flip, so only the mean
    is held.
    """
    model, asked = tiny("llama"), requests(4, 90, 2)
    with Engine.from_pretrained(
        model.path, device="cpu", precision=precision, offload_dir=tmp_path
    ) as engine:
        expected = [x for result in engine.run(asked) for x in result.prompt_logprobs[1:]]
    settings = (
        {} if placement == "resident" else dict(policy=PLACEMENTS[placement], schedule="zigzag")
    )
    with cuda_in_host_memory() as device, counts.counted(device) as found:
        results, _ = run(
            model.path,
            asked,
            torch.float16,
            precision=precision,
            offload_dir=tmp_path,
            cpu_attention=False,
            **settings,
        )
    device.check()
    counts.check(found)
    scores = [x for result in results for x in result.prompt_logprobs[1:]]
    # Where keys are packed and values selected by them, another selection is a larger step.
    bound = 5e-2 if precision == "4bit-s" else 2e-2
    assert sum(abs(a - b) for a, b in zip(scores, expected, strict=True)) / len(scores) < bound


def test_hardware_without_a_gpu_is_refused(tiny, monkeypatch):
    monkeypatch.setenv("FLEXGEN_HELM_HARDWARE", "laptop")
    with (
        cuda_in_host_memory(),
        pytest.raises(UsageError, match="has 0 GPUs and --device is cuda: run"),
    ):
        Engine.from_pretrained(tiny("opt").path, device="cuda", limits=LIMITS)


def test_automatic_plans_of_weights_that_exceed_the_device(tiny, tmp_path, monkeypatch):
    """The search places weights, cache and hidden states; two runs, the second with what the first
    has learnt.
    """
    monkeypatch.setenv("FLEXGEN_HELM_HARDWARE", "t4")
    small = MemoryLimits(gpu=120 << 10, cpu=32 * MIB, disk=256 * MIB)
    record, _ = check(tiny("opt"), tmp_path, limits=small)
    assert record["achieved_placement"]["weights"]["gpu"] < 1 and record["predicted_latency_s"] > 0
    assert record["bytes"]["cpu_to_gpu"]["weights"] > 0


def test_the_machine_is_measured(tmp_path, monkeypatch):
    """`profile`: every operation that it times runs on a device, without a race, and gives a
    rate.
    """
    for name, value in {
        "_ROWS": (1, 16), "_WIDTH": 64, "_DEVICE_WIDTH": 128, "_UNCACHED_BYTES": 4 * MIB,
        "_FILE_BYTES": 4 * MIB, "_CHUNK_BYTES": MIB // 2,
        "_LINK_BYTES": MIB, "_DEVICE_PACKED": (64, 64), "_DEVICE_QUANTIZED": (64, 2, 32),
        "_DEVICE_ATTENTION": (4, 16, 32, 2),
    }.items():  # fmt: skip
        monkeypatch.setattr(profiler, name, value)
    with cuda_in_host_memory() as device:
        profile = profiler.measure(tmp_path)
    device.check()
    assert profile.gpu is not None and set(profile.gpu.matmul_flops) == {
        "float16",
        "bfloat16",
        "float32",
    }
    rates = [
        *asdict(profile.link).values(),
        profile.gpu.attention_flops,
        profile.gpu.dequantize_elements_s,
    ]
    assert all(math.isfinite(rate) and rate > 0 for rate in rates)
    assert HardwareProfile.from_json(profile.to_json()) == profile
    assert any("profiler.py" in line for line in device.pageable_copies), (
        "the rates of pageable memory too"
    )


@pytest.mark.fast(1)
@pytest.mark.parametrize("precision", ["fp16", "4bit"])
def test_a_second_device(tiny, tmp_path, precision):
    """Whatever a thread does, loaders included, is on the engine's device: nothing is on the first
    one.
    """
    model, asked = tiny("llama"), requests(4, 90, 2)
    with cuda_in_host_memory(num_devices=2) as device:
        results, _ = run(
            model.path, asked, torch.float16, device="cuda:1", policy=THIRDS, schedule="zigzag",
            precision=precision, cpu_attention=False, offload_dir=tmp_path,
        )  # fmt: skip
        assert not device.memory[0].num_allocations and device.memory[1].num_allocations
        assert device.registered_from == {1}
    device.check()
    if precision == "fp16":
        assert_close(model, results, torch.float16)


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    "placement, number", [("resident", 3), ("resident", 90), ("host", 3), ("host", 40)]
)
def test_memory_that_runs_out_halves_the_batches(tiny, tmp_path, monkeypatch, placement, number):
    model, asked = tiny("llama"), requests(6, new=4)
    monkeypatch.setattr("flexgen_helm.engine.opening.compute_dtype", lambda *_: torch.float16)
    settings = {"limits": LIMITS, "offload_dir": tmp_path}
    settings |= (
        dict(policy=HOST, schedule="zigzag", cpu_attention=False) if placement == "host" else {}
    )
    with (
        cuda_in_host_memory() as device,
        Engine.from_pretrained(model.path, device="cuda", **settings) as engine,
    ):
        device.memory[0].failing = {device.memory[0].num_allocations + number}
        results = engine.run(asked)
        claims(engine)
        assert device.memory[0].num_allocations > max(device.memory[0].failing)
    device.check()
    assert_close(model, results, torch.float16)


def test_what_crosses_the_link_is_pinned(tiny, tmp_path, monkeypatch):
    """Weights and caches in host memory are pinned, and copied to the device from where they are.

    After loading, only keys and values of prompts, which are spread over their slots, rows of
    tables, and hidden states go through buffers.
    """
    model, sources = tiny("opt"), []
    honest = TransferManager.to_device

    def to_device(self, source, kind, *rest):
        if kind != "activations":
            sources.append(source.is_pinned() and source.is_contiguous())
        return honest(self, source, kind, *rest)

    monkeypatch.setattr(TransferManager, "to_device", to_device)
    with cuda_in_host_memory() as device:
        _, record = run(
            model.path, requests(), torch.float16, policy=HOST, schedule="zigzag",
            cpu_attention=False, offload_dir=tmp_path,
        )  # fmt: skip
    moved = record["bytes"]["cpu_to_gpu"]
    assert all(moved.values()) and sources and all(sources)
    assert record["hardware"]["host_memory"] == "pinned"
    assert not [
        line for line in device.pageable_copies if line.startswith("offload/copy_engine.py")
    ]
    assert not device.registered and device.memory[0].in_use <= 4 * MIB, (
        "freed with the engine, but for small tables"
    )
    matrices = [p for p in model.text_parameters() if p.ndim == 2]
    exact = sum(-(-2 * p.numel() // 4096) * 4096 for p in matrices)
    stored = record["peak_bytes"]["cpu"]
    assert device.peak_registered <= stored + 6 * MIB, (
        "the ledger knows all of it, but for a buffer a thread"
    )
    assert stored > exact, "caches too"


@pytest.mark.parametrize("policy", [HOST, THIRDS, DISK])
def test_a_driver_that_refuses_to_pin(tiny, tmp_path, policy):
    """As WSL does, buffers of threads included: copies are pageable, and the answers are the
    same.
    """
    model, events = tiny("opt"), []
    with cuda_in_host_memory() as device:
        device.register_error = 2
        with observed_by(events.append):
            results, record = run(
                model.path, requests(), torch.float16, policy=policy, schedule="zigzag",
                cpu_attention=False, offload_dir=tmp_path,
            )  # fmt: skip
    device.check()
    assert record["hardware"]["host_memory"] == "pageable"
    assert (
        len(
            [
                event
                for event in events
                if isinstance(event, Message) and "refuses to pin" in event.text
            ]
        )
        == 1
    )
    assert_close(model, results, torch.float16)
