"""The device itself: it refuses what CUDA refuses, finds what nothing orders, and lets alone what is right."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import torch

from tests.cuda.device import DeviceMixError, cuda_in_host_memory


@pytest.fixture
def device():
    """Without the check at the end: these tests look at the races themselves."""
    with cuda_in_host_memory(num_devices=2) as found:
        yield found


@pytest.mark.parametrize(
    "mix",
    [
        lambda gpu, cpu: gpu + cpu,
        lambda gpu, cpu: torch.cat((gpu, cpu)),
        lambda gpu, cpu: gpu @ cpu,
        lambda gpu, cpu: gpu.add_(cpu),
        lambda gpu, cpu: gpu + gpu.to("cuda:1"),
    ],
)
def test_a_mix_of_devices_raises(device, mix):
    with pytest.raises(DeviceMixError):
        mix(torch.ones(3, 3, device="cuda"), torch.ones(3, 3))
    assert device.mixes
    with pytest.raises(AssertionError, match="several devices"):
        device.check()


def test_numpy_cannot_read_the_device(device):
    with pytest.raises(TypeError, match="can't convert"):
        torch.ones(3, device="cuda").numpy()
    assert (torch.ones(3, device="cuda") + torch.tensor(2.0)).tolist() == [3.0] * 3  # a number is no mix


def test_a_stream_that_does_not_wait_is_a_race(device):
    side = torch.cuda.Stream()
    x = torch.zeros(8, device="cuda")
    with torch.cuda.stream(side):
        x.add_(1)
    assert device.races
    with pytest.raises(AssertionError, match="nothing orders"):
        device.check()


@pytest.mark.parametrize("way", ["event", "wait_stream", "synchronize", "host"])
def test_a_stream_that_waits_is_none(device, way):
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    x = torch.zeros(8, device="cuda")
    event.record()
    if way == "event":
        side.wait_event(event)
    elif way == "wait_stream":
        side.wait_stream(torch.cuda.current_stream())
    elif way == "synchronize":
        torch.cuda.synchronize()
    else:
        event.synchronize()
    with torch.cuda.stream(side):
        x.add_(1)
    device.check()


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("size", [1024, 512])
def test_memory_of_a_stream_is_reused_under_the_reader(device, recorded, size):
    """What another stream reads is freed, and the next tensor, a smaller one too, is written into the same bytes."""
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(side):
        x = torch.zeros(1024, dtype=torch.uint8, device="cuda")
    event.record(side)
    torch.cuda.current_stream().wait_event(event)
    x.add(1)
    if recorded:
        x.record_stream(torch.cuda.current_stream())
    first = x.data_ptr()
    del x
    with torch.cuda.stream(side):
        y = torch.zeros(size, dtype=torch.uint8, device="cuda")
    assert (y.data_ptr() == first) != recorded
    assert bool(device.races) != recorded


@pytest.mark.parametrize("waits", [False, True])
def test_the_host_reads_pinned_memory_that_a_copy_still_writes(device, waits):
    target = torch.empty(4, pin_memory=True)
    target.copy_(torch.ones(4, device="cuda"), non_blocking=True)
    if waits:
        torch.cuda.current_stream().synchronize()
    assert (target + 1).tolist() == [2.0] * 4
    assert bool(device.races) != waits


@pytest.mark.parametrize("order", ["Lock", "RLock", "Condition", "nothing"])
def test_threads_that_share_no_lock_race(device, order):
    memory, lock = torch.empty(2, pin_memory=True), nullcontext() if order == "nothing" else getattr(threading, order)()
    turn: list[int] = []

    def write() -> None:
        memory.fill_(1.0)
        with lock:
            turn.append(1)

    thread = threading.Thread(target=write)
    thread.start()
    is_over = False
    while not is_over:
        with lock:
            is_over = bool(turn)
    memory.sum()
    assert bool(device.races) == (order == "nothing")
    thread.join()


def test_memory_runs_out_where_it_is_told_to(device):
    device.memory[0].failing = {1}
    torch.empty(8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(8, device="cuda")
    torch.cuda.set_per_process_memory_fraction(0.25)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    kept = torch.empty(8, device="cuda")
    free, total = torch.cuda.mem_get_info()
    assert total - free == 2 << 20
    del kept
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info() == (total, total)


def test_the_process_is_as_before():
    before = threading.Thread.run, threading.Lock, torch.cuda.is_available, torch._C._only_lift_cpu_tensors()
    with cuda_in_host_memory():
        assert torch.cuda.is_available() and threading.Thread.run is not before[0]
        kept = threading.Lock()
    assert (threading.Thread.run, threading.Lock, torch.cuda.is_available, torch._C._only_lift_cpu_tensors()) == before
    with kept:
        assert torch.ones(2).sum() == 2
