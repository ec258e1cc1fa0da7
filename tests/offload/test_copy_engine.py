"""Copies over the link: the buffer of a thread. What each copy waits for: tests/cuda."""

from __future__ import annotations

import pytest

from flexgen_helm.offload.transfer_manager import CopyEngine, CudaCopyEngine, SimulatedCopyEngine
from tests.helpers.threads import in_thread


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
