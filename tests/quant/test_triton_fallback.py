"""Where Triton does not work, plain torch takes over for the rest of the process, with one
warning.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexgen_helm.hardware.fast_paths import TRITON, switched_off
from flexgen_helm.offload import linear
from flexgen_helm.progress import Message, observed_by
from flexgen_helm.quant import dequantization
from flexgen_helm.quant.block_formats import BLOCK_FORMATS
from flexgen_helm.quant.blocks import decode
from flexgen_helm.quant.packing import dequantize, quantize
from flexgen_helm.quant.precisions import PRECISIONS
from flexgen_helm.shared_sizes import DEVICE_UPCAST_ELEMENTS

triton = pytest.importorskip("triton")

from flexgen_helm.quant import triton_launches  # noqa: E402
from tests.helpers.blocks import drawn_blocks  # noqa: E402
from tests.helpers.triton_driver import RecordingDriver, recording_driver  # noqa: E402

OURS, Q4_0 = PRECISIONS["4bit"].weights, BLOCK_FORMATS["Q4_0"]
GROUPS = quantize(torch.randn(70, 48, generator=torch.Generator().manual_seed(0)), OURS)
BLOCKS = drawn_blocks(Q4_0, 5, 96)
MATRICES = {
    "ours": (GROUPS, OURS, dequantize(GROUPS, OURS, 70, 48)),
    "published": (BLOCKS, Q4_0, decode(BLOCKS, Q4_0)),
}


@pytest.fixture(autouse=True)
def on_a_device(monkeypatch):
    """Packed matrices count as those of a CUDA device, in a process where Triton has not failed
    yet.
    """
    monkeypatch.delitem(switched_off, TRITON, raising=False)
    monkeypatch.setattr(dequantization, "_is_for_triton", lambda *tensors: True)


def use(name="ours"):
    """Dequantize twice by plain torch; return the warnings."""
    events: list[Any] = []
    packed, fmt, expected = MATRICES[name]
    with observed_by(events.append):
        for _ in range(2):
            assert torch.equal(
                dequantization.dequantize_into(packed, fmt, torch.full_like(expected, torch.nan)),
                expected,
            )
    assert all(isinstance(event, Message) and event.is_warning for event in events)
    return [event.text for event in events]


@pytest.mark.parametrize("name", MATRICES)
def test_without_a_driver(name):
    """As on this machine: Triton itself says that there is no GPU."""
    (warning,) = use(name)
    assert "plain PyTorch" in warning and "active drivers" in warning


def without_a_c_compiler(patch):
    from triton.runtime import build

    patch.delenv("CC", raising=False)
    patch.setenv("PATH", "")
    find = build._find_compiler.__wrapped__
    arguments = ("c",) if find.__code__.co_argcount else ()
    patch.setattr(RecordingDriver, "launcher_cls", lambda *_: find(*arguments))


def with_a_kernel_that_does_not_compile(patch):
    @triton.jit
    def broken(packed: Any):  # an annotation that is no type of Triton
        pass

    patch.setattr(
        triton_launches.Launch, "run", lambda self, *_, **__: broken[(1,)](torch.zeros(1))
    )


def without_triton(patch):
    patch.setitem(sys.modules, "flexgen_helm.quant.triton_launches", None)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (without_a_c_compiler, "C compiler"),
        (with_a_kernel_that_does_not_compile, "CompilationError"), (without_triton, "Error"),
    ],
)  # fmt: skip
def test_what_fails_is_named_once(monkeypatch, fault, says):
    fault(monkeypatch)
    with recording_driver(75):
        (warning,) = use()
    assert says in warning and "\n" not in warning


@pytest.mark.parametrize("name", MATRICES)
def test_a_kernel_that_works_is_used_and_nothing_is_said(monkeypatch, name):
    """What is launched is not repeated by plain torch."""
    monkeypatch.setattr(dequantization, "dequantize_with_torch", None)
    monkeypatch.setattr(dequantization, "decode_into", None)
    packed, fmt, expected = MATRICES[name]
    events: list[Any] = []
    with recording_driver(80) as driver, observed_by(events.append):
        dequantization.dequantize_into(packed, fmt, torch.empty_like(expected))
    assert len(driver.launched) == 1 and not events and TRITON not in switched_off


@pytest.mark.parametrize(
    "error",
    [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("out of memory")],
)
def test_too_little_memory_is_the_callers_affair(monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(triton_launches.Launch, "run", fail)
    with pytest.raises(type(error)):
        use()
    assert TRITON not in switched_off


def test_triton_takes_what_its_kernels_can_address(monkeypatch):
    monkeypatch.undo()
    made = torch.empty(3, 37, dtype=torch.uint8).as_strided

    def on_device(stride, at):
        """Of a CUDA device, as far as is asked."""
        view = made((2, 4), stride, at)
        asked = {
            name: getattr(view, name) for name in ("stride", "storage_offset", "is_contiguous")
        }
        return SimpleNamespace(is_cuda=True, **asked)

    good, odd, apart = on_device((4, 1), 16), on_device((5, 1), 17), on_device((8, 2), 16)
    for fmt in (OURS, Q4_0):
        assert dequantization._is_for_triton(good, fmt, good)
        assert not dequantization._is_for_triton(
            apart, fmt, good
        ) and not dequantization._is_for_triton(good, fmt, apart)
        assert not dequantization._is_for_triton(good, fmt, torch.zeros(1))
        assert not dequantization._is_for_triton(torch.zeros(2, 2), fmt, good)
    assert not dequantization._is_for_triton(odd, OURS, good)
    assert dequantization._is_for_triton(odd, Q4_0, good)  # blocks are read byte by byte


@pytest.mark.parametrize("rows, width, tiles", [(33, 64, 1), (28672, 8192, 1), (53248, 16384, 4)])
def test_on_a_device_a_matrix_is_one_tile_up_to_a_bound(monkeypatch, rows, width, tiles):
    """Launches of a product do not grow with its size; those of a 405B model's matrix are few."""
    seen = []
    monkeypatch.setattr(linear, "dequantize_into", lambda packed, fmt, out: seen.append(out) or out)
    with torch.device("meta"):
        packed = torch.empty((OURS.num_stripes(rows), OURS.stripe_bytes(width)), dtype=torch.uint8)
        x = torch.empty((600, width), dtype=torch.float16)
        linear.tiled_linear(x, packed, None, (OURS, rows))
        assert len(seen) == tiles and sum(out.shape[0] for out in seen) == rows
        assert max(out.numel() for out in seen) <= DEVICE_UPCAST_ELEMENTS
        seen.clear()
        linear.dequantize_tiled(packed, OURS, rows, width, torch.float16)
        assert len(seen) == tiles
