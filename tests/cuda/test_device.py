"""The device itself: it refuses what CUDA refuses, finds what nothing orders, and lets alone what
is right.

`test_mutants.py` shows that it finds each wait that the package forgets.
"""

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
        lambda gpu, cpu: gpu.add_(cpu),
        lambda gpu, cpu: gpu + torch.ones(3, 3, device="cuda:1"),
    ],
)
def test_a_mix_of_devices_raises(device, mix):
    with pytest.raises(DeviceMixError):
        mix(torch.ones(3, 3, device="cuda"), torch.ones(3, 3))
    with pytest.raises(AssertionError, match="several devices"):
        device.check()


def test_numpy_cannot_read_the_device(device):
    with pytest.raises(TypeError, match="can't convert"):
        torch.ones(3, device="cuda").numpy()
    # a number is no mix
    assert (torch.ones(3, device="cuda") + torch.tensor(2.0)).tolist() == [3.0] * 3


WAITS = {
    "nothing": lambda side, event: None,
    "event": lambda side, event: side.wait_event(event),
    "stream": lambda side, event: side.wait_stream(torch.cuda.current_stream()),
    "device": lambda side, event: torch.cuda.synchronize(),
    "host": lambda side, event: event.synchronize(),
}


@pytest.mark.parametrize("wait", WAITS)
def test_a_stream_that_does_not_wait_is_a_race(device, wait):
    side, event, x = torch.cuda.Stream(), torch.cuda.Event(), torch.zeros(8, device="cuda")
    event.record()
    WAITS[wait](side, event)
    with torch.cuda.stream(side):
        x.add_(1)
    assert bool(device.races) == (wait == "nothing")


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_that_another_stream_still_reads_must_not_be_freed(device, recorded):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.zeros(8, device="cuda")
    torch.cuda.current_stream().wait_stream(side)
    x.add(1)
    if recorded:
        x.record_stream(torch.cuda.current_stream())
    del x
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
    memory, lock = (
        torch.empty(2, pin_memory=True),
        nullcontext() if order == "nothing" else getattr(threading, order)(),
    )
    turn = []

    def write():
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
    device.memory[0].failing = {0}
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
        torch.cuda.set_per_process_memory_fraction(0.25)


def test_the_process_is_as_before():
    before = (
        threading.Thread.run,
        threading.Lock,
        torch.cuda.is_available,
        torch._C._only_lift_cpu_tensors(),
    )
    with cuda_in_host_memory():
        kept = threading.Lock()
    assert (
        threading.Thread.run,
        threading.Lock,
        torch.cuda.is_available,
        torch._C._only_lift_cpu_tensors(),
    ) == before
    with kept:
        assert torch.ones(2).sum() == 2
