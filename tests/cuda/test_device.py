"""The device itself: it refuses what CUDA refuses, finds what nothing orders, and lets alone what is right."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.cuda.device import DeviceMixError, cuda_in_host_memory


@pytest.fixture
def device():
    """Without the check at the end: these tests look at the races themselves."""
    with cuda_in_host_memory(num_devices=2) as found:
        yield found


def pinned(*values: float) -> torch.Tensor:
    memory = torch.empty(len(values), pin_memory=True)
    memory.copy_(torch.tensor(values))
    return memory


def test_values_are_those_of_the_cpu(device):
    x = torch.arange(12.0).view(3, 4)
    on_gpu = x.to("cuda")
    assert on_gpu.is_cuda and str(on_gpu.device) == "cuda:0"
    assert torch.equal((on_gpu @ on_gpu.t())[1:, ::2].cpu(), (x @ x.t())[1:, ::2])
    on_gpu[1, torch.tensor([0, 2], device="cuda")] = -1.0
    assert on_gpu.tolist()[1] == [-1.0, 5.0, -1.0, 7.0]
    assert torch.zeros(2, device="cuda").sum().item() == 0.0


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


def test_an_event_covers_what_came_before_its_recording(device):
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    event.record()
    x = torch.zeros(8, device="cuda")
    side.wait_event(event)
    with torch.cuda.stream(side):
        x.add_(1)
    assert device.races


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


@pytest.mark.parametrize("waits", [False, True])
def test_the_host_writes_pinned_memory_that_a_copy_still_reads(device, waits):
    source = pinned(1, 2, 3)
    torch.empty(3, device="cuda").copy_(source, non_blocking=True)
    if waits:
        torch.cuda.synchronize()
    source.zero_()
    assert bool(device.races) != waits


def test_threads_that_share_nothing_race(device):
    memory, turn = pinned(0, 0), []

    def write() -> None:
        memory.fill_(1.0)
        turn.append(1)

    thread = threading.Thread(target=write)
    thread.start()
    while not turn:
        pass
    memory.sum()
    assert device.races
    thread.join()


@pytest.mark.parametrize("order", ["Lock", "RLock", "Condition", "join"])
def test_locks_and_joins_order_threads(device, order):
    memory, lock = pinned(0, 0), None if order == "join" else getattr(threading, order)()

    def write() -> None:
        memory.fill_(1.0)
        if lock is not None:
            with lock:
                turn.append(1)

    turn: list[int] = []
    thread = threading.Thread(target=write)
    thread.start()
    if lock is None:
        thread.join()
    else:
        while True:
            with lock:
                if turn:
                    break
    memory.sum()
    device.check()
    thread.join()


def test_it_counts_by_source_line(device):
    from flexgen_helm.offload.transfer_manager import CudaCopyEngine

    engine = CudaCopyEngine(torch.device("cuda"))
    device.reset()
    engine.to_device(torch.ones(4))
    for counter in (device.kernels, device.allocations, device.syncs):
        assert counter and all(line.startswith("offload/transfer_manager.py:") for line in counter)


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
