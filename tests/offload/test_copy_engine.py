"""Copies over the link: what each waits for, and its buffer. With real CUDA: tests/engine/test_gpu_parity.py."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from flexgen_helm.offload.copy_engine import CopyEngine, CudaCopyEngine, SimulatedCopyEngine
from tests.helpers.threads import in_thread


class FakeCuda:
    """Streams and events of `torch.cuda` that only write down what they are told."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.num_streams = 0

    def make_stream(self, device):
        self.num_streams += 1
        return FakeStream(self, ("in", "out")[self.num_streams - 1])

    def make_event(self):
        return FakeEvent(self)


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_event(self, event) -> None:
        self.cuda.log.append(f"{self.name} waits for event {event.number}")

    def synchronize(self) -> None:
        self.cuda.log.append(f"{self.name} is done")


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.number = cuda, 0

    def record(self, stream) -> None:
        self.number += 1
        self.cuda.log.append(f"event {self.number} on {stream.name}")


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "Stream", fake.make_stream)
    monkeypatch.setattr(torch.cuda, "Event", fake.make_event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream(fake, "compute"))
    return fake


def test_memory_in_use_is_overwritten_only_after_the_products_that_read_it(cuda):
    engine = CudaCopyEngine(torch.device("cpu"))
    cuda.log.clear()
    engine.mark_used()
    target = engine.to_device(torch.arange(4), torch.zeros(4, dtype=torch.int64))
    assert target.tolist() == [0, 1, 2, 3]
    assert cuda.log == ["event 2 on compute", "in waits for event 2", "in is done"]


def test_what_is_copied_out_has_been_computed(cuda):
    engine = CudaCopyEngine(torch.device("cpu"))
    cuda.log.clear()
    engine.to_host(torch.arange(4), torch.zeros(4, dtype=torch.int64))
    assert cuda.log == ["event 1 on compute", "out waits for event 1", "out is done"]


def test_a_thread_has_one_buffer_which_grows():
    engine = SimulatedCopyEngine(None, None)
    buffer = engine.thread_buffer(5000)
    assert buffer.numel() >= 5000 and engine.thread_buffer(100).data_ptr() == buffer.data_ptr()
    thread, others = in_thread(lambda: engine.thread_buffer(100))
    thread.join()
    assert others[0].data_ptr() != buffer.data_ptr()
    assert engine.thread_buffer(9000).numel() >= 9000


@pytest.mark.parametrize("kind", [SimulatedCopyEngine, CudaCopyEngine])
def test_every_engine_does_everything(kind):
    assert issubclass(kind, CopyEngine) and not kind.__abstractmethods__
