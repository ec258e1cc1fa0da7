"""Where Triton does not work, plain torch takes over for the rest of the process, with one warning."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexgen_helm.hardware.process_state import TRITON, switched_off
from flexgen_helm.offload import linear
from flexgen_helm.planner.placement import DEVICE_UPCAST_ELEMENTS
from flexgen_helm.progress import Message, observed_by
from flexgen_helm.quant import kernels
from flexgen_helm.quant.blocks import decode
from flexgen_helm.quant.formats import BLOCK_FORMATS
from flexgen_helm.quant.packing import dequantize, quantize
from flexgen_helm.quant.precisions import PRECISIONS

triton = pytest.importorskip("triton")

from flexgen_helm.quant import triton_launches  # noqa: E402
from tests.helpers.blocks import drawn_blocks  # noqa: E402
from tests.helpers.triton_driver import RecordingDriver, recording_driver  # noqa: E402

OURS, Q4_0 = PRECISIONS["4bit"].weights, BLOCK_FORMATS["Q4_0"]


@pytest.fixture
def packed(monkeypatch):
    """A packed matrix that counts as one on a CUDA device, in a process where Triton has not failed yet."""
    monkeypatch.delitem(switched_off, TRITON, raising=False)
    monkeypatch.setattr(kernels, "_is_for_triton", lambda *tensors: True)
    return quantize(torch.randn(70, 48, generator=torch.Generator().manual_seed(0)), OURS)


def use(packed):
    """Dequantize twice; returns the warnings."""
    events: list[Any] = []
    with observed_by(events.append):
        for _ in range(2):
            out = kernels.dequantize_into(packed, OURS, torch.full((70, 48), torch.nan))
            assert torch.equal(out, dequantize(packed, OURS, 70, 48))
    assert all(isinstance(event, Message) and event.is_warning for event in events)
    return [event.text for event in events]


def test_without_a_driver(packed):
    """As on this machine: Triton itself says that there is no GPU."""
    (warning,) = use(packed)
    assert "plain PyTorch" in warning and "active drivers" in warning


def test_without_a_c_compiler(packed, monkeypatch):
    from triton.runtime import build

    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    find = build._find_compiler.__wrapped__
    arguments = ("c",) if find.__code__.co_argcount else ()
    monkeypatch.setattr(RecordingDriver, "launcher_cls", lambda *_: find(*arguments))
    with recording_driver(75):
        (warning,) = use(packed)
    assert "C compiler" in warning


def test_with_a_kernel_that_does_not_compile(packed, monkeypatch):
    @triton.jit
    def broken(packed: Any) -> None:
        pass

    monkeypatch.setattr(triton_launches.Launch, "run", lambda self, *_, **__: broken[(1,)](torch.zeros(1)))
    with recording_driver(75):
        (warning,) = use(packed)
    assert "CompilationError" in warning and "\n" not in warning


def test_without_triton(packed, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "flexgen_helm.quant.triton_launches", None)
    (warning,) = use(packed)
    assert "Error" in warning


def test_published_bytes_without_a_driver(monkeypatch):
    """As on this machine, by the same warning."""
    monkeypatch.delitem(switched_off, TRITON, raising=False)
    monkeypatch.setattr(kernels, "_is_for_triton", lambda *_: True)
    blocks = drawn_blocks(Q4_0, 5, 96)
    events: list[Any] = []
    with observed_by(events.append):
        for _ in range(2):
            out = kernels.dequantize_into(blocks, Q4_0, torch.full((5, 96), torch.nan, dtype=torch.float16))
            assert torch.equal(out, decode(blocks, Q4_0).half())
    assert len(events) == 1 and "active drivers" in events[0].text


def test_published_bytes_take_the_kernel(monkeypatch):
    monkeypatch.delitem(switched_off, TRITON, raising=False)
    monkeypatch.setattr(kernels, "_is_for_triton", lambda *_: True)
    monkeypatch.setattr(kernels, "decode_into", None)
    with recording_driver(80) as driver:
        kernels.dequantize_into(drawn_blocks(Q4_0, 5, 96), Q4_0, torch.empty(5, 96, dtype=torch.bfloat16))
    assert len(driver.launched) == 1 and TRITON not in switched_off


def test_a_kernel_that_works_is_used_and_nothing_is_said(packed, monkeypatch):
    """The inverse: what is launched is not repeated by plain torch."""
    monkeypatch.setattr(kernels, "dequantize_with_torch", None)
    events: list[Any] = []
    with recording_driver(75) as driver, observed_by(events.append):
        kernels.dequantize_into(packed, OURS, torch.empty(70, 48))
    assert len(driver.launched) == 1 and not events


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("out of memory")]
)
def test_too_little_memory_is_the_callers_affair(packed, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(triton_launches.Launch, "run", fail)
    with pytest.raises(type(error)):
        kernels.dequantize_into(packed, OURS, torch.empty(70, 48))
    assert TRITON not in switched_off


def test_triton_takes_what_its_kernels_can_address():
    class OnDevice:
        is_cuda = True

        def __init__(self, stride, at, is_contiguous=True):
            self._stride, self._at, self._is_contiguous = stride, at, is_contiguous

        def stride(self, dim):
            return self._stride[dim]

        def storage_offset(self):
            return self._at

        def is_contiguous(self):
            return self._is_contiguous

    good, odd, apart = OnDevice((36, 1), 4096), OnDevice((35, 1), 4097), OnDevice((36, 2), 4096, False)
    for fmt in (OURS, Q4_0):
        assert kernels._is_for_triton(good, fmt, good)
        assert not kernels._is_for_triton(apart, fmt, good) and not kernels._is_for_triton(good, fmt, apart)
        assert not kernels._is_for_triton(good, fmt, torch.zeros(1))
        assert not kernels._is_for_triton(torch.zeros(2, 2), fmt, good)
    for unsuited in (OnDevice((36, 1), 4097), OnDevice((35, 1), 4096)):
        assert not kernels._is_for_triton(unsuited, OURS, good)
    assert kernels._is_for_triton(odd, Q4_0, good)  # blocks are read byte by byte


@pytest.mark.parametrize("rows, width, tiles", [(33, 64, 1), (28672, 8192, 1), (53248, 16384, 4)])
def test_on_a_device_a_matrix_is_one_tile_up_to_a_bound(monkeypatch, rows, width, tiles):
    """Launches of a product do not grow with its size; those of a 405B model's matrix are few."""
    seen = []
    monkeypatch.setattr(linear, "dequantize_into", lambda packed, fmt, out: seen.append(out) or out)
    with torch.device("meta"):
        packed = torch.empty((OURS.num_stripes(rows), OURS.stripe_bytes(width)), dtype=torch.uint8)
        x = torch.empty((600, width), dtype=torch.float16)
        linear.tiled_linear(x, packed, None, OURS, rows)
        assert len(seen) == tiles and sum(out.shape[0] for out in seen) == rows
        assert max(out.numel() for out in seen) <= DEVICE_UPCAST_ELEMENTS
        seen.clear()
        linear.dequantize_tiled(packed, OURS, rows, width, torch.float16)
        assert len(seen) == tiles
