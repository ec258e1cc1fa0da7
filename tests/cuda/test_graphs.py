"""CUDA graphs: what a capture forbids, and decoding by graphs, whose numbers are those of launching each kernel."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from flexgen_helm import MemoryLimits, Policy
from flexgen_helm.checkpoint.names import resolve
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.engine.attention_metadata import AttentionMetadata
from flexgen_helm.engine.cuda_graphs import LayerGraphs
from flexgen_helm.offload.transfer_manager import TransferManager
from flexgen_helm.progress import Message, observed_by
from tests.cuda.device import Device, cuda_in_host_memory
from tests.cuda.engine_runs import MIB, ROOMY, assert_close, each_family, requests, run
from tests.helpers.shares import share
from tests.helpers.tiny_models import VARIANTS


def captured(device: Device, body: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            body()
        finally:
            graph.capture_end()
    return graph


# The device


@pytest.mark.parametrize(
    "forbidden",
    [
        lambda x: x.sum().item(),
        lambda x: x.copy_(torch.ones(3)),
        lambda x: torch.empty(3, pin_memory=True),
        lambda x: torch.cuda.empty_cache(),
    ],
)
def test_a_capture_forbids(cuda_device, forbidden):
    x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="previous error during capture") as found:
        captured(cuda_device, lambda: forbidden(x))
    assert "not permitted when stream is capturing" in str(found.value.__context__)
    assert captured(cuda_device, lambda: x.add_(1.0)), "the next one works"


def test_memory_that_was_freed_is_noticed(cuda_device):
    kept, inputs = torch.ones(3, device="cuda"), [torch.ones(3, device="cuda")]
    graph = captured(cuda_device, lambda: kept.add_(inputs[0]))
    graph.replay()
    inputs.clear()
    with pytest.raises(RuntimeError, match="memory that was freed"):
        graph.replay()


# Decoding


def answers(path, asked, dtype, **settings):
    """Return the results and the device that computed them."""
    with cuda_in_host_memory() as device:
        results, record = run(path, asked, dtype, **{"limits": ROOMY, **settings})
    device.check()
    return results, device


def compared(path, dtype, asked=None, **settings):
    """Answer by graphs, and by the same operations on the same padded rows launched one by one: bit for bit alike."""
    asked = asked or requests(5, new=6)
    results, device = answers(path, asked, dtype, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerGraphs, "_run", lambda self, key, part: part())
        expected, plain = answers(path, asked, dtype, **settings)
    assert [r.completions for r in results] == [r.completions for r in expected]
    assert not plain.graph_kernels
    return results, device


@pytest.mark.fast(3)
@pytest.mark.parametrize("variant, dtype", share(each_family(VARIANTS, (torch.float16, torch.bfloat16)), 2))
def test_every_family_by_graphs(tiny, variant, dtype):
    model = tiny(variant)
    results, device = compared(model.path, dtype)
    assert_close(model, results, dtype)
    # The host chooses the experts of a mixture.
    experts = open_checkpoint(resolve(model.path, None)).config.experts
    assert bool(device.graph_kernels) == (experts is None or bool(experts.dense_layers))


def test_shared_prefixes_and_samples_by_graphs(tiny):
    asked = requests(8, 20, new=5, shared=40, temperature=0.9, top_p=0.8, seed=3)
    results, device = compared(tiny("llama").path, torch.float16, asked)
    assert device.graph_kernels
    assert_close(tiny("llama"), results, torch.float16)


@pytest.mark.parametrize("schedule, cpu_attention", [("zigzag", True), ("row", False)])
def test_batches_in_turns_do_not_overwrite_each_other(tiny, tmp_path, schedule, cpu_attention):
    """Weights on the device, caches and hidden states in host memory; two batches take turns in every layer."""
    policy = Policy(3, 2, 1.0, 0.0, 0.0, 1.0, 0.5, 0.5)
    settings = dict(policy=policy, schedule=schedule, cpu_attention=cpu_attention, offload_dir=tmp_path)
    results, device = compared(tiny("opt").path, torch.float16, requests(6, new=5), **settings)
    assert device.graph_kernels
    assert_close(tiny("opt"), results, torch.float16)


def test_a_batch_that_kept_the_buffer_would_be_overwritten(tiny, tmp_path, monkeypatch):
    """The inverse: hidden states that wait are copied out of the graphs' buffer."""
    monkeypatch.setattr(LayerGraphs, "owned", lambda self, hidden: hidden)
    policy = Policy(3, 2, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0)
    results, _ = answers(tiny("opt").path, requests(6, new=5), torch.float16, policy=policy, schedule="zigzag")
    with pytest.raises(AssertionError):
        assert_close(tiny("opt"), results, torch.float16)


def test_keys_that_are_stored_from_the_buffer_would_be_overwritten(tiny, tmp_path, monkeypatch):
    """The inverse: what goes to host memory in the background is copied out of it first."""
    monkeypatch.setattr(AttentionMetadata, "caches_on_device", True)
    to_host = TransferManager.to_host

    def late(self, *arguments, **named):
        time.sleep(0.02)  # else it may be over before the next layer begins
        return to_host(self, *arguments, **named)

    monkeypatch.setattr(TransferManager, "to_host", late)
    policy = Policy(3, 2, 1.0, 0.0, 0.0, 1.0, 0.5, 0.5)
    settings = dict(policy=policy, schedule="zigzag", cpu_attention=False, offload_dir=tmp_path)
    with pytest.raises(AssertionError):  # the copy comes too late, or nothing orders it
        results, _ = answers(tiny("opt").path, requests(6, new=5), torch.float16, **settings)
        assert_close(tiny("opt"), results, torch.float16)


@pytest.mark.parametrize("limits", [MemoryLimits(gpu=64 * MIB), ROOMY])
def test_without_room_or_by_request_there_are_no_graphs(tiny, limits):
    settings = {"cuda_graphs": False} if limits is ROOMY else {"limits": limits}
    results, device = answers(tiny("opt").path, requests(3, new=4), torch.float16, **settings)
    assert not device.graph_kernels
    assert_close(tiny("opt"), results, torch.float16)


@pytest.mark.parametrize("number", [0, 3])
def test_a_capture_that_fails_ends_their_use_with_one_warning(tiny, monkeypatch, number):
    honest, calls, events = LayerGraphs._captured, [], []

    def failing(self, part):
        def waiting():
            part()
            torch.cuda.synchronize()

        calls.append(part)
        return honest(self, waiting if len(calls) == number + 1 else part)

    monkeypatch.setattr(LayerGraphs, "_captured", failing)
    asked = requests(5, new=5)
    with observed_by(events.append):
        results, _ = answers(tiny("opt").path, asked, torch.float16)
    warnings = [event.text for event in events if isinstance(event, Message) and event.is_warning]
    assert len(warnings) == 1 and "CUDA graphs do not work here" in warnings[0] and "synchronizing" in warnings[0]
    assert len(calls) == number + 1
    assert_close(tiny("opt"), results, torch.float16)
