"""On a device a profile's rates are of kernels: what is timed takes longer there than launching
it.
"""

from __future__ import annotations

from math import prod

import torch

from flexgen_helm.engine import profiler
from flexgen_helm.hardware.profile import load_profile, shipped_profiles
from tests.cuda.device import cuda_in_host_memory

# Seconds between two launches of PyTorch, as published measurements of small operations say.
LAUNCH_S = 5e-6
# Bytes that an element's quantization moves in plain PyTorch, and its dequantization by one kernel
# to 16 bits.
QUANTIZED_BYTES, DEQUANTIZED_BYTES = 86.5, 2 + 9 / 16
# Launches of a decode layer of a Llama (`test_counts.py`).
LAYER_LAUNCHES = 24


def launches(calls):
    """Launches of each of the calls."""
    counts = []
    with cuda_in_host_memory() as device:
        for call in calls():
            before = sum(device.kernels.values())
            call()
            counts.append(sum(device.kernels.values()) - before)
    return counts


def test_a_step_is_the_launches_of_a_decode_layer(monkeypatch):
    monkeypatch.setattr(profiler, "_UNCACHED_BYTES", 1 << 20)  # one layer
    timed = []
    monkeypatch.setattr(profiler, "_best", lambda calls, *_: timed.append(calls) or 1.0)

    def calls():
        assert profiler._layer_rates(torch.device("cuda"), torch.float16) == (1.0, float("inf"))
        return timed[0]

    (count,) = launches(calls)
    assert LAYER_LAUNCHES - 4 <= count <= LAYER_LAUNCHES + 4


def test_packing_takes_longer_than_its_launches(monkeypatch):
    packed, quantized = profiler._DEVICE_PACKED, profiler._DEVICE_QUANTIZED
    monkeypatch.setattr(profiler, "_DEVICE_PACKED", (64, 64))
    monkeypatch.setattr(profiler, "_DEVICE_QUANTIZED", (64, 2, 32))
    timed = []
    monkeypatch.setattr(profiler, "_best", lambda calls, *_: timed.append(calls) or 1.0)

    def calls():
        profiler._packing_rates(torch.device("cuda"), torch.float16)
        return [taken[0] for taken in timed]

    unpacking, packing = launches(calls)
    gpu = load_profile("h200").gpu
    assert unpacking * LAUNCH_S < prod(packed) / gpu.dequantize_elements_s
    assert packing * LAUNCH_S < 2 * prod(quantized) / gpu.quantize_elements_s


def test_shipped_rates_of_packing_follow_from_the_memory():
    """The T4 is the machine of the paper, whose rates are of plain PyTorch of its time."""
    for name in set(shipped_profiles()) - {"t4"}:
        if (gpu := load_profile(name).gpu) is not None:
            assert abs(gpu.memory_bytes_s / gpu.dequantize_elements_s - DEQUANTIZED_BYTES) < 0.01
            assert abs(gpu.memory_bytes_s / gpu.quantize_elements_s - QUANTIZED_BYTES) < 0.1
